"""A checkpoint that somebody made on purpose, every checksum right: it runs no code, and is refused in one sentence."""

from __future__ import annotations

import hashlib
import json
import pickle
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.checkpoint import read_checkpoint, verify_checkpoint
from paceline.checkpoint.load import Checkpoint
from paceline.checkpoint.manifest import Manifest
from paceline.errors import CheckpointError
from tests.old.unit.checkpoint.memory import Memory, write_checkpoint

NAME = "step-00000007"
PART = f"{NAME}/worker-00000.safetensors"


def _signed(body: dict[str, Any]) -> bytes:
    """What a manifest's file holds if these are its values."""

    def canonical(values: dict[str, Any]) -> bytes:
        return json.dumps(values, sort_keys=True, separators=(",", ":")).encode() + b"\n"

    return canonical({**body, "sha256": hashlib.sha256(canonical(body)).hexdigest()})


def _body(storage: Memory) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(storage.files[f"{NAME}/manifest.json"])
    del body["sha256"]
    return body


def _storage() -> Memory:
    storage = Memory()
    write_checkpoint(storage, 7)
    return storage


def _use(checkpoint: Checkpoint) -> None:
    """Everything that is done with a checkpoint."""
    assert checkpoint.shared.keys() == checkpoint.manifest.values.keys()
    for rank in range(checkpoint.manifest.world_size):
        checkpoint.own(rank)
    _ = checkpoint.manifest.saved_at_s, checkpoint.manifest.metrics


def _assert_refused(storage: Memory) -> str:
    for check in (verify_checkpoint, read_checkpoint):
        with pytest.raises(CheckpointError) as refused:
            check(storage, NAME)
        assert len(str(refused.value)) < 400
    return str(refused.value)


def test_signs_as_the_program_does() -> None:
    storage = _storage()
    assert _signed(_body(storage)) == storage.files[f"{NAME}/manifest.json"]
    _use(read_checkpoint(storage, NAME))


class _Bomb:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self._path,)


@pytest.mark.parametrize("form", ["pickle", "torch.save"])
def test_runs_no_code(tmp_path: Path, form: str) -> None:
    mark = tmp_path / "was here"
    if form == "pickle":
        content = pickle.dumps({"model/weight": _Bomb(mark)})
    else:
        torch.save({"model/weight": _Bomb(mark)}, tmp_path / "bomb")
        content = (tmp_path / "bomb").read_bytes()
    storage = _storage()
    body = _body(storage)
    storage.files[PART] = content
    body["files"][0] |= {"num_bytes": len(content), "crc32": f"{zlib.crc32(content):08x}"}
    storage.files[f"{NAME}/manifest.json"] = _signed(body)
    assert "is not a safetensors file" in _assert_refused(storage)
    storage.files[f"{NAME}/manifest.json"] = content
    assert _assert_refused(storage) == "manifest.json is damaged"
    assert not mark.exists()


def _whole(shape: list[int], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "chunks": []}


def _deep(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def _change(*path: str | int, to: Any) -> Callable[[dict[str, Any]], None]:
    def change(body: dict[str, Any]) -> None:
        inside: Any = body
        for key in path[:-1]:
            inside = inside[key]
        inside[path[-1]] = to

    return change


WEIGHT = ("tensors", "model/weight")
TWICE = [
    {"offsets": [0, 0], "sizes": [2, 3], "file": f"worker-0000{rank}.safetensors", "key": f"model/weight@{rank * 2},0"}
    for rank in range(2)
]

HOSTILE = {
    "file above": _change("files", 0, "name", to="../secrets"),
    "absolute file": _change("files", 0, "name", to="/etc/passwd"),
    "file on a drive": _change("files", 0, "name", to="C:\\secrets"),
    "hidden file": _change("files", 0, "name", to=".secrets"),
    "file without a name": _change("files", 0, "name", to=""),
    "file with a zero": _change("files", 0, "name", to="a\0b"),
    "file of half a letter": _change("files", 0, "name", to="\ud800"),
    "file twice": lambda body: body["files"].append(body["files"][0]),
    "file not listed": lambda body: body["files"].pop(),
    "wrong checksum": _change("files", 0, "crc32", to="00000000"),
    "too long": _change("files", 0, "num_bytes", to=2**62),
    "length below zero": _change("files", 0, "num_bytes", to=-1),
    "huge": _change(*WEIGHT, "shape", to=[2**40, 3]),
    "huge, nothing of it there": _change(*WEIGHT, to=_whole([2**40])),
    "as many numbers as 2^64": _change(*WEIGHT, to=_whole([2**32, 2**32])),
    "empty and huge": _change(*WEIGHT, to=_whole([0, 2**62, 2**62])),
    "empty and huger": _change(*WEIGHT, to=_whole([0, 10**30])),
    "below zero": _change(*WEIGHT, to=_whole([-1, -12])),
    "many dimensions": _change(*WEIGHT, to=_whole([1] * 1000 + [0])),
    "halves that overlap": _change(*WEIGHT, "chunks", to=TWICE),
    "outside of itself": _change(*WEIGHT, "chunks", 0, "offsets", to=[3, 0]),
    "before its beginning": _change(*WEIGHT, "chunks", 0, "offsets", to=[-2, 0]),
    "another dimension": _change(*WEIGHT, "chunks", 0, "offsets", to=[0]),
    "another name": _change(*WEIGHT, "chunks", 0, "key", to="model/bias"),
    "no such name": _change(*WEIGHT, "chunks", 0, "key", to="nothing"),
    "another dtype": _change(*WEIGHT, "dtype", to="I32"),
    "unknown dtype": _change(*WEIGHT, "dtype", to="COMPLEX"),
    "unknown dtype, empty": _change(*WEIGHT, to=_whole([0], "object")),
    "tensor that is not there": _change("values", "model", "weight", to={"tensor": "nothing"}),
    "own tensor that is not there": _change("workers", 1, to={"sums": {"tensor": "nothing"}}),
    "number that is none": _change("values", "model", to={"number": "1e5"}),
    "tensor that is no name": _change("values", "model", to={"tensor": 5}),
    "pairs that are none": _change("values", "model", to={"pairs": [[1, 2, 3]]}),
    "pairs of what cannot be a key": _change("values", "model", to={"pairs": [[{}, 2]]}),
    "deep": _change("values", "deep", to=_deep(900)),
    "many workers": _change("world_size", to=10**12),
    "no workers": lambda body: body.update(world_size=0, workers=[]),
    "another step": _change("step", to=8),
    "step below zero": _change("step", to=-7),
    "no time": _change("saved_at", to="yesterday"),
    "newer format": _change("format", to=2),
    "format that is none": _change("format", to=True),
    "unknown key": _change("run", to="rm -rf"),
    "missing key": lambda body: body.pop("job") and None,
    "list for a table": _change("values", to=[1]),
    "text for a list": _change("files", to="abc"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_is_refused(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = _storage()
    body = _body(storage)
    HOSTILE[case](body)
    storage.files[f"{NAME}/manifest.json"] = _signed(body)
    empty = torch.empty

    def small(shape: Any, *args: Any, **options: Any) -> torch.Tensor:
        assert options.get("device") == "meta" or torch.Size([shape] if isinstance(shape, int) else shape).numel() < 100
        return empty(shape, *args, **options)

    monkeypatch.setattr(torch, "empty", small)
    _assert_refused(storage)


@pytest.mark.parametrize("content", [b"[" * 100_000, b'{"a":' * 50_000, b"null\n", b"[]\n", b"{}\n", b"1" * 10_000])
def test_json_of_another_kind(content: bytes) -> None:
    storage = _storage()
    storage.files[f"{NAME}/manifest.json"] = content
    assert _assert_refused(storage) == "manifest.json is damaged"


def _part(header: Any, numbers: int = 96) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(numbers)


def _held(shape: Any, start: Any, end: Any, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 8,
        _part(b""),
        _part(b"[" * 100_000),
        _part(b"\xff\xfe"),
        _part([]),
        _part({"a": 1}),
        _part({"a": {}}),
        _part({"a": _held([4, 3], 0, 48)}),  # and something behind it
        _part({"a": _held([4, 3], 0, 48), "b": _held([4, 3], 0, 48)}),
        _part({"a": _held([4, 3], 0, 48), "b": _held([4, 3], 40, 88)}),
        _part({"a": _held([4, 3], 48, 96)}),
        _part({"a": _held([2**62, 6], 0, 96)}),
        _part({"a": _held([-4, -6], 0, 96)}),
        _part({"a": _held([0, 2**70], 0, 0)}, 0),
        _part({"a": _held("ab", 0, 96)}),
        _part({"a": _held([4.0, 6], 0, 96)}),
        _part({"a": _held([24], "0", 96)}),
        _part({"a": _held([24], False, 96)}),
        _part({"a": _held([24], 0, 96, "PICKLE")}),
        _part({"a": _held([24], 0, 96, [])}),
        _part({"a": _held([23], 0, 92), "b": _held([4], 92, 96, "U8"), "c": None}),
        _part({"a": _held([4], 0, 4, "U8"), "b": _held([11], 4, 92, "F64")}, 92),
    ],
)
def test_parts_of_another_kind(content: bytes) -> None:
    storage = _storage()
    body = _body(storage)
    storage.files[PART] = content
    body["files"][0] |= {"num_bytes": len(content), "crc32": f"{zlib.crc32(content):08x}"}
    storage.files[f"{NAME}/manifest.json"] = _signed(body)
    _assert_refused(storage)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 2**66) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=150)
@given(st.data())
def test_any_manifest_is_read_or_refused(data: st.DataObject) -> None:
    storage = _storage()
    body = _body(storage)
    for _ in range(data.draw(st.integers(1, 3))):
        places = list(_places(body))
        inside, key = data.draw(st.sampled_from(places))
        values = [place[one] for place, one in places]
        to = data.draw(_JSON | st.sampled_from(values))
        if to is None and isinstance(inside, dict):
            del inside[key]
        else:
            inside[key] = json.loads(json.dumps(to))
    storage.files[f"{NAME}/manifest.json"] = _signed(body)
    try:
        checkpoint = read_checkpoint(storage, NAME)
    except CheckpointError:
        with pytest.raises(CheckpointError):
            verify_checkpoint(storage, NAME)
    else:
        verify_checkpoint(storage, NAME)
        _use(checkpoint)


def _places(value: Any) -> Any:
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        yield value, key
        if isinstance(item, dict | list):
            yield from _places(item)


@given(st.binary(max_size=40), st.integers(0, 3000))
def test_any_bytes_are_no_manifest(noise: bytes, at: int) -> None:
    content = _storage().files[f"{NAME}/manifest.json"]
    at = min(at, len(content) - 1)
    changed = content[:at] + noise + content[at + 1 :]
    if changed != content:
        with pytest.raises(CheckpointError):
            Manifest.parse(changed)
