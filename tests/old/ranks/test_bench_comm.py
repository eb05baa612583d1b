"""`paceline bench comm`: what its workers measure, what they refuse to call measured, and the command itself."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from paceline import env
from paceline.comm import ALGORITHMS, Algorithm, Links
from paceline.comm.shared_memory import SharedMemory
from paceline.errors import PacelineError
from paceline.measure import collective_bench
from paceline.measure.collective_bench import _num_rounds, fit, in_turn, time_cases
from paceline.report.comm_page import load_timings
from paceline.spec import Plan
from paceline.spec.algorithm import algorithm_names
from paceline.spec.comm_timing import CommCase, CommRequest, CommTiming, UntimedCases
from paceline.train.process.process_group import join, leave
from tests.kit.nodes.cluster import why_not
from tests.kit.workers import run_ranks
from tests.old.ranks.command_line import TRACEBACK, clean_environ, paceline, succeeded

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
Nodes = tuple[tuple[int, ...], ...]
Result = tuple[list[CommTiming], list[UntimedCases]]

EVERYTHING = CommRequest(
    cases=(
        *(CommCase(name, wire) for name in algorithm_names() for wire in ("float32", "bfloat16", "float16")),
        CommCase("ring", order="alternating"),
    ),
    sizes_bytes=(8000, 30_008),
    num_servers=2,
    num_rounds=1,
    budget_s=600,
    timeout_s=30,
)


def _links(nodes: Nodes) -> Links:
    facts = env.worker_facts()
    join(facts, Plan(world_size=facts.world_size, timeout_s=30))
    group = dist.group.WORLD
    assert group is not None
    return Links(group, nodes, torch.device("cpu"), 30, SharedMemory.open(group, nodes, 30))


def _timed(requests: list[CommRequest], nodes: Nodes) -> list[Result]:
    links = _links(nodes)
    results = [time_cases(request, links) for request in requests]
    leave()
    return results


@pytest.mark.parametrize("nodes", [((0, 1),), ((0, 1), (2,))], ids=str)
def test_every_case_is_timed_and_right_in_every_dtype(nodes: Nodes) -> None:
    as_they_are = tuple(case for case in EVERYTHING.cases if case.wire in ("float32", "bfloat16"))
    others = [replace(EVERYTHING, cases=as_they_are, dtype=dtype) for dtype in ("bfloat16", "float16", "float64")]
    requests = [EVERYTHING, *others]
    by_rank = run_ranks(_timed, sum(map(len, nodes)), requests, nodes, timeout_s=100)
    for request, (timings, left_out) in zip(requests, by_rank[0], strict=True):
        exact = {"tree_exact"} | ({"hierarchical", "parameter_server_two_level"} if len(nodes) == 1 else set())
        pointless = {case for case in request.cases if case.algorithm in exact and case.wire != "float32"}
        assert {left.case for left in left_out} == pointless
        expected = [(case, size) for size in request.sizes_bytes for case in request.cases if case not in pointless]
        assert [(timing.case, timing.size_bytes) for timing in timings] == expected
        assert all(0 < timing.min_s == timing.median_s and len(timing.times_s) == 1 for timing in timings)
        assert {found.case for found in fit(timings)} == set(request.cases) - pointless
    assert all(results == by_rank[0] for results in by_rank[1:])  # one result for all, so one set of decisions


def _errors(faulty: dict[str, Algorithm], request: CommRequest) -> str:
    links = _links(((0, 1),))
    try:
        time_cases(request, links, {**ALGORITHMS, **faulty})
    except PacelineError as error:
        return str(error)
    finally:
        leave()
    return ""


def _forgets_the_end(values: torch.Tensor, links: Links) -> None:
    end = values[-1].clone()
    ALGORITHMS["ring"](values, links)
    if links.rank == 1 and len(values) > 1000:
        values[-1] = end + 7


def _makes_nothing_of_it(values: torch.Tensor, links: Links) -> None:
    values.fill_(torch.nan if links.rank == 0 else 0)


@pytest.mark.parametrize("wire", ["float32", "bfloat16"])
def test_a_wrong_sum_on_one_worker_is_an_error_on_all(wire: Any) -> None:
    request = CommRequest(cases=(CommCase("all_reduce"), CommCase("ring", wire)), sizes_bytes=(400, 8000))
    errors = run_ranks(_errors, 2, {"ring": _forgets_the_end}, request, timeout_s=30)
    assert errors[0] == errors[1]
    assert str(request.cases[1]) in errors[0]
    assert "8,000 bytes over 2 workers wrongly" in errors[0]


def test_an_undefined_sum_is_wrong() -> None:
    request = CommRequest(cases=(CommCase("ring"),), sizes_bytes=(400,))
    for error in run_ranks(_errors, 2, {"ring": _makes_nothing_of_it}, request, timeout_s=30):
        assert "ring summed 400 bytes over 2 workers wrongly" in error


def test_beyond_the_budget_is_left_out_and_said() -> None:
    sizes = (4096, 1 << 20, 1 << 40)
    cases = (CommCase("all_reduce"), CommCase("ring"))
    request = CommRequest(cases=cases, sizes_bytes=sizes, budget_s=1e-6)
    [(timings, left_out)], _ = run_ranks(_timed, 2, [request], ((0, 1),), timeout_s=30)
    assert [(timing.case, timing.size_bytes) for timing in timings] == [(case, 4096) for case in cases]
    assert {(left.case, left.sizes_bytes) for left in left_out} == {(case, sizes[1:]) for case in cases}
    assert all("the budget is 1e-06 s for all" in left.reason for left in left_out)


def _timed_in_a_megabyte(request: CommRequest) -> Result:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collective_bench, "free_bytes", lambda _device: 1e6)
        return _timed([request], ((0, 1),))[0]


def test_what_memory_does_not_hold_is_left_out_and_said() -> None:
    cases = (CommCase("all_reduce"), CommCase("ring"))
    request = CommRequest(cases=cases, sizes_bytes=(4096, 100_000, 1_000_000), num_rounds=1)
    timings, left_out = run_ranks(_timed_in_a_megabyte, 2, request, timeout_s=60)[0]
    assert [timing.size_bytes for timing in timings] == [4096, 4096, 100_000, 100_000]
    assert [(left.case, left.sizes_bytes) for left in left_out] == [(case, (1_000_000,)) for case in cases]
    assert all("more memory than is free" in left.reason for left in left_out)


@given(
    most=st.integers(1, 50),
    left_s=st.floats(-10, 1000),
    round_s=st.floats(1e-4, 100),
    growths=st.lists(st.floats(1.1, 64), max_size=2),
    num_to_come=st.integers(0, 10),
)
def test_rounds_leave_room_for_the_next_sizes(
    most: int, left_s: float, round_s: float, growths: list[float], num_to_come: int
) -> None:
    num_rounds = _num_rounds(most, left_s, round_s, growths, num_to_come)
    assert 1 <= num_rounds <= most
    if num_rounds > 1:
        assert round_s * (num_rounds + sum(growths)) <= left_s * (1 + 1e-9)
    if num_rounds < most and not growths and not num_to_come:
        assert (num_rounds + 1) * round_s > left_s * (1 - 1e-9)


def test_in_turn_neighbours_are_on_different_nodes() -> None:
    assert in_turn(((0, 1), (2, 3))) == ((0,), (2,), (1,), (3,))
    assert in_turn(((0, 1, 2), (3,))) == ((0,), (3,), (1,), (2,))


# --- the command ---


def test_the_command_measures_draws_and_ends_with_one_line_of_json(tmp_path: Path) -> None:
    options = ("--algorithms", "all_reduce,ring,hierarchical", "--wires", "float32,bfloat16", "--max-bytes", "64K")
    more = ("--budget", "5", "--link-rate", "1e9", "--out", "out")
    result = succeeded(paceline("bench", "comm", "-n", "2", *options, *more, "--json", cwd=tmp_path))
    (line,) = result.stdout.splitlines()
    summary = json.loads(line)
    assert {row["size_bytes"] for row in summary["rows"]} == {4096, 16384, 65536}
    for row in summary["rows"]:
        assert row["busbw_bytes_per_s"] == row["algbw_bytes_per_s"] == row["size_bytes"] / row["median_s"]
        assert row["minimum_s"] <= row["size_bytes"] / 1e9
    assert [left["algorithm"] for left in summary["left_out"]] == ["hierarchical"]  # nothing is bfloat16 inside a node
    assert all(math.isfinite(fit["alpha_s"]) and fit["beta_s_per_byte"] >= 0 for fit in summary["fits"])
    assert {"comm.html", "comm.md", "timings.json", "request.json"} <= {p.name for p in (tmp_path / "out").iterdir()}

    again = paceline("bench", "comm", "-n", "2", *options, *more, cwd=tmp_path)
    assert again.returncode == 2
    assert "already holds a benchmark" in again.stderr
    assert TRACEBACK not in again.stderr

    (tmp_path / "out" / "comm.html").unlink()
    drawn = succeeded(paceline("bench", "comm", "--draw", "out", cwd=tmp_path))
    assert drawn.stdout.splitlines()[-1] == "out/comm.html"
    assert max(map(len, drawn.stdout.splitlines())) <= 100
    assert (tmp_path / "out" / "comm.html").exists()


def test_one_worker_alone_has_nothing_to_send_and_is_timed_all_the_same(tmp_path: Path) -> None:
    options = ("--max-bytes", "16K", "--budget", "2", "--json", "--quiet", "--out", "out")
    summary = json.loads(succeeded(paceline("bench", "comm", "-n", "1", *options, cwd=tmp_path)).stdout)
    assert {row["busbw_bytes_per_s"] for row in summary["rows"]} == {0.0}
    assert {row["algorithm"] for row in summary["rows"]} == set(ALGORITHMS)


def test_the_program_runs_under_torchrun(tmp_path: Path) -> None:
    (tmp_path / "request.json").write_text('{"sizes_bytes": [4096], "num_rounds": 1, "timeout_s": 30}')
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    program = ["-m", "paceline.measure.collective_bench", "request.json", "out"]
    environ = clean_environ(TP_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    done = subprocess.run(
        [*torchrun, *program], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=90, check=False
    )
    assert done.returncode == 0, done.stderr
    timings = load_timings(tmp_path / "out")
    assert timings.nodes == ((0, 1),)
    assert timings.environment["started by"] == "torchrun"
    assert {timing.case.algorithm for timing in timings.timings} == set(ALGORITHMS)


@pytest.mark.hosts
def test_the_benchmark_of_nodes_counts_what_goes_over_a_link(tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    options = ["--size", "1MB", "--rounds", "1", "--budget", "30", "--out", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.hosts", *options],
        cwd=ROOT,
        env=clean_environ(),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[0])
    crossed = {
        (row["algorithm"], row["wire"], row["order"]): row["link_bytes"] / 1e6
        for row in summary["rows"]
        if row["size_bytes"] == 10**6
    }
    # Headers and acknowledgements add a twentieth; what the workers say to each other beside it, a little more.
    assert crossed["all_reduce", "float32", "by_node"] == pytest.approx(1.5, rel=0.12)
    assert crossed["hierarchical", "float32", "by_node"] == pytest.approx(1.0, rel=0.12)
    assert crossed["hierarchical", "bfloat16", "by_node"] == pytest.approx(0.5, rel=0.12)
    assert crossed["ring", "float32", "alternating"] == pytest.approx(3.0, rel=0.12)
    assert (tmp_path / "comm.html").exists()
    assert "| hierarchical in bfloat16 |" in done.stdout
