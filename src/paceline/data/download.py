"""The public data sets' files: where they come from, how they are known to be whole, where they are kept."""

from __future__ import annotations

import hashlib
import http.client
import sys
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline import env
from paceline.data.file_lock import file_lock
from paceline.errors import DataError, reason_of
from paceline.spec import DataSpec

_CHUNK_BYTES = 1 << 18


@dataclass(frozen=True)
class RemoteFile:
    """A file, the addresses it can be had from (the canonical one first), and its published MD5 checksum."""

    name: str
    urls: tuple[str, ...]
    md5: str


def _idx(bases: Sequence[str], name: str, md5: str) -> RemoteFile:
    return RemoteFile(name, tuple(base + name for base in bases), md5)


_MNIST = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)
_FASHION = ("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",)
_CIFAR = ("https://www.cs.toronto.edu/~kriz/",)

REMOTE_FILES: dict[str, tuple[RemoteFile, ...]] = {
    "mnist": (
        _idx(_MNIST, "train-images-idx3-ubyte.gz", "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
        _idx(_MNIST, "train-labels-idx1-ubyte.gz", "d53e105ee54ea40749a09fcbcd1e9432"),
        _idx(_MNIST, "t10k-images-idx3-ubyte.gz", "9fb629c4189551a2d022fa330f9573f3"),
        _idx(_MNIST, "t10k-labels-idx1-ubyte.gz", "ec29112dd5afa0611ce80d1b7f02629c"),
    ),
    "fashion-mnist": (
        _idx(_FASHION, "train-images-idx3-ubyte.gz", "8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
        _idx(_FASHION, "train-labels-idx1-ubyte.gz", "25c81989df183df01b3e8a0aad5dffbe"),
        _idx(_FASHION, "t10k-images-idx3-ubyte.gz", "bef4ecab320f06d8554ea6380940ec79"),
        _idx(_FASHION, "t10k-labels-idx1-ubyte.gz", "bb300cfdad3c16e7a12a480ee83cd310"),
    ),
    "cifar10": (_idx(_CIFAR, "cifar-10-python.tar.gz", "c58f30108f718f92721af3b95e74349a"),),
    "cifar100": (_idx(_CIFAR, "cifar-100-python.tar.gz", "eb9058c3a382ffc7106e4002c42a8d85"),),
}


def directory_of(spec: DataSpec) -> Path:
    """Where the files of `spec` are: the user's directory as it is, else the cache, filled if anything is
    missing.

    Raises:
        DataError: the user's directory does not exist, or the download failed.
    """
    if spec.dir is None:
        directory = env.data_dir() / "downloads" / spec.name
        fetch(REMOTE_FILES[spec.name], directory)
        return directory
    directory = Path(spec.dir).expanduser()
    if not directory.is_dir():
        raise DataError(f"data.dir = {spec.dir!r} is not a directory; give the one that holds {spec.name}'s files.")
    return directory


def fetch(files: Sequence[RemoteFile], directory: Path) -> None:
    """Bring every file that is not yet in `directory` there, verified; of many processes one downloads.

    Raises:
        DataError: no address gave the file whole, or the directory cannot be written; names file and address.
    """
    if all((directory / file.name).exists() for file in files):
        return
    try:
        with file_lock(directory / ".download.lock"):
            for file in files:
                if not (directory / file.name).exists():
                    _fetch_one(file, directory)
    except OSError as error:
        raise DataError(
            f"Downloads cannot be kept in {directory} ({reason_of(error)}); point PACELINE_DATA to a "
            "directory that can be written, or data.dir to one that has the files."
        ) from None


def _fetch_one(file: RemoteFile, directory: Path) -> None:
    failures = []
    for url in file.urls:
        part = directory / f"{file.name}.part"
        try:
            found = _download(url, part)
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", None) or error
            failures.append(f"{url} ({reason_of(reason) or type(error).__name__})")
        else:
            if found == file.md5:
                part.rename(directory / file.name)
                return
            failures.append(f"{url} (its MD5 is {found}, not {file.md5}: damaged, or not the published file)")
        part.unlink(missing_ok=True)
    raise DataError(
        f"{file.name} could not be downloaded from {' nor from '.join(failures)}; try again, or put the file "
        "into a directory and give that as data.dir."
    )


def _download(url: str, part: Path) -> str:
    """Copy what is at `url` into the file `part`, with a bar on a terminal that shows errors; returns its MD5."""
    from rich.console import Console
    from rich.progress import wrap_file

    digest = hashlib.md5(usedforsecurity=False)
    with (
        urllib.request.urlopen(url, timeout=30) as response,
        open(part, "wb") as out,
        wrap_file(
            response,
            int(response.headers.get("Content-Length") or 0),
            description=part.stem,
            console=Console(stderr=True),
            transient=True,
            disable=not sys.stderr.isatty(),
        ) as content,
    ):
        while chunk := content.read(_CHUNK_BYTES):
            digest.update(chunk)
            out.write(chunk)
    return digest.hexdigest()
