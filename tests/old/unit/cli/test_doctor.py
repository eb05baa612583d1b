"""`paceline doctor`: what it prints, how it ends, and how it asks other nodes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from paceline.cli.doctor import exit_code
from paceline.hardware.checks.between_nodes import check_nodes
from paceline.hardware.checks.engine import Finding
from paceline.hardware.checks.node_checks import check_node
from paceline.hardware.checks.survey import Survey, survey
from tests.kit.nodes.cluster import Cluster, why_not
from tests.kit.nodes.sshd import ssh_between
from tests.old.hosts.why_not import why_not_ssh
from tests.old.ranks.command_line import TRACEBACK, clean_environ
from tests.old.unit.cli.conftest import Run

OK, WARNING, ERROR = (Finding(level, "x", "X.", "fix") for level in ("ok", "warning", "error"))
DOCTOR = (sys.executable, "-m", "paceline", "doctor")


@pytest.mark.parametrize(
    ("findings", "strict", "code"),
    [
        ([], False, 0),
        ([OK], True, 0),
        ([OK, WARNING], False, 0),
        ([OK, WARNING], True, 1),
        ([WARNING, ERROR], False, 2),
        ([ERROR], True, 2),
    ],
)
def test_exit_codes(findings: list[Finding], strict: bool, code: int) -> None:
    assert exit_code(findings, strict=strict) == code


def test_a_file_in_the_place_of_the_run_folder_is_an_error(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "runs"):
        found = json.loads(run("doctor", "--folder", folder, "--json")[1])["findings"]
        (one,) = [finding for finding in found if finding["check"] == "run folder"]
        assert one["level"] == "error"
        assert one["what"] == f"{tmp_path / 'file'} is not a folder: no run can be written to {folder}."


def test_no_name_of_a_node_is_refused_as_launch_does(run: Run, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("")
    doctor, launch = run("doctor", "--hosts", ""), run("launch", "--hosts", "", tmp_path / "script.py")
    assert doctor == launch
    assert doctor[0] == 2 and "entry 1: '' is not the name of a node" in doctor[2]


def test_what_needs_action_comes_first_each_with_its_fix(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "nosuch0")
    code, out, err = run("doctor")
    assert code == 2, err
    first, fix = out.splitlines()[:2]
    assert first.startswith("error")
    assert "NCCL_SOCKET_IFNAME=nosuch0 names no interface" in " ".join((first, fix))
    assert "→ unset NCCL_SOCKET_IFNAME" in out
    assert " checks passed, " in out.splitlines()[-1]
    assert max(map(len, out.splitlines())) <= 100

    listed = json.loads(run("doctor", "--json")[1])
    order = [finding["level"] for finding in listed["findings"]]
    assert order == sorted(order, key=["error", "warning", "ok"].index)
    assert [listed[f"num_{level}"] for level in ("error", "warning", "ok")] == [
        order.count(level) for level in ("error", "warning", "ok")
    ]
    assert listed["findings"][0]["check"] == "NCCL_SOCKET_IFNAME"


def test_invalid_hosts_are_one_sentence(run: Run) -> None:
    for wrong in ("a:0", "a,a", "-oProxyCommand=x"):
        code, out, err = run("doctor", f"--hosts={wrong}")
        assert (code, out) == (2, "")
        assert err.startswith("paceline: hosts, entry")
        assert TRACEBACK not in err


def test_one_node_listens_and_another_connects(run: Run) -> None:
    process = _start_here("anywhere", [*DOCTOR, "--listen", "127.0.0.1"])
    assert process.stdout is not None
    assert process.stdout.readline() == "Welcome\n"
    port = json.loads(process.stdout.readline())["port"]
    code, knocked, _ = run("doctor", "--connect", f"a=127.0.0.1:{port},b=127.0.0.1:1")
    assert code == 0
    there, nowhere = json.loads(knocked)
    assert (there["target"], there["problem"]) == ("a", "")
    assert "refused" in nowhere["problem"]
    assert process.communicate(timeout=20) == ("", "")  # its input ends, and so does it
    assert process.returncode == 0
    code, out, err = run("doctor", "--listen", "203.0.113.1")
    assert (code, out) == (2, "")
    assert err.startswith("paceline: Nothing can listen on 203.0.113.1 here")


def _start_here(_host: str, program: Sequence[str]) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    greeting = ["sh", "-c", 'echo Welcome; exec "$@"', "sh"]  # as some files that shells read at login do
    return subprocess.Popen([*greeting, *program], stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=clean_environ())


def _surveyed(found: Survey) -> list[Finding]:
    findings = [*found.problems, *check_nodes(found)]
    return findings + [finding for facts in found.nodes.values() for finding in check_node(facts)]


def test_one_machine_that_is_named_twice_is_found_out(tmp_path: Path) -> None:
    found = survey(["127.0.0.1", "127.0.0.2"], _start_here, doctor=DOCTOR, folder=tmp_path)
    assert set(found.nodes) == {"127.0.0.1", "127.0.0.2"}
    assert list(tmp_path.iterdir()) == []  # the mark is gone
    wrong = {finding.check: finding for finding in _surveyed(found) if finding.level == "error"}
    assert "all call themselves" in wrong["host names"].what
    assert "means this node itself" in wrong["way to 127.0.0.2"].what
    assert "shared folder" not in wrong  # they do share it


@pytest.mark.parametrize(
    ("program", "sentence"),
    [
        ("import sys; sys.exit('no route')", "b did not answer: no route."),
        ("import sys; sys.exit(7)", "b did not answer: it did not say why."),
        ("print('{}')", "b has another version of Paceline."),
        ("print('hello')", "b has another version of Paceline."),
        ("print('[1]')", "b has another version of Paceline."),
    ],
)
def test_a_node_that_does_not_answer_is_a_finding(program: str, sentence: str, tmp_path: Path) -> None:
    def start_on(host: str, _argv: Sequence[str]) -> subprocess.Popen[str]:
        return _start_here(host, [sys.executable, "-c", program])

    found = survey(["b"], start_on, doctor=DOCTOR, folder=tmp_path)
    assert found.nodes == {}
    assert [(finding.level, finding.what, finding.node) for finding in found.problems] == [("error", sentence, "b")]


def test_the_reason_of_whoever_starts_programs_is_the_better_one(tmp_path: Path) -> None:
    def explain(code: int, complaint: str, host: str) -> str:
        return f"{host} ended with {code} and said {complaint.strip()}."

    def start_on(host: str, _argv: Sequence[str]) -> subprocess.Popen[str]:
        return _start_here(host, [sys.executable, "-c", "import sys; print('x', file=sys.stderr); sys.exit(255)"])

    found = survey(["b"], start_on, doctor=DOCTOR, folder=tmp_path, explain=explain)
    assert [finding.what for finding in found.problems] == ["b ended with 255 and said x."]


# --- real nodes ---


def _start_inside(cluster: Cluster, host: str, program: Sequence[str]) -> subprocess.Popen[str]:
    node = next(node for node in cluster.nodes if node.hostname == host)
    enter = ["nsenter", "--target", str(node.init_pid), "--net", "--uts", "--mount", "--ipc", "--pid"]
    return _start_here(host, [*enter, f"--wd={Path.cwd()}", *program])


def _configure(cluster: Cluster, host: str, command: str) -> None:
    process = _start_inside(cluster, host, command.split())
    _, complaint = process.communicate(timeout=20)
    assert process.returncode == 0, complaint


@pytest.mark.hosts
@pytest.mark.slow
def test_nodes_connect_to_each_other(tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    with Cluster(num_nodes=2, rate_bits_per_s=1e9) as cluster:
        names = [node.hostname for node in cluster.nodes]

        def wrong() -> dict[str, Finding]:
            found = survey(names, lambda host, argv: _start_inside(cluster, host, argv), doctor=DOCTOR, folder=tmp_path)
            assert set(found.nodes) == set(names)
            between = [*found.problems, *check_nodes(found)]
            of_each = [f for facts in found.nodes.values() for f in check_node(facts) if f.check.startswith("way to")]
            return {finding.check: finding for finding in between + of_each if finding.level != "ok"}

        assert wrong() == {}

        _configure(cluster, names[0], "ip link set dev eth0 mtu 1400")
        cluster.nodes[1].link_down()
        found = wrong()
        assert list(found) == ["MTU", "firewall"]
        assert f"cannot connect to a port of {names[0]}" in found["firewall"].what
        cluster.nodes[1].link_up()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.hosts
@pytest.mark.slow
def test_nodes_are_asked_over_ssh(tmp_path: Path) -> None:
    if reason := why_not() or why_not_ssh():
        pytest.skip(reason)
    keys, folder = tmp_path / "keys", tmp_path / "shared"
    keys.mkdir()
    folder.mkdir()
    with Cluster(num_nodes=2, rate_bits_per_s=1e9) as cluster, ssh_between(cluster.nodes, keys):
        names = [node.hostname for node in cluster.nodes]
        asked = [*DOCTOR, "--hosts", ",".join(names), "--folder", str(folder), "--json"]
        process = cluster.nodes[0].exec(asked)
        assert process.wait(90) == 0, process.output
        findings = json.loads(process.stdout)["findings"]
    assert {finding["node"] for finding in findings} == {"", *names}
    fine = {finding["check"] for finding in findings if finding["level"] == "ok"}
    assert fine >= {"same versions", "host names", "MTU", "firewall", "clocks", "shared folder"}
