"""Apptainer on a release of Debian that has no package of it, and an image of a local tree with this checkout in it.

    python -m tests.hosts.apptainer FOLDER
    PATH=FOLDER/bin:$PATH apptainer exec FOLDER/image.sif python3 -c "import torch"

Apptainer lives in a tree of Debian's packages (mmdebstrap). The program in FOLDER/bin enters the tree in a mount
namespace of its own, where this node's folders lie at their own paths, and runs containers in user namespaces. The
image is Debian's base, this process's Python, and the packages that training needs, with the modules that were compiled
here so far: a container cannot keep what it compiles, and would compile torch at every start of a worker.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import Distribution, distribution
from importlib.util import cache_from_source
from pathlib import Path

from packaging.requirements import Requirement

TIMEOUT_S = 900.0
PACKAGES = ("paceline", "torch", "lightning")
"""With everything that they need."""

_APPTAINER = ("apptainer", "squashfs-tools", "squashfuse", "fuse2fs", "uidmap")
_LIBRARIES = ("libffi8", "libssl3", "libstdc++6", "libsqlite3-0")
"""What the interpreter and torch load from the system."""
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
    cd "$tree"; pivot_root . mnt; umount -l /mnt; cd "$here"
    APPTAINER_USERNS=1 exec /usr/bin/apptainer "$@"
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
    _make_tree("sid", _APPTAINER, tree)
    program.parent.mkdir()
    program.write_text(_ENTER.format(tree=tree))
    program.chmod(0o755)
    _run([str(program), "--version"])
    return program


def build_image(folder: Path) -> Path:
    """Make `folder`/image.sif, by `folder`/bin/apptainer. Raises `ApptainerMissingError`."""
    tree, image = folder / "base", folder / "image.sif"
    _make_tree("bookworm", _LIBRARIES, tree)
    home, library = tree / "opt" / "python", Path(sys.base_prefix) / "lib"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for path in [Path(sys.base_prefix) / "bin" / version, *library.glob("libpython*")]:
        _link(path, home / path.relative_to(sys.base_prefix))
    shutil.copytree(
        library / version,
        home / "lib" / version,
        symlinks=True,
        copy_function=_link,
        ignore=shutil.ignore_patterns("site-packages", "test"),
    )
    for one in _with_requirements(PACKAGES).values():
        for file in one.files or ():
            source = Path(str(file.locate()))
            if source.is_file() and ".." not in file.parts:
                _link(source, home / "lib" / version / "site-packages" / file)
                if file.suffix == ".py" and (compiled := Path(cache_from_source(str(source)))).is_file():
                    _link(compiled, home / "lib" / version / "site-packages" / cache_from_source(str(file)))
    # However it is installed here, in the image it is this checkout.
    package = home / "lib" / version / "site-packages" / "paceline"
    shutil.rmtree(package, ignore_errors=True)
    shutil.copytree(
        Path(__file__).parents[2] / "src" / "paceline", package, ignore=shutil.ignore_patterns("__pycache__")
    )
    (tree / "etc" / "ld.so.conf.d" / "python.conf").write_text("/opt/python/lib\n")
    (tree / "usr" / "local" / "bin" / "python3").symlink_to(f"/opt/python/bin/{version}")
    _run(["chroot", str(tree), "ldconfig"])
    recipe = folder / "image.def"
    recipe.write_text(f"Bootstrap: localimage\nFrom: {tree}\n")
    apptainer = [str(folder / "bin" / "apptainer"), "build", "--mksquashfs-args", "-no-compression -no-xattrs"]
    _run([*apptainer, str(image), str(recipe)])
    shutil.rmtree(tree)
    return image


def _make_tree(release: str, packages: Iterable[str], tree: Path) -> None:
    # A mirror may have stopped at a day whose list is out of date since; its signature is checked all the same.
    options = ["--variant=minbase", '--aptopt=Acquire::Check-Valid-Until "false"', f"--include={','.join(packages)}"]
    _run(["mmdebstrap", "--quiet", *options, release, str(tree)])


def _with_requirements(names: Iterable[str]) -> dict[str, Distribution]:
    """The installed packages of these names, with all that they require, by name."""
    found: dict[str, Distribution] = {}
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found[name] = distribution(name)
            needed = map(Requirement, found[name].requires or ())
            waiting += [one.name for one in needed if one.marker is None or one.marker.evaluate({"extra": ""})]
    return found


def _link(source: str | Path, target: str | Path) -> None:
    """The same file under another name where that is possible: an image copies it soon enough."""
    Path(target).parent.mkdir(parents=True, exist_ok=True)
    if Path(target).exists():
        return  # some packages list a file twice
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
