"""`paceline topo`, from the command line to its last line."""

from __future__ import annotations

import dataclasses
import io
import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import ClusterError
from paceline.spec import Cluster, Device, Link, Node
from paceline.workflows import topo
from tests.data import topologies
from tests.old.unit.cli.conftest import Run

DGX1 = str(topologies.path_of("dgx1"))


@pytest.fixture
def run(run: Run) -> Run:
    """`paceline topo` in this process."""
    return partial(run, "topo")


def here(monkeypatch: pytest.MonkeyPatch, node: Node) -> None:
    monkeypatch.setattr(topo, "detect", lambda: Cluster((node,)))


def two_gpus(*, busy: str = "") -> Node:
    devices = (Device("cuda", 0, "a GPU", 2**34, busy=busy), Device("cuda", 1, "a GPU", 2**34))
    return Node("gpu-7", 8, 2**36, "", devices, (), (Link(("GPU0", "GPU1"), "PXB", 12e9),))


def laptop() -> Node:
    return Node("laptop", 2, 2**34, "a processor", tuple(Device("cpu", i, "a processor", 2**33) for i in range(2)))


def test_the_matrix_is_shown_as_it_was_read(run: Run) -> None:
    code, out, err = run("--from", DGX1)
    assert (code, err) == (0, "")
    assert "GPU0 X NV1 NV1 NV2 NV2 SYS SYS SYS" in [" ".join(line.split()) for line in out.splitlines()]
    assert "CUDA_VISIBLE_DEVICES" not in out


def test_a_pair_is_answered_in_one_sentence(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    here(monkeypatch, two_gpus())
    sentence = "talk through several PCIe bridges without crossing a host bridge (PXB), about 12 GB/s.\n"
    assert run("--pair", "0,1") == (0, f"GPU 0 and GPU 1 {sentence}", "")
    assert run("--pair", " gpu1, GPU0") == (0, f"GPU 1 and GPU 0 {sentence}", "")


def test_a_card_is_named_by_label_or_by_name(run: Run) -> None:
    h100 = str(topologies.path_of("h100_hgx"))
    by_label, by_name = run("--from", h100, "--pair", "0,NIC5"), run("--from", h100, "--pair", "0,mlx5_5")
    assert (
        by_label
        == by_name
        == (0, "GPU 0 and NIC 5 talk across the link between the sockets (SYS), about 22 GB/s.\n", "")
    )


@pytest.mark.parametrize(
    ("pair", "sentence"),
    [
        ("0", "should be two different GPUs"),
        ("1,1", "should be two different GPUs"),
        ("1,gpu1", "should be two different GPUs"),
        ("0,1,2", "should be two different GPUs"),
        ("", "should be two different GPUs"),
        ("0,8", "this node has no 8; its parts are GPU0, GPU1, GPU2, GPU3, GPU4, GPU5, GPU6, GPU7."),
        ("a,b", "this node has no a;"),
    ],
)
def test_a_pair_that_is_none_is_one_sentence(run: Run, pair: str, sentence: str) -> None:
    code, out, err = run("--from", DGX1, "--pair", pair)
    assert (code, out) == (2, "")
    assert sentence in err
    assert len(err.splitlines()) == 1


def test_a_choice_ends_with_the_line_to_copy(run: Run) -> None:
    code, out, _ = run("--from", DGX1, "--pick", "8")
    assert code == 0
    *_, naive, line = out.splitlines()
    assert line == "CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=0,3,2,1,5,6,7,4"
    assert "in 292 ms instead of 35.0 ms, 8.33x the time: its slowest link is SYS, 6 GB/s" in naive


def test_json_is_one_line_with_the_promised_keys(run: Run) -> None:
    code, out, _ = run("--from", DGX1, "--pick", "2", "--json")
    assert (code, len(out.splitlines())) == (0, 1)
    found: dict[str, Any] = json.loads(out)
    assert found["devices"] == found["ring"] == [0, 3]
    assert found["bottleneck"] == {"label": "NV2", "bytes_per_s": 50e9}
    assert found["pairs"] == {"0-3": "NV2"}


def test_json_without_a_choice_has_all_devices_and_their_best_ring(run: Run) -> None:
    found = json.loads(run("--from", DGX1, "--json")[1])
    assert found["devices"] == list(range(8))
    assert found["ring"] == [0, 3, 2, 1, 5, 6, 7, 4]
    assert len(found["pairs"]) == 28


def test_busy_gpus_are_left_out_and_it_says_so(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    here(monkeypatch, two_gpus(busy="62 % busy, 31 GiB in use"))
    code, out, _ = run("--pick", "1")
    assert (code, out.splitlines()[-1]) == (0, "CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=1")
    assert "GPU0 is left out of every choice: 62 % busy, 31 GiB in use; --all takes it all the same." in out
    code, _, err = run("--pick", "2")
    assert (code, err) == (
        2,
        "paceline: --pick 2 is not possible: gpu-7 has 1 free GPU (1) and 1 busy, which --all takes too.\n",
    )
    code, out, _ = run("--pick", "2", "--all")
    assert (code, out.splitlines()[-1]) == (0, "CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=0,1")
    assert json.loads(run("--json")[1])["devices"] == [1]


def test_from_python_the_same_sentences_name_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    here(monkeypatch, two_gpus(busy="62 % busy"))
    assert topo.topo().node.notes == (
        "GPU0 is left out of every choice: 62 % busy; keep_busy = True takes it all the same.",
    )
    with pytest.raises(ClusterError, match=r"^pick = 2 is not possible: .*, which keep_busy = True takes too\.$"):
        topo.topo(pick=2)
    first = topo.choose_node(Cluster((two_gpus(), dataclasses.replace(two_gpus(), hostname="gpu-8"))), None)
    assert first.notes[-1] == "This is the first node; node = NAME shows another: gpu-8."


def test_a_node_without_gpus_is_no_error(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    here(monkeypatch, laptop())
    code, out, err = run()
    assert (code, err) == (0, "")
    assert "2 cores" in out and "No GPU was found" in out
    assert json.loads(run("--json")[1])["devices"] == []


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--pick", "2"), "--pick 2 is not possible: laptop has no GPU, only 2 CPU cores."),
        (("--pair", "0,1"), "--pair '0,1': laptop has no 0; it has no GPU."),
    ],
)
def test_a_choice_without_gpus_names_what_is_there(
    run: Run, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, str], sentence: str
) -> None:
    here(monkeypatch, laptop())
    assert run(*arguments) == (2, "", f"paceline: {sentence}\n")


@pytest.mark.parametrize("count", ["0", "-1", "9"])
def test_as_many_as_there_are_not_is_one_sentence(run: Run, count: str) -> None:
    code, out, err = run("--from", DGX1, "--pick", count)
    assert (code, out) == (2, "")
    assert err == f"paceline: --pick {count} is not possible: this node has 8 GPUs (0, 1, 2, 3, 4, 5, 6, 7).\n"


def test_standard_input_is_read_whatever_it_holds(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def reads(text: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))

    reads(topologies.path_of("dgx1").read_bytes())
    assert run("--from", "-", "--pair", "0,3")[1].startswith("GPU 0 and GPU 3 talk over 2 NVLinks (NV2)")
    for text in (b"", b"/etc/hostname", b"\xff\xfe\x00\n"):
        reads(text)
        code, out, err = run("--from", "-")
        assert (code, out, len(err.splitlines())) == (2, "", 1)


def test_a_drawing_is_written_and_named(run: Run, tmp_path: Path) -> None:
    drawing = tmp_path / "node.svg"
    code, out, _ = run("--from", DGX1, "--svg", str(drawing))
    assert (code, out.splitlines()[-1]) == (0, str(drawing))
    assert drawing.read_text(encoding="utf-8").startswith("<svg ")
    code, out, _ = run("--from", DGX1, "--pick", "2", "--svg", str(drawing))
    assert (code, out.splitlines()[-1]) == (0, "CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=0,3")
    code, _, err = run("--from", DGX1, "--svg", str(tmp_path / "nowhere" / "node.svg"))
    assert (code, len(err.splitlines())) == (2, 1)


def test_a_node_of_several_is_chosen_by_name(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "cluster.json"
    Cluster((two_gpus(), dataclasses.replace(two_gpus(), hostname="gpu-8"))).save(file)
    first, second = (json.loads(run("--from", str(file), "--json", *more)[1]) for more in ((), ("--node", "gpu-8")))
    assert (first["hostname"], second["hostname"]) == ("gpu-7", "gpu-8")
    assert first["notes"] == ["This is the first node; --node NAME shows another: gpu-8."]
    code, _, err = run("--from", str(file), "--node", "gpu-9")
    assert (code, err) == (2, "paceline: --node 'gpu-9' is not in this cluster; its nodes are gpu-7, gpu-8.\n")


def test_a_cluster_of_no_nodes_is_a_mistake() -> None:
    with pytest.raises(ClusterError, match="has no nodes"):
        topo.choose_node(Cluster(()), None)


def test_it_runs_without_torch() -> None:
    code = (
        "import sys; sys.argv = ['paceline', 'topo', '--from', sys.argv[1], '--pick', '2', '--json']\n"
        "from paceline.cli import main\n"
        "try: main()\n"
        "except SystemExit as ended: sys.exit(ended.code or ('torch' in sys.modules and 'torch was loaded') or 0)"
    )
    result = subprocess.run([sys.executable, "-c", code, DGX1], capture_output=True, text=True, timeout=30, check=False)
    assert (result.returncode, result.stderr) == (0, "")
