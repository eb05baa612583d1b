"""What `paceline bench comm` makes of its options, before anything runs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.cli.bench import parse_names
from paceline.cli.options import parse_size
from paceline.errors import JobError
from paceline.report.formats import size_text
from paceline.spec import Cluster, Device, Node
from paceline.spec.cluster import DeviceKind
from paceline.workflows.bench import bench_plan


def machine(kind: DeviceKind, num_devices: int) -> Cluster:
    return Cluster(
        (Node("here", 4, 2**34, "a processor", tuple(Device(kind, i, "", 2**32) for i in range(num_devices))),)
    )


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("4096", 4096), ("4K", 4096), ("4k", 4096), ("4KiB", 4096), ("4KB", 4000), ("100MB", 10**8), ("1 GiB", 2**30)],
)
def test_sizes_are_read_as_people_write_them(text: str, num_bytes: int) -> None:
    assert parse_size(text, "--min-bytes") == num_bytes


@given(st.sampled_from([1024**power * factor for power in range(4) for factor in (1, 4, 999)] + [10**6, 10**8, 10**9]))
def test_a_size_that_is_shown_can_be_typed(num_bytes: int) -> None:
    assert parse_size(size_text(num_bytes), "--max-bytes") == num_bytes


@pytest.mark.parametrize("text", ["", "K", "-4K", "4.5K", "4X", "4 K B"])
def test_a_size_that_is_none_names_its_option(text: str) -> None:
    with pytest.raises(JobError, match=r"--max-bytes .* should be a number of bytes such as"):
        parse_size(text, "--max-bytes")


def test_names_are_known_ones_and_stand_once() -> None:
    assert parse_names("b, a,b", "--wires", ["a", "b", "c"]) == ["b", "a"]
    assert parse_names("all", "--wires", ["a", "b"]) == ["a", "b"]
    with pytest.raises(
        JobError, match=r"--algorithms 'rign' is not possible \(did you mean 'ring'\?\); there are ring"
    ):
        parse_names("rign", "--algorithms", ["ring", "tree_exact"])


def test_one_worker_a_device_and_two_where_there_is_no_gpu() -> None:
    assert bench_plan(machine("cpu", 4), None).world_size == 4
    assert bench_plan(machine("cpu", 1), None).world_size == 2
    assert bench_plan(machine("cuda", 1), None).world_size == 1
    assert bench_plan(machine("cpu", 4), 3).threads_per_worker == 1
    with pytest.raises(JobError, match="2 workers need as many GPUs, but this machine has 1"):
        bench_plan(machine("cuda", 1), 2)
