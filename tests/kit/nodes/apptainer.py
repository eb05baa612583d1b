"""Apptainer on a release of Debian that has no package of it, and an image of a local tree with this checkout in it.

    python -m tests.kit.nodes.apptainer FOLDER
    PATH=FOLDER/bin:$PATH apptainer exec FOLDER/image.sif python3 -c "import torch"

Apptainer lives in a tree of Debian's packages (mmdebstrap), which are unpacked and not set up. The program in
FOLDER/bin enters the tree in a mount namespace of its own, where this node's folders lie at their own paths, and runs
containers in user namespaces. The image is the libraries of the tree, this process's Python and Paceline. Torch and all
else that is installed here it finds in a folder that Apptainer binds, as environments often lie beside an image: to
copy a gigabyte into an image, and to read it again for its digest on every node at every start, would take longer than
the tests.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

TIMEOUT_S = 900.0

_APPTAINER = ("apptainer", "squashfs-tools", "squashfuse", "fuse2fs", "uidmap")
_SYSTEM = ("base-files", "coreutils", "dash", "libc-bin", "mount", "util-linux")
_LIBRARIES = ("libffi8", "libssl3t64", "libstdc++6", "libsqlite3-0")
"""What the interpreter and torch load from the system."""
_BOUND = "/opt/packages"
"""Where the packages that are installed here lie in a container."""
_COMMANDS = ("mmdebstrap", "unshare", "pivot_root", "mount")

# Not chroot: inside of one there can be no user namespace. What this node and the tree both have in / stays the tree's,
# but for folders of the kernel and of users.
_ENTER = """\
#!/bin/sh
exec unshare --mount --propagation private sh -ec '
    tree=$1 here=$PWD; shift
    mount --bind "$tree" "$tree"
    for folder in /*; do
        case $folder in
        /bin|/boot|/etc|/lib*|/media|/mnt|/opt|/sbin|/srv|/usr|/var) continue;;
        esac
        test -d "$folder" || continue
        mkdir -p "$tree$folder"
        mount --rbind "$folder" "$tree$folder"
    done
    for file in /etc/hosts /etc/resolv.conf /etc/nsswitch.conf /etc/passwd /etc/group; do
        touch "$tree$file"
        mount --bind "$file" "$tree$file"
    done
    mkdir -p "$tree/mnt"
    cd "$tree"; pivot_root . mnt; umount -l /mnt; cd "$here"
    APPTAINER_USERNS=1 APPTAINER_BIND={packages}:{bound}:ro exec /usr/bin/apptainer "$@"
' sh {tree} "$@"
"""


class ApptainerMissingError(Exception):
    """A sentence that says why there is no Apptainer here."""


def why_not_apptainer() -> str | None:
    """Why Apptainer cannot run here, as far as that is known without trying; None if nothing speaks against it."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "a tree with Apptainer in it needs Linux and root"
    if missing := [command for command in _COMMANDS if shutil.which(command) is None]:
        return f"a tree with Apptainer in it needs {', '.join(missing)}"
    return None if Path("/dev/fuse").exists() else "Apptainer reads images through /dev/fuse, which is missing"


def install(folder: Path) -> Path:
    """Make `folder`/bin/apptainer. Raises `ApptainerMissingError`."""
    tree, program = folder / "tree", folder / "bin" / "apptainer"
    # A mirror may have stopped at a day whose list is out of date since; its signature is checked all the same.
    options = ["--variant=extract", '--aptopt=Acquire::Check-Valid-Until "false"']
    options += [f"--include={','.join((*_APPTAINER, *_SYSTEM, *_LIBRARIES))}"]
    _run(["mmdebstrap", "--quiet", *options, "sid", str(tree)])
    (tree / "etc" / "localtime").touch()  # containers are shown it
    program.parent.mkdir()
    program.write_text(_ENTER.format(tree=tree, packages=sysconfig.get_path("purelib"), bound=_BOUND))
    program.chmod(0o755)
    _run([str(program), "--version"])
    return program


def build_image(folder: Path) -> Path:
    """Make `folder`/image.sif, by `folder`/bin/apptainer. Raises `ApptainerMissingError`."""
    tree, image = folder / "base", folder / "image.sif"
    not_needed = shutil.ignore_patterns("apptainer", "cni", "dev", "share", "systemd")
    shutil.copytree(folder / "tree", tree, symlinks=True, copy_function=_link, ignore=not_needed)
    home, library = tree / "opt" / "python", Path(sys.base_prefix) / "lib"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for path in [Path(sys.base_prefix) / "bin" / version, *library.glob("libpython*")]:
        _link(path, home / path.relative_to(sys.base_prefix))
    shutil.copytree(
        library / version,
        home / "lib" / version,
        symlinks=True,
        copy_function=_link,
        ignore=shutil.ignore_patterns("site-packages", "test", "config-*", "ensurepip", "idlelib"),
    )
    # However it is installed here, in the image it is this checkout.
    own = home / "lib" / version / "site-packages"
    shutil.copytree(Path(__file__).parents[3] / "src" / "paceline", own / "paceline")
    (own / "bound.pth").write_text(f"{_BOUND}\n")
    (tree / _BOUND.removeprefix("/")).mkdir()
    (tree / "dev").mkdir()
    (tree / "etc" / "ld.so.conf.d" / "python.conf").write_text("/opt/python/lib\n")
    python = tree / "usr" / "local" / "bin" / "python3"
    python.parent.mkdir(parents=True, exist_ok=True)
    python.symlink_to(f"/opt/python/bin/{version}")
    _run(["chroot", str(tree), "ldconfig"])
    recipe = folder / "image.def"
    recipe.write_text(f"Bootstrap: localimage\nFrom: {tree}\n")
    apptainer = [str(folder / "bin" / "apptainer"), "build", "--mksquashfs-args", "-no-compression -no-xattrs"]
    _run([*apptainer, str(image), str(recipe)])
    shutil.rmtree(tree)
    return image


def _link(source: str | Path, target: str | Path) -> None:
    """The same file under another name where that is possible: an image copies it soon enough."""
    Path(target).parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _run(argv: list[str]) -> None:
    done = subprocess.run(
        argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    if done.returncode != 0:
        lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        raise ApptainerMissingError(f"{Path(argv[0]).name} does not work here: {' / '.join(lines[-3:])}")


if __name__ == "__main__":
    place = Path(sys.argv[1]).resolve()
    place.mkdir(parents=True)
    print(install(place))
    print(build_image(place))
