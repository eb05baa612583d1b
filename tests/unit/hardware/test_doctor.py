"""The doctor's checks: what is wrong is a warning or an error with what to do; nothing else is."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import paceline
from paceline.cli import commands
from paceline.hardware.doctor import checks
from paceline.hardware.doctor.checks import Finding, NameLookup, TorchFacts
from paceline.hardware.doctor.cluster import NodeSurvey, check_nodes
from paceline.hardware.doctor.node import NodeFacts, check_gpus, examine, quota_cores
from paceline.launch.run import Transport
from paceline.workflows.machine import survey
from tests.unit.hardware.fake_nvml import HEALTHY, FakeNvml, NVMLError

CUDA_12 = TorchFacts("2.9.0+cu126", "12.6", 8)


def assert_says(findings: Sequence[Finding], level: str, words: list[str]) -> None:
    """There is one finding, of this level, and what it says and advises has the words."""
    (finding,) = findings
    assert finding.level == level, finding
    for word in words:
        assert word in f"{finding.what} | {finding.fix}", finding
    assert bool(finding.fix) == (level != "ok"), finding
    assert finding.what.endswith(".")


# --- GPUs ---


def about_gpus(num_gpus: int, answers: dict[str, Any], torch: TorchFacts = CUDA_12) -> list[Finding]:
    _, found = check_gpus(torch, FakeNvml(num_gpus, answers))
    return found


def test_gpus_in_good_health_are_all_fine() -> None:
    nvml = FakeNvml(4, HEALTHY)
    names, found = check_gpus(CUDA_12, nvml)
    assert nvml.num_open == 0 and names == ["NVIDIA H100 80GB HBM3"] * 4
    assert {finding.level for finding in found} == {"ok"} and len(found) == 6


@pytest.mark.parametrize(
    ("question", "answer", "level", "words"),
    [
        ("nvmlDeviceGetTotalEccErrors", 2, "error", ["GPU 0", "2 uncorrectable", "--gpu-reset -i 0"]),
        ("nvmlDeviceGetRemappedRows", [0, 1, 1, 0], "error", ["GPU 0", "reset"]),
        ("nvmlDeviceGetRemappedRows", [0, 1, 1, 1], "error", ["GPU 0", "no spare"]),
        ("nvmlDeviceGetRetiredPagesPendingStatus", 1, "error", ["reset"]),
        ("nvmlDeviceGetEccMode", [0, 0], "warning", ["correct memory errors", "-e 1"]),
        ("nvmlDeviceGetCurrentClocksThrottleReasons", 0x20, "warning", ["too hot"]),
        ("nvmlDeviceGetCurrentClocksThrottleReasons", 0x80, "warning", ["power"]),
        ("nvmlDeviceGetCurrentClocksThrottleReasons", 0x02, "warning", ["clocks", "held down"]),
        ("nvmlDeviceGetPowerManagementLimit", 300_000, "warning", ["300 W", "700 W", "-pl 700"]),
        ("nvmlDeviceGetCurrPcieLinkWidth", 8, "warning", ["8 of its 16", "PCIe"]),
        ("nvmlDeviceGetPersistenceMode", 0, "warning", ["-pm 1"]),
        ("nvmlDeviceGetComputeMode", 2, "error", ["compute mode", "-c DEFAULT"]),
        ("nvmlDeviceGetMigMode", [1, 1], "warning", ["MIG"]),
        ("nvmlDeviceGetUtilizationRates", SimpleNamespace(gpu=62), "warning", ["GPU 0 is in use: 62 % busy"]),
    ],
)
def test_one_thing_wrong_with_a_gpu_is_the_one_finding(
    question: str, answer: Any, level: str, words: list[str]
) -> None:
    found = about_gpus(1, HEALTHY | {question: answer})
    assert_says([finding for finding in found if finding.level != "ok"], level, words)


@pytest.mark.parametrize("reasons", [0x0, 0x1, 0x4, 0x10, 0x100])
def test_idle_and_power_capped_gpus_are_fine(reasons: int) -> None:
    found = about_gpus(1, HEALTHY | {"nvmlDeviceGetCurrentClocksThrottleReasons": reasons})
    assert {finding.level for finding in found} == {"ok"}


def test_a_gpu_that_answers_nothing_is_not_reported() -> None:
    assert {finding.level for finding in about_gpus(2, {})} == {"ok"}


def test_several_problems_of_one_gpu_are_all_named() -> None:
    hot = {"nvmlDeviceGetCurrentClocksThrottleReasons": 0x22, "nvmlDeviceGetPowerManagementLimit": 300_000}
    assert [finding.level for finding in about_gpus(1, HEALTHY | hot)].count("warning") == 3


def test_pairs_that_cannot_copy_to_each_other_are_named() -> None:
    found = about_gpus(3, HEALTHY | {"nvmlDeviceGetP2PStatus": lambda _, other, __: 3 * (other == 2)})
    assert_says([finding for finding in found if finding.level != "ok"], "warning", ["0-2 and 1-2", "--pick"])


@pytest.mark.parametrize(
    ("torch", "words"),
    [
        (TorchFacts("2.9.0+cpu"), ["2.9.0+cpu", "CPU"]),
        (TorchFacts("2.9.0", "12.6", 0, "the driver is too old"), ["none of 1", "driver is too old", "12.6"]),
    ],
)
def test_a_torch_that_cannot_use_the_gpus_is_an_error(torch: TorchFacts, words: list[str]) -> None:
    assert_says([one for one in about_gpus(1, HEALTHY, torch) if one.level != "ok"], "error", words)


def test_a_driver_that_does_not_answer_says_why() -> None:
    names, found = check_gpus(CUDA_12, FakeNvml(2, {"nvmlInit": NVMLError("Driver Not Loaded")}))
    assert names == []
    assert_says(found, "ok", ["no NVIDIA GPU"])  # none is on the bus


def test_every_query_of_the_stand_in_exists_in_the_library() -> None:
    pynvml = importlib.import_module("pynvml")
    assert [name for name in HEALTHY if not hasattr(pynvml, name)] == []


# --- the other checks of one node ---

PEER = NameLookup("gpu2", "10.0.0.2")


@pytest.mark.parametrize(
    ("found", "level", "words"),
    [
        (checks.check_driver(7, 8, "570", ""), "error", ["8 ", "7"]),
        (checks.check_driver(0, 2, "", "Driver Not Loaded"), "error", ["2 ", "Not Loaded"]),
        (
            checks.check_torch(TorchFacts(problem="No module named 'torch'"), "3.11"),
            "error",
            ["No module", "pip install"],
        ),
        (checks.check_torch(CUDA_12, "3.11.7"), "ok", ["2.9.0+cu126", "3.11.7"]),
        (checks.check_quota(64, 4.0), "warning", ["4 ", "64", "0-3"]),
        (checks.check_quota(64, 0.5), "warning", ["0.5", "0-0"]),
        (checks.check_quota(4, float("inf")), "ok", ["4"]),
        (checks.check_open_files(1024, 1024), "warning", ["1024", "limits.conf"]),
        (checks.check_open_files(1024, 524288), "warning", ["ulimit -n 524288"]),
        (checks.check_open_files(1024, -1), "warning", ["ulimit -n 4096"]),
        (checks.check_open_files(65536, 65536), "ok", ["65536"]),
        (checks.check_open_files(-1, -1), "ok", ["any number"]),
        (checks.check_shared_memory(2**26, 2**26), "warning", ["Bus error", "--shm-size"]),
        (checks.check_shared_memory(2**26, 2**20), "warning", ["1 MiB", "64 MiB", "--shm-size"]),
        (checks.check_shared_memory(2**36, 2**20), "warning", ["ls -lS /dev/shm"]),
        (checks.check_shared_memory(2**36, 2**35), "ok", ["32 GiB"]),
        (checks.check_shared_memory(0, 0), "warning", ["no /dev/shm"]),
        (checks.check_run_folder(Path("/runs"), 2**20, "", is_writable=True), "error", ["/runs", "1 MiB"]),
        (checks.check_run_folder(Path("/runs"), 2**32, "", is_writable=True), "warning", ["/runs", "4 GiB"]),
        (checks.check_run_folder(Path("/runs"), 2**40, "", is_writable=True), "ok", ["/runs"]),
        (checks.check_run_folder(Path("/runs"), 2**40, "", is_writable=False), "error", ["/runs", "--out"]),
        (checks.check_run_folder(Path("/a/b"), 2**40, "/a", is_writable=True), "error", ["/a is not a folder"]),
        # The name that Debian gives 127.0.1.1 is a trap between nodes only.
        (checks.check_own_name(NameLookup("gpu1", "127.0.1.1"), "10.0.0.1", has_peers=False), "ok", []),
        (
            checks.check_own_name(NameLookup("gpu1", "127.0.1.1"), "10.0.0.1", has_peers=True),
            "error",
            ["127.0.1.1", "10.0.0.1"],
        ),
        (checks.check_own_name(NameLookup("gpu1", problem="not known"), "", has_peers=False), "warning", ["gpu1"]),
        (checks.check_own_name(NameLookup("gpu1", problem="not known"), "", has_peers=True), "error", ["gpu1"]),
        (
            checks.check_own_name(NameLookup("gpu1", "10.0.0.1", 5.02), "10.0.0.1", has_peers=True),
            "warning",
            ["5.0 s", "/etc/hosts"],
        ),
        (checks.check_route(PEER, "eth0"), "ok", ["eth0", "gpu2"]),
        (checks.check_route(PEER, ""), "error", ["ip route get 10.0.0.2"]),
        (checks.check_route(PEER, "lo"), "error", ["this node itself"]),
        (checks.check_route(PEER, "docker0"), "error", ["docker0", "inside"]),
        (checks.check_route(NameLookup("gpu2", problem="not known"), ""), "error", ["gpu2", "not known"]),
    ],
)
def test_values_of_one_node(found: list[Finding], level: str, words: list[str]) -> None:
    assert_says(found, level, words)


@pytest.mark.parametrize(
    ("own", "files", "cores"),
    [
        ("0::/job/me", {"job/cpu.max": "200000 100000", "job/me/cpu.max": "max 100000"}, 2.0),
        ("0::/job/me", {"job/me/cpu.max": "50000 100000", "job/cpu.max": "200000 100000"}, 0.5),
        ("0::/elsewhere", {"cpu.max": "150000 100000"}, 1.5),
        ("0::/", {"cpu.max": "max 100000"}, float("inf")),
        ("", {}, float("inf")),
    ],
)
def test_the_quota_of_control_groups(own: str, files: dict[str, str], cores: float, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert quota_cores(own, tmp_path) == cores


@pytest.mark.budget(processor_s=15)
def test_this_machine_is_judged_in_sentences_with_advice_where_something_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    found = paceline.doctor(folder=tmp_path / "file" / "runs")
    assert {finding.check for finding in found} >= {"torch", "/dev/shm", "run folder", "ulimit nofile", "own name"}
    assert all(finding.what.endswith(".") and finding.level in ("ok", "warning", "error") for finding in found)
    assert all(bool(finding.fix) == (finding.level != "ok") for finding in found)
    (folder,) = [finding for finding in found if finding.check == "run folder"]
    assert folder.what == f"{tmp_path / 'file'} is not a folder: no run can be written to {tmp_path / 'file' / 'runs'}."
    away = examine(tmp_path, ["no-such-node.invalid"])
    assert [finding.level for finding in away.findings if finding.check == "way to no-such-node.invalid"] == ["error"]


@pytest.mark.parametrize(
    ("levels", "code"), [([], 0), (["ok"], 0), (["ok", "warning"], 0), (["warning", "error"], 2), (["error"], 2)]
)
def test_exit_codes(levels: list[checks.Level], code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paceline, "doctor", lambda: [Finding(level, "x", "X.", "fix") for level in levels])
    assert commands.doctor() == code


# --- several nodes ---


def node(
    skew_s: float = 0.002,
    mtu: int = 1500,
    sees_folder: bool = True,
    gpus: str = "no GPU",
    unreachable: dict[str, str] | None = None,
    **versions: str,
) -> NodeSurvey:
    known = {"torch": "2.9.0+cu126", "CUDA": "12.6", "paceline": "0.1.0", "python": "3.11.7"} | versions
    return NodeSurvey(NodeFacts((), known, gpus, {"eth0": mtu}), skew_s, sees_folder, unreachable or {})


@pytest.mark.parametrize(
    ("other", "level", "check", "words"),
    [
        (node(torch="2.8.0"), "error", "same versions", ["torch", "2.9.0+cu126 on a", "2.8.0 on b"]),
        (node(python="3.12.1"), "error", "same versions", ["python", "3.11 on a", "3.12 on b"]),
        (node(mtu=9000), "warning", "MTU", ["1500 on eth0 of a", "9000 on eth0 of b", "mtu 1500"]),
        (node(sees_folder=False), "warning", "shared folder", ["b ", "/shared/runs"]),
        (node(gpus="1 x T4"), "warning", "same GPUs", ["b has 1 x T4"]),
        (node(unreachable={"a": "timed out"}), "error", "firewall", ["b ", "a: timed out"]),
        (node(skew_s=-30), "warning", "clocks", ["b is 30.0 s behind", "this node."]),
    ],
)
def test_one_thing_that_differs_between_nodes_is_the_one_finding(
    other: NodeSurvey, level: str, check: str, words: list[str]
) -> None:
    found = [one for one in check_nodes({"a": node(), "b": other}, "/shared/runs") if one.level != "ok"]
    assert_says(found, level, words)
    assert found[0].check == check


def test_nodes_alike_are_fine() -> None:
    """Patch releases of Python may differ."""
    found = check_nodes({"a": node(), "b": node(python="3.11.9")}, "/shared/runs")
    assert {finding.level for finding in found} == {"ok"} and len(found) == 6


def reached(program: Sequence[str] | None = None) -> Transport:
    """This machine, behind a greeting as some files that shells read at login print it."""

    def argv(asked: Sequence[str], _environ: object) -> Sequence[str]:
        return ["sh", "-c", 'echo Welcome; exec "$@"', "sh", *(program or asked)]

    return Transport(("b",), argv)


@pytest.mark.budget(processor_s=30)
def test_one_machine_that_is_named_twice_is_found_out(tmp_path: Path) -> None:
    folder = tmp_path / "Läufe"
    folder.mkdir()
    found = survey({"127.0.0.1": reached(), "127.0.0.2": reached()}, folder)
    assert list(folder.iterdir()) == []  # the mark is gone
    assert {finding.node for finding in found} == {"127.0.0.1", "127.0.0.2", ""}
    levels = {finding.check: finding.level for finding in found}
    assert levels["way to 127.0.0.2"] == "error"
    assert {levels[check] for check in ("same versions", "clocks", "shared folder", "firewall")} == {"ok"}


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("import sys; sys.exit('no route')", "on b: no route"),
        ("import sys; sys.exit(7)", "on b: exit code 7"),
        ("print('{}')", "b has another version of Paceline."),
        ("print('{\"facts\": 1}')", "b has another version of Paceline."),
    ],
)
def test_a_node_that_does_not_answer_is_a_finding(program: str, words: str, tmp_path: Path) -> None:
    (found,) = survey({"b": reached([sys.executable, "-c", program])}, tmp_path)
    assert (found.level, found.node) == ("error", "b") and words in found.what and found.fix


def test_what_needs_action_comes_first_each_with_its_fix(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    findings = [Finding("ok", "a", "A."), Finding("warning", "b", "B.", "do b"), Finding("error", "c", "C.", "do c")]
    monkeypatch.setattr(paceline, "doctor", lambda: findings)
    assert commands.doctor() == 2
    head, _, *rows = (line.split() for line in capsys.readouterr().out.splitlines() if line.strip())
    assert head == ["level", "what", "what", "to", "do"]
    assert rows[0] == ["error", "C.", "do", "c"] and rows[1] == ["warning", "B.", "do", "b"]
    assert " ".join(rows[2]) == "1 check passed, 1 warning, 1 error."
    assert commands.doctor(as_json=True) == 2
    listed = json.loads(capsys.readouterr().out)
    assert [finding["level"] for finding in listed["findings"]] == ["error", "warning", "ok"]
    assert (listed["num_error"], listed["num_warning"], listed["num_ok"]) == (1, 1, 1)
