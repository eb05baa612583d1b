"""Checkpoints that live in a dictionary, for tests that look at thousands of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.data_file import ChecksumStream, StagedFile, dtype_name
from paceline.checkpoint.load import folder_name
from paceline.checkpoint.manifest import MANIFEST_FILE, Manifest, StoredSlice, TensorEntry
from paceline.checkpoint.storage import Piece


class Memory:
    """A storage; `files` are its contents, by path."""

    address = "memory"

    def __init__(self, files: Mapping[str, bytes] | None = None) -> None:
        self.files = dict(files or {})

    def write(self, name: str, pieces: Iterable[Piece]) -> None:
        self.files[name] = b"".join(bytes(piece) for piece in pieces)

    def pieces(self, name: str) -> Iterator[bytes]:
        yield self.read(name)

    def stretch(self, name: str, start: int, stop: int) -> bytearray:
        return bytearray(self.read(name)[start:stop])

    def read(self, name: str) -> bytes:
        if name not in self.files:
            raise FileNotFoundError(name)
        return self.files[name]

    def names(self, folder: str = "") -> list[str]:
        start = f"{folder}/" if folder else ""
        return sorted({name.removeprefix(start).split("/")[0] for name in self.files if name.startswith(start)})

    def folders(self) -> list[str]:
        return sorted({name.split("/")[0] for name in self.files if "/" in name})

    def remove(self, name: str) -> None:
        self.files = {
            one: content for one, content in self.files.items() if one != name and not one.startswith(f"{name}/")
        }

    def claim(self, folder: str) -> bool:
        return folder not in self.names()


def state_at(step: int) -> dict[str, Tensor]:
    """The tensors of the checkpoint of a step; every step has others."""
    draw = torch.Generator().manual_seed(step)
    return {
        "model/weight": torch.randn(4, 3, generator=draw),
        "model/bias": torch.randn(3, generator=draw).bfloat16(),
        "worker:0/sums": torch.randn(2, generator=draw),
        "worker:1/sums": torch.randn(2, generator=draw),
    }


def write_checkpoint(storage: Memory, step: int, metrics: Mapping[str, float] | None = None) -> Manifest:
    """Put a checkpoint of two workers there, in which `weight` is in two halves and `head` is tied to it."""
    state = state_at(step)
    held = [
        {"model/weight@0,0": state["model/weight"][:2], "model/bias": state["model/bias"]},
        {"model/weight@2,0": state["model/weight"][2:]},
    ]
    files = []
    for rank, part in enumerate(held):
        own = f"worker:{rank}/sums"
        files.append(write_part(storage, step, rank, {**part, own: state[own]}))
    first, second = (file.name for file in files)
    halves = (
        StoredSlice((0, 0), (2, 3), first, "model/weight@0,0"),
        StoredSlice((2, 0), (2, 3), second, "model/weight@2,0"),
    )
    tensors = {"model/weight": TensorEntry("F32", (4, 3), halves)}
    for name, file in (("model/bias", first), ("worker:0/sums", first), ("worker:1/sums", second)):
        shape = tuple(state[name].shape)
        whole = StoredSlice((0,) * len(shape), shape, file, name)
        tensors[name] = TensorEntry(dtype_name(name, state[name]), shape, (whole,))
    model = {"weight": {"tensor": "model/weight"}, "bias": {"tensor": "model/bias"}, "head": {"tensor": "model/weight"}}
    manifest = Manifest(
        step=step,
        world_size=2,
        saved_at=f"2031-04-05T06:{step // 60:02}:{step % 60:02}Z",
        versions={"paceline": "0.1.0"},
        job={"seed": 3},
        values={"model": model, "metrics": dict(metrics or {}), "progress": {"tuple": [step, {"number": "inf"}]}},
        workers=tuple({"sums": {"tensor": f"worker:{rank}/sums"}} for rank in range(2)),
        files=tuple(files),
        tensors=tensors,
    )
    write_manifest(storage, step, manifest)
    return manifest


def write_part(storage: Memory, step: int, rank: int, tensors: Mapping[str, Tensor]) -> Any:
    """One worker's file, and what a manifest says of it."""
    part, name = StagedFile(), f"worker-{rank:05d}.safetensors"
    part.stage(tensors)
    summed = ChecksumStream(part.pieces())
    storage.write(f"{folder_name(step)}/{name}", summed)
    return summed.file(name)


def write_manifest(storage: Memory, step: int, manifest: Manifest, **changes: Any) -> None:
    """With a right checksum, whatever it says."""
    storage.write(f"{folder_name(step)}/{MANIFEST_FILE}", [dataclasses.replace(manifest, **changes).dump()])
