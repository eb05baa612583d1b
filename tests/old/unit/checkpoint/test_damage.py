"""Whatever happens to the files of a checkpoint is noticed, and the one before it found."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from paceline.checkpoint import newest_good, read_checkpoint, verify_checkpoint
from paceline.checkpoint.storage import Folder
from paceline.errors import CheckpointError
from tests.old.unit.checkpoint.memory import Memory, state_at, write_checkpoint

OLDER, NEWER = "step-00000004", "step-00000007"
FILES = ("manifest.json", "worker-00000.safetensors", "worker-00001.safetensors")

Damage = Callable[[Memory, str], None]


@pytest.fixture
def storage() -> Memory:
    memory = Memory({"latest": b"step-00000007\n"})
    write_checkpoint(memory, 4)
    write_checkpoint(memory, 7)
    return memory


def _assert_found(storage: Memory, name: str, step: int) -> None:
    found, _ = newest_good(storage)
    assert found is not None and found.name == name
    state, shared = state_at(step), found.shared
    assert torch.equal(shared["model"]["weight"], state["model/weight"])
    assert shared["model"]["head"] is shared["model"]["weight"]
    assert torch.equal(shared["model"]["bias"], state["model/bias"])
    assert torch.equal(found.own(1)["sums"], state["worker:1/sums"])
    assert shared["progress"] == (step, float("inf"))


def test_finds_the_newest(storage: Memory) -> None:
    _assert_found(storage, NEWER, 7)


def _truncate(storage: Memory, path: str) -> None:
    storage.files[path] = storage.files[path][:-1]


def _halve(storage: Memory, path: str) -> None:
    storage.files[path] = storage.files[path][: len(storage.files[path]) // 2]


def _empty(storage: Memory, path: str) -> None:
    storage.files[path] = b""


def _lengthen(storage: Memory, path: str) -> None:
    storage.files[path] += b"\0"


def _flip(storage: Memory, path: str) -> None:
    content = bytearray(storage.files[path])
    content[-9] ^= 1
    storage.files[path] = bytes(content)


def _delete(storage: Memory, path: str) -> None:
    del storage.files[path]


def _take_older(storage: Memory, path: str) -> None:
    storage.files[path] = storage.files[path.replace(NEWER, OLDER)]


def _make_folder(storage: Memory, path: str) -> None:
    storage.files[f"{path}/inside"] = storage.files.pop(path)


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize(
    "damage",
    [_truncate, _halve, _empty, _lengthen, _flip, _delete, _take_older, _make_folder],
    ids=lambda f: f.__name__,
)
def test_every_damage_is_found(storage: Memory, damage: Damage, file: str) -> None:
    damage(storage, f"{NEWER}/{file}")
    for check in (read_checkpoint, verify_checkpoint):
        with pytest.raises(CheckpointError):
            check(storage, NEWER)
    _assert_found(storage, OLDER, 4)
    # Without a manifest it is not a damaged checkpoint, but none.
    unfinished = "manifest.json" not in storage.names(NEWER)
    assert [NEWER in problem and file in problem for problem in newest_good(storage)[1]] == [True] * (not unfinished)
    storage.remove(OLDER)
    if unfinished:
        with pytest.raises(
            CheckpointError, match=f"None of the 1 checkpoints .*{NEWER}, manifest.json is missing, and"
        ):
            newest_good(storage)
        storage.remove("latest")  # as where the run was killed while it saved for the first time
        words = f"{NEWER} in memory is not used: manifest.json, the last file that is written, is missing there."
        assert newest_good(storage) == (None, [words])
    else:
        with pytest.raises(CheckpointError, match=f"None of the 1 checkpoints in memory can be used.*{NEWER}"):
            newest_good(storage)


def test_all_files_of_another_checkpoint(storage: Memory) -> None:
    for file in FILES:
        _take_older(storage, f"{NEWER}/{file}")
    _assert_found(storage, OLDER, 4)
    assert newest_good(storage)[1] == [f"The checkpoint {NEWER} cannot be used: manifest.json is of step 4."]


@pytest.mark.parametrize("latest", [None, b"", b"step-00000099\n", b"../../etc\n", b"\xff\0"])
def test_latest_is_for_people_only(storage: Memory, latest: bytes | None) -> None:
    if latest is None:
        del storage.files["latest"]
    else:
        storage.files["latest"] = latest
    _assert_found(storage, NEWER, 7)


def test_what_is_not_ours_is_passed_over(storage: Memory) -> None:
    for foreign in ("step-9", "step-00000009", "step-0000000x/manifest.json", "notes.txt", "step-8/manifest.json"):
        storage.files[foreign] = b"somebody else's"
    storage.files[f"{NEWER}/notes.txt"] = b"a good one"
    storage.files["step-00000012/worker-00000.safetensors"] = b"unfinished"
    _assert_found(storage, NEWER, 7)
    assert newest_good(storage)[1] == []


def test_a_storage_that_fails_is_no_reason_to_give_up(storage: Memory) -> None:
    class Failing(Memory):
        def pieces(self, name: str) -> Iterator[bytes]:
            if name.startswith(NEWER):
                raise PermissionError(13, "Permission denied")
            return super().pieces(name)

    failing = Failing(storage.files)
    _assert_found(failing, OLDER, 4)
    assert "worker-00000.safetensors cannot be read: Permission denied" in newest_good(failing)[1][0]


def test_a_file_without_end_is_not_read_to_its_end(storage: Memory) -> None:
    class Endless(Memory):
        def pieces(self, _name: str) -> Iterator[bytes]:
            for _ in range(10):
                yield b"\0" * 1000
            pytest.fail("read on")

    with pytest.raises(CheckpointError, match="has more than"):
        read_checkpoint(Endless(storage.files), NEWER)


def test_links_and_folders_on_a_disk(tmp_path: Path, storage: Memory) -> None:
    for path, content in storage.files.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_bytes(content)
    (tmp_path / NEWER / FILES[1]).unlink()
    (tmp_path / NEWER / FILES[1]).symlink_to("nowhere")
    (tmp_path / "step-00000009").write_text("a file")
    (tmp_path / "step-00000010").symlink_to(tmp_path / "step-00000010")  # a link to itself
    (tmp_path / "step-00000011" / "manifest.json").mkdir(parents=True)
    found, problems = newest_good(Folder(tmp_path))
    assert found is not None and found.name == OLDER
    assert len(problems) == 2 and "Is a directory" in problems[0] and "is missing" in problems[1]


@pytest.mark.slow
def test_ten_thousand_flipped_bytes(storage: Memory) -> None:
    storage.remove(OLDER)
    draw = random.Random(20310405)
    paths = [f"{NEWER}/{file}" for file in FILES]
    sizes = [len(storage.files[path]) for path in paths]
    for _ in range(10_000):
        (path,) = draw.choices(paths, sizes)
        whole = storage.files[path]
        content = bytearray(whole)
        content[draw.randrange(len(whole))] ^= draw.randrange(1, 256)
        storage.files[path] = bytes(content)
        with pytest.raises(CheckpointError):
            read_checkpoint(storage, NEWER)
        storage.files[path] = whole
    _assert_found(storage, NEWER, 7)
