"""A program on another node over a real SSH: its bytes, its end, and one sentence for what goes wrong."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from paceline.launch.ssh import ALIVE_INTERVAL_S, CONNECT_TIMEOUT_S, SSH_FAILED, explain_ssh_failure, ssh_argv
from tests.kit.nodes.cluster import Cluster
from tests.kit.nodes.sshd import ssh_between
from tests.old.hosts.stdio import VARIABLE, commands_on, echo_program, orphan, talk, wait_until
from tests.old.hosts.why_not import why_not_ssh

pytestmark = [pytest.mark.hosts, pytest.mark.skipif(bool(why_not_ssh()), reason=why_not_ssh() or "")]

TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ssh")


@pytest.fixture(scope="module")
def cluster(folder: Path) -> Iterator[Cluster]:
    with Cluster(num_nodes=2, rate_bits_per_s=1e9) as cluster, ssh_between(cluster.nodes, folder):
        yield cluster


def test_bytes_pass_both_ways_and_the_end_of_input_ends_the_program(cluster: Cluster, tmp_path: Path) -> None:
    cwd = tmp_path / "a folder's name"
    cwd.mkdir()
    value = 'it\'s $HOME; `date`\n\\ "quoted"'
    argv = ssh_argv("node1", echo_program(), cwd=cwd, environ={VARIABLE: value})
    place = talk(cluster.nodes[0], argv, timeout_s=TIMEOUT_S)
    assert (place.hostname, place.cwd, place.variable) == ("node1", str(cwd), value)


def test_nothing_is_left_of_a_client_that_was_killed(cluster: Cluster, tmp_path: Path) -> None:
    mark = tmp_path.name
    argv = ssh_argv("root@10.77.0.2", echo_program(mark), cwd=tmp_path, environ={})
    place = orphan(cluster.nodes[0], argv, timeout_s=TIMEOUT_S)
    assert place.hostname == "node1"
    wait_until(
        lambda: not any(mark in command or "sshd: root" in command for command in commands_on(cluster.nodes[1])),
        timeout_s=TIMEOUT_S,
        what="the program and its session have ended",
    )


@pytest.mark.parametrize(
    ("host", "options", "program", "cwd", "words"),
    [
        ("nowhere", (), ("true",), "/", "The name nowhere is not known"),
        ("10.77.0.99", (), ("true",), "/", "cannot be reached over the network"),
        ("node1", ("-p", "2222"), ("true",), "/", "Nothing answers SSH on node1"),
        ("node1", ("-o", "UserKnownHostsFile={folder}/nobody_known"), ("true",), "/", "not among the known hosts"),
        ("node1", ("-o", "UserKnownHostsFile={folder}/wrongly_known"), ("true",), "/", "another host key"),
        ("node1", ("-i", "{folder}/stranger", "-F", "{folder}/stranger_config"), ("true",), "/", "does not let you in"),
        ("node1", (), ("true",), "/no such folder", "no such folder to work in"),
        ("node1", (), ("/no/such/python", "-m", "paceline"), "/", "no such Python"),
        ("node1", (), (sys.executable, "-I", "-S", "-m", "paceline"), "/", "install the same version"),
        ("node1", (), ("sh", "-c", "exit 3"), "/", None),
    ],
)
def test_what_goes_wrong_is_one_sentence(
    cluster: Cluster,
    folder: Path,
    host: str,
    options: tuple[str, ...],
    program: tuple[str, ...],
    cwd: str,
    words: str | None,
) -> None:
    _write_broken_settings(folder)
    options = tuple(word.format(folder=folder) for word in options)
    client = cluster.nodes[0].exec(_impatient(ssh_argv(host, program, cwd=Path(cwd), environ={}, options=options)))
    exit_code = client.wait(TIMEOUT_S)
    sentence = explain_ssh_failure(exit_code, client.stderr, host)
    if words is None:
        assert (exit_code, sentence) == (3, None)
    else:
        assert sentence is not None
        assert words in sentence, (sentence, client.stderr)
        assert "\n" not in sentence


def test_no_option_makes_it_trust_a_stranger(cluster: Cluster, folder: Path) -> None:
    _write_broken_settings(folder)
    options = ("-o", "StrictHostKeyChecking=no", "-o", f"UserKnownHostsFile={folder}/nobody_known")
    client = cluster.nodes[0].exec(ssh_argv("node1", ("true",), cwd=Path("/"), environ={}, options=options))
    assert client.wait(TIMEOUT_S) == SSH_FAILED, client.output


def test_a_node_that_vanishes_is_a_lost_connection(tmp_path: Path) -> None:
    with Cluster(num_nodes=2, rate_bits_per_s=1e9) as cluster, ssh_between(cluster.nodes, tmp_path):
        program = ("sh", "-c", "echo begun; sleep 1000")
        client = cluster.nodes[0].exec(_impatient(ssh_argv("node1", program, cwd=tmp_path, environ={})))
        client.expect("begun", TIMEOUT_S)
        cluster.nodes[1].power_off()
        sentence = explain_ssh_failure(client.wait(TIMEOUT_S), client.stderr, "node1")
        assert sentence is not None
        assert "The connection to node1 was lost" in sentence


def _impatient(argv: Sequence[str]) -> list[str]:
    """The command with one second for each of its timeouts."""
    patience = {f"ConnectTimeout={CONNECT_TIMEOUT_S}", f"ServerAliveInterval={ALIVE_INTERVAL_S}"}
    assert patience <= set(argv)
    return [word.partition("=")[0] + "=1" if word in patience else word for word in argv]


def _write_broken_settings(folder: Path) -> None:
    """Known hosts that know nobody, or the wrong key; a client of whom no node has heard."""
    (folder / "nobody_known").write_text("")
    own = (folder / "known_hosts").read_text().splitlines()
    keys = [line.partition(" ")[2] for line in own]
    (folder / "wrongly_known").write_text(f"node0 {keys[1]}\nnode1 {keys[0]}\n")
    settings = (folder / "client_config").read_text()
    (folder / "stranger_config").write_text(settings.replace(f"{folder}/client\n", f"{folder}/stranger\n"))
    if not (folder / "stranger").exists():
        keygen = shutil.which("ssh-keygen") or "ssh-keygen"
        subprocess.run(
            [keygen, "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "stranger")], check=True, timeout=10
        )
