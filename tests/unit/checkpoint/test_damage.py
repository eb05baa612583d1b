"""Whatever happens to the files of a checkpoint is noticed and named, and a run goes on from the one before it. A
hostile manifest or file of tensors is refused in one sentence: nothing is run, and no memory is
taken for it."""

from __future__ import annotations

import json
import pickle
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline
from paceline.errors import CheckpointError
from tests.kit.workers import run_ranks
from tests.unit.checkpoint.saving import sealed, train

OLDER, NEWER = "step-00000002", "step-00000004"
FILES = ("manifest.json", "worker-00000", "worker-00001")
"""The files of a checkpoint, as their names begin."""


def file_in(folder: Path, begins: str, name: str = NEWER) -> Path:
    (found,) = (folder / name).glob(f"{begins}*")
    return found


def _train(folder: Path, strategy: str) -> tuple[int, list[list[float]]]:
    """The first step, and the weights after the fourth."""
    trained = train(folder, 4, strategy=strategy, saves=[2, 4], keep_last=9)
    return trained.first_step, [weight.flatten().tolist() for weight in trained.weights.values()]


@dataclass(frozen=True)
class Saved:
    """Two checkpoints of two workers, each with slices of the weights, and the weights of the second."""

    folder: Path
    weights: list[list[float]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp("saved") / "checkpoints"
    (_, weights), _ = run_ranks(_train, 2, folder, "fsdp")
    return Saved(folder, weights)


@pytest.fixture
def folder(saved: Saved, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved.folder, tmp_path / "checkpoints"))


@pytest.mark.parametrize(("world_size", "strategy"), [(1, "dp"), (2, "dp"), (3, "fsdp"), (2, "fsdp")])
def test_slices_of_two_workers_are_the_same_weights_on_any_number(
    folder: Path, saved: Saved, world_size: int, strategy: str
) -> None:
    by_rank = run_ranks(_train, world_size, folder, strategy)
    assert [first_step for first_step, _ in by_rank] == [4] * world_size
    assert by_rank[0][1] == saved.weights  # rank 0 has whole tensors under every strategy


def problem_of(folder: Path, name: str = NEWER) -> str:
    """What is wrong with a checkpoint; empty for a good one."""
    (state,) = [one for one in paceline.checkpoint.verify(folder) if one.name == name]
    assert (state.state == "damaged") == bool(state.problem)
    return state.problem if state.state in ("good", "damaged") else state.state


def test_whole_checkpoints_are_good_and_the_newest_is_resumed(folder: Path) -> None:
    assert [(one.name, one.state) for one in paceline.checkpoint.verify(folder)] == [(OLDER, "good"), (NEWER, "good")]
    listed = paceline.checkpoint.ls(folder)
    assert [(one.step, one.workers, one.state) for one in listed] == [(2, 2, "complete"), (4, 2, "complete")]
    assert train(folder, 4).first_step == 4  # on one worker


def change(path: Path, edit: Callable[[bytes], bytes]) -> None:
    path.write_bytes(edit(path.read_bytes()))


def take_older(path: Path) -> None:
    shutil.copy(file_in(path.parent.parent, path.name[:12], OLDER), path)


def make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def make_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


DAMAGES: dict[str, Callable[[Path], None]] = {
    "a byte less": lambda path: change(path, lambda content: content[:-1]),
    "half": lambda path: change(path, lambda content: content[: len(content) // 2]),
    "empty": lambda path: change(path, lambda _: b""),
    "a byte more": lambda path: change(path, lambda content: content + b"\0"),
    "a bit": lambda path: change(path, lambda content: content[:-9] + bytes([content[-9] ^ 1]) + content[-8:]),
    "of another step": take_older,
    "a folder": make_folder,
    "a link to nothing": make_link,
}


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_named_and_the_run_goes_on_from_the_checkpoint_before(
    folder: Path, damage: str, file: str
) -> None:
    DAMAGES[damage](file_in(folder, file))
    problem = problem_of(folder)
    # A manifest that cannot be found is none, and the checkpoint is unfinished.
    assert file in problem or (file == FILES[0] and problem == "unfinished")
    assert problem_of(folder, OLDER) == ""
    assert train(folder, 3).first_step == 2


@pytest.mark.parametrize("file", FILES)
def test_a_missing_file_is_noticed(folder: Path, file: str) -> None:
    file_in(folder, file).unlink()
    assert problem_of(folder) == "unfinished" if file == FILES[0] else file in problem_of(folder)
    assert train(folder, 3).first_step == 2


def test_a_run_none_of_whose_checkpoints_is_good_is_refused(folder: Path) -> None:
    for name in (OLDER, NEWER):
        DAMAGES["a byte less"](file_in(folder, FILES[1], name))
    with pytest.raises(CheckpointError, match=f"{NEWER}.*{FILES[1]}"):
        train(folder, 5)
    for name in (OLDER, NEWER):
        (folder / name / FILES[0]).unlink()
    with pytest.raises(CheckpointError, match=f"{NEWER}.*{FILES[0]}"):
        train(folder, 5)


@pytest.mark.parametrize("latest", [None, b"", b"step-00000099\n", b"../../etc\n", b"\xff\0"])
def test_the_file_latest_is_for_people_only(folder: Path, latest: bytes | None) -> None:
    (folder / "latest").unlink()
    if latest is not None:
        (folder / "latest").write_bytes(latest)
    assert train(folder, 4).first_step == 4


def test_foreign_files_are_left_alone(folder: Path) -> None:
    foreign = {"step-9/manifest.json": b"mine", "notes.txt": b"mine", "step-0000000x/file": b"mine"}
    for path, content in foreign.items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_bytes(content)
    (folder / NEWER / "notes.txt").write_bytes(b"in a good one")
    assert train(folder, 6).first_step == 4
    assert {path: (folder / path).read_bytes() for path in foreign} == foreign


def test_flipped_bits_and_cut_ends_are_noticed_wherever_they_are(folder: Path) -> None:
    shutil.rmtree(folder / OLDER)
    draw = random.Random(20310405)
    paths = [file_in(folder, file) for file in FILES]
    whole = {path: path.read_bytes() for path in paths}
    for number in range(450):
        path = paths[number % 3]
        content = bytearray(whole[path])
        if number < 300:
            content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        else:
            del content[draw.randrange(len(content)) :]
        path.write_bytes(content)
        assert problem_of(folder), (path.name, number)
        path.write_bytes(whole[path])
    assert problem_of(folder) == ""


# --- hostile content ---


def put(*path: str | int, to: Any) -> Callable[[dict[str, Any]], object]:
    def change(body: dict[str, Any]) -> None:
        inside: Any = body
        for key in path[:-1]:
            inside = inside[key]
        inside[path[-1]] = to

    return change


WEIGHT = ("tensors", "models/model/model/0.weight")
"""Four rows of three, of which each worker has two."""


def whole(shape: list[int], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "chunks": []}


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


HOSTILE: dict[str, Callable[[dict[str, Any]], object]] = {
    "file above": put("files", 0, "name", to="../secrets"),
    "absolute file": put("files", 0, "name", to="/etc/passwd"),
    "hidden file": put("files", 0, "name", to=".secrets"),
    "file without a name": put("files", 0, "name", to=""),
    "file with a zero": put("files", 0, "name", to="a\0b"),
    "file twice": lambda body: body["files"].append(body["files"][0]),
    "file not listed": lambda body: body["files"].pop(),
    "wrong checksum": put(*WEIGHT, "chunks", 0, "crc32", to="00000000"),
    "no checksum": put(*WEIGHT, "chunks", 0, "crc32", to=""),
    "length beyond all": put("files", 0, "num_bytes", to=2**62),
    "length below zero": put("files", 0, "num_bytes", to=-1),
    "huge": put(*WEIGHT, "shape", to=[2**40, 3]),
    "huge, nothing of it there": put(*WEIGHT, to=whole([2**40])),
    "as many numbers as 2^64": put(*WEIGHT, to=whole([2**32, 2**32])),
    "empty and huge": put(*WEIGHT, to=whole([0, 2**62, 2**62])),
    "size below zero": put(*WEIGHT, to=whole([-1, -12])),
    "many dimensions": put(*WEIGHT, to=whole([1] * 1000 + [0])),
    "slice outside": put(*WEIGHT, "chunks", 0, "offsets", to=[3, 0]),
    "slice before the beginning": put(*WEIGHT, "chunks", 0, "offsets", to=[-2, 0]),
    "slice of another dimension": put(*WEIGHT, "chunks", 0, "offsets", to=[0]),
    "slice of no such name": put(*WEIGHT, "chunks", 0, "key", to="nothing"),
    "another dtype": put(*WEIGHT, "dtype", to="I32"),
    "unknown dtype": put(*WEIGHT, "dtype", to="COMPLEX"),
    "tensor that is not there": put("values", "models", "model", "model", to={"tensor": "nothing"}),
    "own tensor that is not there": put("workers", 1, to={"sums": {"tensor": "nothing"}}),
    "pairs that are none": put("values", "models", "model", "model", to={"pairs": [[1, 2, 3]]}),
    "deep": put("values", "deep", to=nested(900)),
    "many workers": put("world_size", to=10**12),
    "no workers": lambda body: body.update(world_size=0, workers=[]),
    "another step": put("step", to=8),
    "step below zero": put("step", to=-7),
    "no time": put("saved_at", to="yesterday"),
    "newer format": put("format", to=3),
    "former format": put("format", to=1),
    "unknown key": put("run", to="rm -rf"),
    "missing key": lambda body: body.pop("job"),
    "list for a table": put("values", to=[1]),
    "text for a list": put("files", to="abc"),
}


def test_sealed_manifests_of_this_test_are_those_of_the_source(folder: Path) -> None:
    manifest = folder / NEWER / FILES[0]
    body = json.loads(manifest.read_bytes())
    assert sealed(body) == manifest.read_bytes()
    assert len(body["tensors"][WEIGHT[1]]["chunks"]) == 2


def test_a_manifest_that_was_edited_is_noticed(folder: Path) -> None:
    manifest = folder / NEWER / FILES[0]
    body = json.loads(manifest.read_bytes())
    digest = body["sha256"]
    body["job"]["seed"] = 5
    manifest.write_bytes(sealed(body).replace(json.loads(sealed(body))["sha256"].encode(), digest.encode()))
    assert FILES[0] in problem_of(folder)


@pytest.mark.parametrize("case", HOSTILE)
def test_an_invalid_manifest_is_refused_without_taking_memory(
    folder: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = folder / NEWER / FILES[0]
    body = json.loads(manifest.read_bytes())
    HOSTILE[case](body)
    manifest.write_bytes(sealed(body))
    empty = torch.empty

    def small(shape: Any, *args: Any, **options: Any) -> torch.Tensor:
        size = torch.Size([shape] if isinstance(shape, int) else shape)
        assert options.get("device") == "meta" or size.numel() < 10_000, "memory is taken for it"
        return empty(shape, *args, **options)

    monkeypatch.setattr(torch, "empty", small)
    problem = problem_of(folder)
    assert 0 < len(problem) < 400
    assert problem_of(folder, OLDER) == ""


@pytest.mark.parametrize("content", [b"[" * 100_000, b'{"a":' * 50_000, b"null\n", b"[]\n", b"{}\n", b"1" * 10_000])
def test_json_of_another_kind_is_no_manifest(folder: Path, content: bytes) -> None:
    (folder / NEWER / FILES[0]).write_bytes(content)
    assert FILES[0] in problem_of(folder)


def parts(header: Any, num_bytes: int = 96) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(num_bytes)


def entry(shape: Any, start: Any, end: Any, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 7,
        (2**63).to_bytes(8, "little"),
        parts(b"{"),
        parts(b"[" * 50_000),
        parts([1]),
        parts({"a": entry([24], 0, 96), "b": entry([24], 0, 96)}),  # they overlap
        parts({"a": entry([4], 0, 16), "b": entry([4], 80, 96)}),  # something between them
        parts({"a": entry([4], 0, 16)}),  # they do not fill the file
        parts({"a": entry([2**62], 0, 96)}),
        parts({"a": entry([-24], 0, 96)}),
        parts({"a": entry([24.0], 0, 96)}),
        parts({"a": entry([24], 0, 96, "PICKLE")}),
        parts({"a": {"shape": [24], "data_offsets": [0, 96]}}),
        parts({"a": entry(None, 0, 96)}),
        "pickle",
    ],
)
def test_a_file_of_tensors_of_another_kind_is_refused_and_runs_no_code(
    folder: Path, content: bytes | str, tmp_path: Path
) -> None:
    mark = tmp_path / "was here"
    if isinstance(content, str):
        content = pickle.dumps({"weight": Bomb(mark)})
    file_in(folder, FILES[1]).write_bytes(content)
    manifest = folder / NEWER / FILES[0]
    body = json.loads(manifest.read_bytes())
    body["files"][0]["num_bytes"] = len(content)
    manifest.write_bytes(sealed(body))
    assert FILES[1] in problem_of(folder)
    assert train(folder, 3).first_step == 2
    assert not mark.exists()
