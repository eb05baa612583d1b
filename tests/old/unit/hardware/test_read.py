"""Any topology somebody wrote down, recognised by its content."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import ClusterError
from paceline.hardware import read_topology
from paceline.spec import Cluster
from tests.data.topologies import load, names, path_of, text_of


@pytest.mark.parametrize("name", names())
def test_every_recorded_machine_is_read_from_its_file_and_its_text(name: str, tmp_path: Path) -> None:
    cluster = load(name)
    assert cluster.device_kind == "cuda"
    assert len(cluster.devices) >= 2
    assert read_topology(text_of(name)) == read_topology(str(path_of(name))) == cluster
    copy = tmp_path / "cluster.json"
    cluster.save(copy)
    assert read_topology(copy) == read_topology(copy.read_text()) == cluster
    assert read_topology(json.dumps(json.loads(copy.read_text()))) == cluster


def test_the_list_of_recorded_machines_has_an_origin_for_each() -> None:
    origins = (path_of("dgx1").parent / "README.md").read_text()
    assert len(names()) >= 10
    assert all(f"| {path_of(name).name} |" in origins for name in names())


def test_a_byte_order_mark_is_no_content(tmp_path: Path) -> None:
    path = tmp_path / "topology"
    path.write_bytes(b"\xef\xbb\xbf" + path_of("dgx1").read_bytes())
    assert read_topology(path) == load("dgx1")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ["nvidia-smi topo -m"]),
        (b"\xff\xfe\x00", ["nvidia-smi topo -m"]),
        (b"hello\n", ["nvidia-smi topo -m"]),
        (b"{", ["JSON"]),
        (b'{"schema": 99, "nodes": []}', ["version 1"]),
        (b'{"schema": 1, "nodes": 3}', ["nodes"]),
        (b'{"schema": 1, "nodes": [], "wires": 1}', ["wires"]),
        (b'{"a":' * 100_000, ["JSON"]),
    ],
)
def test_content_that_cannot_be_meant_names_the_file(tmp_path: Path, content: bytes, words: list[str]) -> None:
    path = tmp_path / "topology.txt"
    path.write_bytes(content)
    with pytest.raises(ClusterError) as caught:
        read_topology(path)
    assert all(word in str(caught.value) for word in ["topology.txt", *words]), caught.value


@pytest.mark.parametrize("source", ["/nowhere/at/all", "", ".", "a\0b", "x" * 5000])
def test_no_such_file(source: str) -> None:
    with pytest.raises(ClusterError, match="cannot be read"):
        read_topology(source)


def test_a_measured_link_survives() -> None:
    node = load("workstation_nv4").nodes[0]
    measured = dataclasses.replace(node.links[0], bytes_per_s=52e9, latency_s=2e-6, source="measured")
    cluster = Cluster((dataclasses.replace(node, links=(measured,)),))
    assert read_topology(json.dumps({"schema": 1, **cluster.to_mapping()}, indent=1)) == cluster


@given(st.sampled_from(["", "{", "<", "<system>", "between two GPUs\n", "\tGPU0\tGPU1\n"]), st.text(max_size=100))
@settings(deadline=None)
def test_no_text_is_a_traceback(start: str, rest: str) -> None:
    with contextlib.suppress(ClusterError):
        read_topology(start + rest + "\n\n")


@given(st.data())
@settings(deadline=None)
def test_no_damaged_cluster_file_is_a_traceback(data: st.DataObject) -> None:
    text = json.dumps({"schema": 1, **load("workstation_nv4").to_mapping()}, indent=1)
    start = data.draw(st.integers(0, len(text)))
    end = start + data.draw(st.integers(0, 40))
    text = text[:start] + data.draw(st.sampled_from(["", "null", "1e999", "[]", '"x"', "{}", "NaN"])) + text[end:]
    with contextlib.suppress(ClusterError):
        read_topology(text)
