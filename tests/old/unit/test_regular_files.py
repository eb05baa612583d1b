"""Whatever lies in the place of a file that the program reads: one sentence, at once."""

from __future__ import annotations

import errno
import json
import os
import socket
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.checkpoint.storage import Folder
from paceline.errors import PacelineError
from paceline.hardware.read import read_topology
from paceline.launch.failures import Failure
from paceline.launch.node_list import read_node_file
from paceline.regular_files import MOST_TEXT_BYTES, create, open_regular, read_bytes, read_json, replace_text
from paceline.report.comm_page import load_timings
from paceline.report.parity import load_trace
from paceline.spec import Cluster, Job, Plan, load_job
from paceline.spec.record import RunRecord
from paceline.train.records.metrics import json_lines
from paceline.workflows.run_folder import write_run
from paceline.workflows.step_time_files import read_observations
from tests.old.sample_records import sample_job

READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "job": ("job.toml", load_job),
    "record": ("record.json", RunRecord.load),
    "cluster": ("cluster.json", Cluster.load),
    "topology": ("topology.txt", read_topology),
    "plan": ("plan.json", Plan.load),
    "job of a run": ("job.json", Job.load),
    "hosts": ("hosts.txt", read_node_file),
    "timings": ("timings.json", load_timings),
    "trace": ("rank0.jsonl", lambda path: load_trace(path.parent, 1)),
    "step times": ("steps.csv", read_observations),
}


def _named_pipe(path: Path) -> None:
    os.mkfifo(path)


def _endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _terminal(path: Path) -> None:
    path.symlink_to("/dev/tty")


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(path))


def _huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(MOST_TEXT_BYTES + 1)


def _loop(path: Path) -> None:
    path.symlink_to(path)


def _folder(path: Path) -> None:
    path.mkdir()


def _binary(path: Path) -> None:
    path.write_bytes(b"\x00\xff\xfe" * 100)


def _deep_json(path: Path) -> None:
    path.write_text('{"a":' * 10_000 + "1" + "}" * 10_000)


def _deep_toml(path: Path) -> None:
    path.write_text("a = " + "[" * 10_000 + "]" * 10_000)


def _many_digits(path: Path) -> None:
    path.write_text('{"seed": ' + "7" * 5_000 + "}")


STRANGE = (
    *(_named_pipe, _endless, _terminal, _socket, _huge, _loop, _folder, _binary),
    *(_deep_json, _deep_toml, _many_digits),
)


@pytest.fixture
def short_path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Names of sockets have at most 107 characters."""
    yield tmp_path_factory.mktemp("f")


@pytest.mark.parametrize("strange", STRANGE, ids=lambda one: one.__name__)
@pytest.mark.parametrize("reader", READERS)
def test_whatever_lies_there_is_one_sentence(reader: str, strange: Callable[[Path], None], short_path: Path) -> None:
    name, read = READERS[reader]
    strange(short_path / name)
    with pytest.raises(PacelineError) as refused:
        read(short_path / name)
    assert len(str(refused.value)) < 1200 and "\n" not in str(refused.value).strip()


@pytest.mark.parametrize("strange", STRANGE, ids=lambda one: one.__name__)
def test_a_note_of_a_failure_that_is_none(strange: Callable[[Path], None], short_path: Path) -> None:
    strange(short_path / "rank0.json")
    assert Failure.read(short_path / "rank0.json") is None


@pytest.mark.parametrize("strange", (_named_pipe, _endless, _socket, _folder), ids=lambda one: one.__name__)
def test_a_checkpoint_storage_reads_regular_files_only(strange: Callable[[Path], None], short_path: Path) -> None:
    strange(short_path / "manifest.json")
    storage = Folder(short_path)
    with pytest.raises(OSError):
        storage.read("manifest.json")
    with pytest.raises(OSError):
        next(iter(storage.pieces("manifest.json")))
    with pytest.raises(OSError):
        storage.stretch("manifest.json", 0, 10)


def test_a_link_to_a_file_is_followed(tmp_path: Path) -> None:
    (tmp_path / "there.json").write_text('{"a": 1}')
    (tmp_path / "here.json").symlink_to("there.json")
    assert read_json(tmp_path / "here.json") == {"a": 1}
    with open_regular(tmp_path / "here.json") as file:
        assert file.read() == b'{"a": 1}'


@pytest.mark.parametrize(("num_replaced", "is_read"), [(1, True), (3, True), (4, False)])
def test_a_file_that_another_node_replaces_meanwhile_is_read_again(
    num_replaced: int, is_read: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a network file system, where the file that was opened is gone."""
    path, looks = tmp_path / "lease.json", iter([True] * num_replaced)
    path.write_text("{}")
    own = os.fstat

    def fstat(descriptor: int) -> os.stat_result:
        if sys._getframe(1).f_code.co_name == "_read_once" and next(looks, False):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return own(descriptor)

    monkeypatch.setattr(os, "fstat", fstat)
    if is_read:
        assert read_bytes(path) == b"{}"
        return
    with pytest.raises(OSError, match="Stale file handle"):
        read_bytes(path)


def test_a_file_is_bounded_before_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(b"12345")
    assert read_bytes(tmp_path / "large", 5) == b"12345"
    with pytest.raises(OSError, match="5 bytes, and 4 at most"):
        read_bytes(tmp_path / "large", 4)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux has /proc")
def test_files_of_the_kernel_have_no_size_and_a_content() -> None:
    assert b"Linux" in read_bytes("/proc/version")


def test_what_is_written_replaces_pipes_and_links(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "job.json")
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "plan.json").symlink_to("victim")
    (tmp_path / "plan.json.tmp").symlink_to("victim")
    write_run(sample_job(), Plan(), tmp_path)
    assert Job.load(tmp_path / "job.json") == sample_job() and Plan.load(tmp_path / "plan.json") == Plan()
    assert (tmp_path / "victim").read_text() == "mine"


def test_metrics_go_on_whatever_lies_there(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 0.5}\n[]\n{"step": "2"}\n{"step": 2}\n{"step": 3}\n{"st')
    sink = json_lines(tmp_path, 2, print)
    sink.log(3, {"loss": 0.25})
    sink.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]
    path.unlink()
    os.mkfifo(path)
    sink = json_lines(tmp_path, 0, print)
    sink.log(1, {"loss": 0.5})
    sink.close()
    assert path.read_text() == '{"step": 1, "loss": 0.5}\n'


def test_a_failure_s_evidence_from_an_endless_line(tmp_path: Path) -> None:
    from paceline.launch.failure_report import _tail

    path = tmp_path / "rank1.log"
    path.write_bytes(b"x" * (1 << 21) + b"\nlast line\n")
    assert len(_tail(path, 5)) < 1 << 17 and _tail(path, 1) == "last line\n"


def _modes(folder: Path, umask: int) -> list[int]:
    before = os.umask(umask)
    try:
        storage = Folder(folder / "checkpoints")
        storage.write("step-00000001/worker-00000.safetensors", [b"numbers"])
        write_run(sample_job(), Plan(), folder)
    finally:
        os.umask(before)
    files = ("checkpoints/step-00000001/worker-00000.safetensors", "job.json", "plan.json")
    return [stat.S_IMODE((folder / name).stat().st_mode) for name in files]


@pytest.mark.skipif(sys.platform != "linux", reason="the umask is read from /proc")
@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o600), (0o077, 0o600), (0o002, 0o664), (0o007, 0o660)])
def test_what_a_run_writes_is_its_owners(tmp_path: Path, umask: int, mode: int) -> None:
    tmp_path.chmod(0o755)
    assert _modes(tmp_path, umask) == [mode] * 3


def test_a_text_that_cannot_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_text(tmp_path / "a", "old")

    def full(path: Path | str, mode: int) -> Any:
        file = create(path, mode)
        file.close()
        return open("/dev/full", "wb", buffering=0)

    monkeypatch.setattr("paceline.regular_files.create", full)
    with pytest.raises(OSError):
        replace_text(tmp_path / "a", "new")
    assert (tmp_path / "a").read_text() == "old" and os.listdir(tmp_path) == ["a"]  # noqa: PTH208
