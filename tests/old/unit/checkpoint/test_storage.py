"""Every storage keeps the same promises."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.checkpoint.location import find_location, split_address, storage_problems
from paceline.checkpoint.storage import Folder, Remote, Storage, open_storage
from paceline.errors import CheckpointError
from tests.old.unit.checkpoint.memory import Memory


@pytest.fixture(params=["folder", "file", "fsspec", "test"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Storage]:
    place = tmp_path / "run" / "checkpoints"
    match request.param:
        case "folder":
            yield open_storage(place)
        case "file":
            yield open_storage(f"file://{place}")
        case "fsspec":
            remote = open_storage(f"memory://{uuid.uuid4().hex}/run")
            yield remote
            remote.remove("")
        case "test":
            yield Memory()


def test_files_in_folders(storage: Storage) -> None:
    assert storage.names() == storage.names("step-00000001") == storage.folders() == []
    storage.write("step-00000001/b", [b"be", bytearray(b"fo"), memoryview(b"re")])
    storage.write("step-00000001/a", [])
    storage.write("latest", [b"old"])
    storage.write("latest", [b"new"])
    assert storage.names() == ["latest", "step-00000001"]
    assert storage.folders() == ["step-00000001"]
    assert storage.names("step-00000001") == ["a", "b"]
    assert storage.names("latest") == []  # no folder, so nothing is in it
    assert storage.read("step-00000001/b") == b"".join(storage.pieces("step-00000001/b")) == b"before"
    assert storage.read("step-00000001/a") == b""
    assert storage.read("latest") == b"new"


def test_what_is_not_there(storage: Storage) -> None:
    storage.write("step-00000001/a", [b"a"])
    for name in ("step-00000001/b", "step-00000002/a"):
        with pytest.raises(FileNotFoundError):
            storage.read(name)
        with pytest.raises(FileNotFoundError):
            list(storage.pieces(name))
        storage.remove(name)
    storage.remove("step-00000002")
    assert storage.names() == ["step-00000001"]


def test_removes_files_and_folders(storage: Storage) -> None:
    for name in ("step-00000001/a", "step-00000001/b", "step-00000010/a"):
        storage.write(name, [b"a"])
    storage.remove("step-00000001/a")
    assert storage.names("step-00000001") == ["b"]
    storage.remove("step-00000001")
    assert storage.names() == ["step-00000010"]


def test_a_claim_is_given_once(storage: Storage) -> None:
    assert storage.claim("step-00000001")
    storage.write("step-00000001/a", [b"a"])
    assert not storage.claim("step-00000001")


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.write("a", [b"old"])

    def failing() -> Iterator[bytes]:
        yield b"ne"
        raise OSError("no more")

    with pytest.raises(OSError, match="no more"):
        folder.write("a", failing())
    assert folder.read("a") == b"old" and folder.names() == ["a"]


def test_a_file_has_its_name_once_its_content_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = []

    def note(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        content = path.read_bytes() if path.is_file() else None
        synced.append((content, sorted(file.name for file in tmp_path.iterdir() if not file.name.endswith(".part"))))

    monkeypatch.setattr(os, "fsync", note)
    Folder(tmp_path).write("a", [b"con", b"tent"])
    # First the content, still without the name, and then the folder with the name in it.
    assert synced == [(b"content", []), (None, ["a"])]


@pytest.mark.parametrize("address", ["nothing-of-this-kind://bucket/run", "s4://bucket"])
def test_addresses_that_nobody_can_reach(address: str) -> None:
    with pytest.raises(CheckpointError, match=f"Checkpoints cannot be kept at {address}"):
        open_storage(address)


def test_errors_of_a_remote_storage_are_os_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    remote = Remote(f"memory://{uuid.uuid4().hex}")

    def strange(*_args: object, **_options: object) -> None:
        raise RuntimeError("the cloud is away")

    for method in ("open", "ls", "rm", "cat_file"):
        monkeypatch.setattr(remote._files, method, strange)
    for act in (
        lambda: remote.write("a", [b""]),
        lambda: remote.read("a"),
        lambda: list(remote.pieces("a")),
        remote.names,
        remote.folders,
        lambda: remote.remove("a"),
    ):
        with pytest.raises(OSError, match="RuntimeError: the cloud is away"):
            act()


def test_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    inside = Folder(tmp_path / "run" / "checkpoints")
    inside.write("step-00000003/manifest.json", [b""])
    for address in ("run", "run/", "run/checkpoints", str(tmp_path / "run"), f"file://{tmp_path}/run", "run/../run"):
        place = find_location(address)
        assert place.name is None and place.storage.folders() == ["step-00000003"], address
    for address in (
        "run/checkpoints/step-00000003",
        "run/checkpoints/step-00000003/",
        f"file://{tmp_path}/run/checkpoints/step-00000003",
    ):
        place = find_location(address)
        assert place.name == "step-00000003" and place.storage.folders() == ["step-00000003"], address
    monkeypatch.chdir("run/checkpoints/step-00000003")
    assert find_location(".").name == "step-00000003"
    with pytest.raises(CheckpointError, match="There is no folder 'nowhere'"):
        find_location("nowhere")


def test_places_behind_an_address() -> None:
    root = f"memory://{uuid.uuid4().hex}"
    open_storage(f"{root}/run/checkpoints").write("step-00000003/manifest.json", [b""])
    for address in (f"{root}/run", f"{root}/run/", f"{root}/run/checkpoints"):
        place = find_location(address)
        assert place.name is None and place.storage.folders() == ["step-00000003"], address
    assert find_location(f"{root}/run/checkpoints/step-00000003").name == "step-00000003"
    assert split_address(f"{root}/model.safetensors") == (root, "model.safetensors")
    open_storage(root).remove("")


def test_a_sentence_for_what_a_storage_says() -> None:
    with (
        pytest.raises(CheckpointError, match=r"^/data cannot be written: Permission denied\.$"),
        storage_problems("/data", "written"),
    ):
        raise PermissionError(13, "Permission denied", "/data/file")
