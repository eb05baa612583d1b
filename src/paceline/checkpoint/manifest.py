"""What a checkpoint consists of: one small file, written last, without which there is no checkpoint.

A folder is a checkpoint exactly if it holds manifest.json, that file is byte for byte what `Manifest.dump` writes, and
every file it names has the length and the checksum it gives. Checksums of the parts are CRC-32, which notices every
change of up to 32 neighbouring bits and misses any other one in 4 billion times; it is there to find damage, not
forgery, and costs a tenth of SHA-256 where the processor has no instructions for that.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.errors import CheckpointError
from paceline.spec.codec import from_mapping, to_mapping

FORMAT = 1
"""Raised when older programs could not read what is written; `load` keeps reading every earlier one."""

MANIFEST_FILE = "manifest.json"


@dataclass(frozen=True)
class PartFile:
    """One file of tensors, in the safetensors format."""

    name: str
    num_bytes: int
    crc32: str
    """Eight hexadecimal digits."""


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor: where it begins and how large it is along each dimension, and where it is kept."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    key: str
    """Its name in that file."""


@dataclass(frozen=True)
class TensorEntry:
    """A whole tensor, which its chunks cover."""

    dtype: str
    """As safetensors calls it: "F32", "BF16", "I64"."""
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class Manifest:
    """Everything about a checkpoint but the numbers in its tensors."""

    step: int
    world_size: int
    """Workers that saved it; any number may load it."""
    saved_at: str
    """UTC, as in 2031-04-05T06:07:08Z."""
    versions: dict[str, str]
    """Of Paceline and of torch."""
    job: dict[str, Any]
    """What was trained."""
    values: dict[str, Any]
    """All state but tensors; see `tree`."""
    workers: tuple[dict[str, Any], ...] = ()
    """The same of each worker by itself, where workers differ."""
    files: tuple[PartFile, ...] = ()
    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    format: int = FORMAT

    def dump(self) -> bytes:
        """The file's content: canonical JSON with a checksum over the rest of it."""
        body = to_mapping(self)
        return _canonical({"sha256": _digest(body), **body})

    @classmethod
    def parse(cls, content: bytes) -> Manifest:
        """The manifest in a file's content.

        Raises:
            CheckpointError: it is damaged, or of a newer format; says which.
        """
        try:
            body = json.loads(content)
        except (ValueError, RecursionError):
            raise CheckpointError(f"{MANIFEST_FILE} is damaged") from None
        if not isinstance(body, dict) or _canonical(body) != content or body.pop("sha256", None) != _digest(body):
            raise CheckpointError(f"{MANIFEST_FILE} is damaged")
        if body.get("format") != FORMAT:
            raise CheckpointError(f"it has format {body.get('format')}, and this release reads up to {FORMAT}")
        manifest = from_mapping(cls, body)
        known = {file.name for file in manifest.files}
        for name in known:
            # Whatever a file says, nothing outside of its folder is read.
            if "/" in name or "\\" in name or name.startswith("."):
                raise CheckpointError(f"{MANIFEST_FILE} names a file outside of the checkpoint, {name!r}")
        if any(chunk.file not in known for entry in manifest.tensors.values() for chunk in entry.chunks):
            raise CheckpointError(f"{MANIFEST_FILE} names tensors in files that it does not list")
        return manifest


def _canonical(body: Mapping[str, Any]) -> bytes:
    """Equal values give equal bytes, and no byte can change without changing a value or this form."""
    return json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode() + b"\n"


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(_canonical(body)).hexdigest()
