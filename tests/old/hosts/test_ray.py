"""A program on another node through a real Ray cluster: its bytes, its exit code, its end."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.launch.ray import ray_argv
from tests.kit.nodes.cluster import Cluster
from tests.kit.nodes.ray_cluster import RAY_VARIABLES, ray_on, why_not_ray
from tests.old.hosts.stdio import VARIABLE, commands_on, echo_program, orphan, talk, wait_until

pytestmark = [
    pytest.mark.hosts,
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(bool(why_not_ray()), reason=why_not_ray() or ""),
]

TIMEOUT_S = 240.0
WITH_RAY = ("env", *(f"{name}={value}" for name, value in RAY_VARIABLES.items()))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(num_nodes=2, rate_bits_per_s=1e9) as cluster, ray_on(cluster.nodes):
        yield cluster


def test_bytes_pass_both_ways_and_the_end_of_input_ends_the_program(cluster: Cluster, tmp_path: Path) -> None:
    value = 'it\'s $HOME, "quoted"\nA=B'
    argv = ray_argv("node1", echo_program(), cwd=tmp_path, environ={VARIABLE: value})
    place = talk(cluster.nodes[0], (*WITH_RAY, *argv), timeout_s=TIMEOUT_S)
    assert (place.hostname, place.cwd, place.variable) == ("node1", str(tmp_path), value)


def test_nothing_is_left_of_a_client_that_was_killed(cluster: Cluster, tmp_path: Path) -> None:
    mark = tmp_path.name
    argv = ray_argv("10.77.0.2", echo_program(mark), cwd=tmp_path, environ={})
    place = orphan(cluster.nodes[0], (*WITH_RAY, *argv), timeout_s=TIMEOUT_S)
    assert place.hostname == "node1"
    wait_until(
        lambda: not any(mark in command for command in commands_on(cluster.nodes[1])),
        timeout_s=TIMEOUT_S,
        what="the program has ended",
    )


def test_exit_codes_and_errors_pass(cluster: Cluster, tmp_path: Path) -> None:
    argv = ray_argv("node1", ["sh", "-c", "echo out; echo err >&2; exit 7"], cwd=tmp_path, environ={})
    client = cluster.nodes[0].exec(argv, env=RAY_VARIABLES)
    assert client.wait(TIMEOUT_S) == 7
    assert client.stdout == "out\n"
    assert "err" in client.stderr.splitlines()


@pytest.mark.parametrize(
    ("node", "program", "words"),
    [
        ("node7", "true", "No node of the Ray cluster answers to node7; there are node0, node1."),
        ("node1", "/no/such/program", "Ray cannot start /no/such/program on node1: "),
    ],
)
def test_what_goes_wrong_is_one_sentence(cluster: Cluster, node: str, program: str, words: str, tmp_path: Path) -> None:
    client = cluster.nodes[0].exec(ray_argv(node, [program], cwd=tmp_path, environ={}), env=RAY_VARIABLES)
    assert client.wait(TIMEOUT_S) == 2
    assert words in client.stderr
    assert "Traceback" not in client.stderr


def test_its_nodes(cluster: Cluster) -> None:
    program = (
        "from paceline.launch.ray import ray_nodes; print([(node.address, node.num_workers) for node in ray_nodes()])"
    )
    client = cluster.nodes[1].exec([sys.executable, "-c", program], env=RAY_VARIABLES)
    assert client.wait(TIMEOUT_S) == 0, client.output
    assert client.stdout.strip() == "[('node1', None), ('node0', None)]"


def test_without_a_cluster_it_is_one_sentence(cluster: Cluster) -> None:
    argv = ray_argv("node1", ["true"], cwd=Path("/"), environ={})
    client = cluster.nodes[0].exec(argv, env={**RAY_VARIABLES, "RAY_ADDRESS": "node0:1"})
    assert client.wait(TIMEOUT_S) == 2
    assert "paceline: No Ray cluster answers: " in client.stderr
    assert "Traceback" not in client.stderr
