"""Ray's command line, its list of nodes as ours, and the actor's half of the relay, which needs no Ray."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import LaunchError
from paceline.launch import ray
from paceline.launch.node_list import NodeSlots

TIMEOUT_S = 60


def _node(node_id: str, hostname: str, address: str, num_gpus: float = 0.0, alive: bool = True) -> dict[str, Any]:
    resources = {"CPU": 4.0} | ({"GPU": num_gpus} if num_gpus else {})
    names = {"NodeID": node_id, "NodeManagerHostname": hostname, "NodeManagerAddress": address}
    return {**names, "Alive": alive, "Resources": resources}


NODES = [
    _node("aa", "gpu1", "10.0.0.1", 8.0),
    _node("bb", "gpu2", "10.0.0.2", 8.0),
    _node("cc", "gpu3", "10.0.0.3", 8.0, alive=False),
]
TWINS = [_node("aa", "box", "10.0.0.1"), _node("bb", "box", "10.0.0.2")]


def test_the_command_line() -> None:
    argv = ray.ray_argv("gpu1", ["python", "-m", "x", "--flag"], cwd=Path("/data"), environ={"A": "1"}, num_gpus=2)
    assert argv[:3] == (sys.executable, "-m", "paceline.launch.ray")
    assert " ".join(argv[3:]) == "--cwd /data --num-gpus 2 -- gpu1 env A=1 python -m x --flag"
    with pytest.raises(LaunchError, match="not the name of a Ray node"):
        ray.ray_argv("--list", ["true"], cwd=Path("/"), environ={})
    with pytest.raises(LaunchError, match="looks like a secret"):
        ray.ray_argv("gpu1", ["true"], cwd=Path("/"), environ={"HF_TOKEN": "x"})


def test_nodes_have_names_where_names_tell_them_apart() -> None:
    assert ray.name_nodes(NODES, own_id="bb") == (NodeSlots("gpu2", 8), NodeSlots("gpu1", 8))
    assert ray.name_nodes(NODES[::-1]) == (NodeSlots("gpu1", 8), NodeSlots("gpu2", 8))
    assert ray.name_nodes(TWINS[::-1]) == (NodeSlots("aa", None), NodeSlots("bb", None))


@pytest.mark.parametrize("name", ["bb", "gpu2", "10.0.0.2"])
def test_a_node_by_any_of_its_names(name: str) -> None:
    assert ray.find_node(NODES, name) == "bb"


def test_a_node_that_is_none_or_several() -> None:
    with pytest.raises(LaunchError, match="No node of the Ray cluster answers to gpu3; there are gpu1, gpu2"):
        ray.find_node(NODES, "gpu3")
    with pytest.raises(LaunchError, match="2 nodes of the Ray cluster answer to box; there are aa, bb"):
        ray.find_node(TWINS, "box")


def test_the_actor_carries_streams_and_exit_code(tmp_path: Path) -> None:
    script = "read line; echo out $line; echo err >&2; exit 3"
    relay = ray.Relay(["sh", "-c", script], str(tmp_path))
    relay.write(b"a word\n")
    relay.write(b"")
    assert _all_of(relay) == ({1: b"out a word\n", 2: b"err\n"}, 3)
    relay.write(b"too late")


def test_a_signal_is_an_exit_code_too(tmp_path: Path) -> None:
    assert _all_of(ray.Relay(["sh", "-c", "kill -9 $$"], str(tmp_path))) == ({1: b"", 2: b""}, -9)


def _all_of(relay: ray.Relay) -> tuple[dict[int, bytes], int]:
    written = {1: b"", 2: b""}
    while not isinstance(news := relay.read(), int):
        written[news[0]] += news[1]
    return written, news


def test_without_ray_it_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ray.py").write_text("raise ImportError('not here')\n")
    argv = ray.ray_argv("gpu1", ["true"], cwd=tmp_path, environ={})
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    done = subprocess.run(argv, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 2
    assert done.stderr == "paceline: Ray is not installed; install paceline[ray].\n"
    assert done.stdout == ""
