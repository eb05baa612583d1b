"""What becomes of a run whose file system fails in the middle and stays so; needs root, for mounts.

    python -m benchmarks.survival.file_systems [--only NAME,…]

While the job of `write_faults.py` writes its second checkpoint something happens to the file system of its run folder,
for good. When it has been repaired the run goes on, and has to end with the weights of the undisturbed run. A quota is
one of btrfs, if mkfs.btrfs is installed (btrfs-progs); what the kernel does not refuse by itself, the layer refuses.
"""

from __future__ import annotations

import argparse
import errno
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from paceline.checkpoint.load import newest_good
from paceline.checkpoint.storage import open_storage
from paceline.spec import RunRecord

from .write_faults import Point, train, undisturbed

AT: Point = ("open", "checkpoints/step-00000002/worker-00000.safetensors.part", 1)
_SIZE = "64m"
_IMAGE_BYTES = 256 << 20


def _mount_tmpfs(mount: Path) -> None:
    _do("mount", "-t", "tmpfs", "-o", f"size={_SIZE}", "none", str(mount))


def _mount_btrfs(mount: Path) -> None:
    """One with quotas, in a file, whose run folder can have one of its own."""
    image = mount.with_suffix(".img")
    with image.open("xb") as file:
        file.truncate(_IMAGE_BYTES)
    _do("mkfs.btrfs", "--quiet", "--metadata", "single", str(image))
    _do("mount", "-o", "loop", str(image), str(mount))
    _do("btrfs", "quota", "enable", str(mount))
    _do("btrfs", "subvolume", "create", str(mount / "run"))


def _do(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


@dataclass(frozen=True)
class Case:
    """What happens to a mounted file system at a point, and at every later one, and how it is repaired."""

    begin: Callable[[Path], object]
    then: Callable[[Path, Point], object] = lambda _mount, _point: None
    repair: Callable[[Path], object] = lambda _mount: None
    mount: Callable[[Path], None] = _mount_tmpfs
    needs: str = ""
    """A command without which it is left out."""


def _fill(mount: Path) -> None:
    with open(mount / "filler", "wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            return


def _remount(mount: Path, options: str) -> None:
    _do("mount", "-o", f"remount,{options}", "none", str(mount))


def _allow_no_more_files(mount: Path) -> None:
    """As a quota does."""
    files = os.statvfs(mount)
    _remount(mount, f"nr_inodes={files.f_files - files.f_ffree}")


def _use_up_quota(mount: Path) -> None:
    os.sync()  # the kernel counts what has been written out
    _do("btrfs", "qgroup", "limit", "64K", str(mount / "run"))


def _refuse_to_write(_mount: Path, point: Point) -> None:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS), point[1])


def _refuse_to_replace(_mount: Path, point: Point) -> None:
    if point[0] in ("rename", "replace"):
        raise OSError(errno.EEXIST, os.strerror(errno.EEXIST), point[1])


CASES = {
    "full": Case(_fill, repair=lambda mount: (mount / "filler").unlink()),
    "read-only": Case(lambda _mount: None, _refuse_to_write),  # a mount with open files cannot be made so
    "deleted": Case(lambda mount: shutil.rmtree(mount / "run")),
    "no more files": Case(_allow_no_more_files, repair=lambda mount: _remount(mount, "nr_inodes=1000")),
    "quota of btrfs": Case(
        _use_up_quota,
        repair=lambda mount: _do("btrfs", "qgroup", "limit", "none", str(mount / "run")),
        mount=_mount_btrfs,
        needs="mkfs.btrfs",
    ),
    "no renaming": Case(lambda _mount: None, _refuse_to_replace),
    "50 ms late": Case(lambda _mount: None, lambda _mount, _point: time.sleep(0.05)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases, separated by commas; all")
    wanted = [name for name in parser.parse_args().only.split(",") if name] or CASES
    out = Path(tempfile.mkdtemp(prefix="paceline-file-systems-"))
    os.environ["HOME"] = str(out)  # where results go that their folder does not take
    _, digest = undisturbed(out / "undisturbed")
    print("| file system | run | what it said | good checkpoint | after going on |\n|---|---|---|---|---|")
    problems = 0
    for name in wanted:
        case = CASES[name]
        if case.needs and shutil.which(case.needs) is None:
            print(f"| {name} | not tried: {case.needs} is missing | | | |")
            continue
        mount = out / name.replace(" ", "-")
        mount.mkdir()
        case.mount(mount)
        try:
            problems += not _tried(name, case, mount, digest)
        finally:
            _do("umount", "--lazy", str(mount))
    raise SystemExit(bool(problems))


def _tried(name: str, case: Case, mount: Path, digest: str) -> bool:
    """Print a row; whether all is well."""
    has_begun = False

    def on_point(point: Point) -> None:
        nonlocal has_begun
        if point == AT and not has_begun:
            has_begun = True
            case.begin(mount)
        elif has_begun:
            case.then(mount, point)

    folder = mount / "run"
    exit_code, said = train(folder, on_point, said_in=mount.with_suffix(".said"))
    case.repair(mount)
    found, _ = newest_good(open_storage(folder / "checkpoints"))
    record = folder / "record.json"
    is_over = exit_code == 0 and record.exists()
    resumed, _ = (0, "") if is_over else train(folder, lambda _point: None, said_in=mount.with_suffix(".said"))
    equal = resumed == 0 and record.exists() and RunRecord.load(record).weights_sha256 == digest
    lines = [line for line in said.splitlines() if "cannot" in line or "could not" in line]
    told = (lines[-1] if lines else "")[-160:].replace("|", "/")
    left = "none" if found is None else f"step {found.manifest.step}"
    ended = "went on" if exit_code == 0 else f"exit code {exit_code}"
    print(f"| {name} | {ended} | {told} | {left} | {'equal' if equal else f'exit code {resumed}'} |", flush=True)
    return equal and "Traceback" not in said


if __name__ == "__main__":
    main()
