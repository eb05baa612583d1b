"""What `paceline probe` makes of what was measured, before and after."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from paceline.measure.values import JobProbe, JobRequest
from paceline.spec import Cluster, Device, ForecastCheck, Job, JobTiming, Link, NetworkLink, Node, NodePlacement, Plan
from paceline.workflows.allocation import Allocation
from paceline.workflows.probe import measure_job, merge
from paceline.workflows.where import HERE, Where


def node(hostname: str, *labels: str, num_gpus: int = 4) -> Node:
    """GPUs in a row, the first pair linked by the first label and so on, and a network card at the first one."""
    devices = tuple(Device("cuda", i, "H100", 2**36) for i in range(num_gpus))
    links = tuple(Link((f"GPU{i}", f"GPU{i + 1}"), label, 1e9) for i, label in enumerate(labels))
    return Node(hostname, 8, 2**36, "cpu", devices, links=(*links, Link(("GPU0", "NIC0"), "PIX", 1e9)))


def timing(job: str, **values: object) -> JobTiming:
    return replace(JobTiming(job, "H100", 10, 4), **values)  # type: ignore[arg-type]


def test_a_measurement_replaces_what_it_is_of_and_nothing_else() -> None:
    known = Cluster(
        (node("a", "SYS"), node("b", "SYS")),
        (NetworkLink(("a", "b"), 1e9, 1e-5), NetworkLink(("b", "z"), 1e9, 1e-5)),
        (timing("one"), timing("two"), timing("one", threads_per_worker=1)),
    )
    new, again, link = node("b", "NV4"), timing("one", num_parameters=11), NetworkLink(("b", "a"), 2e9, 1e-6)
    merged = merge(known, Cluster((new,), (link,), (again,)))
    assert merged.nodes == (known.nodes[0], new)
    assert merged.network == (link, known.network[1])  # the same two nodes, named the other way round
    assert set(merged.timings) == {timing("two"), timing("one", threads_per_worker=1), again}
    assert merge(known, Cluster((new,))).timings == known.timings
    assert merge(known, Cluster((new,))).network == known.network
    assert merge(None, Cluster((new,))) == Cluster((new,))
    tested = known.checked(ForecastCheck("one", 2, 1.0, 1.1))
    assert merge(tested, Cluster((new,), timings=(again,))).checks == tested.checks
    assert merge(known, Cluster((node("c"),))).nodes == (*known.nodes, node("c"))


@dataclass
class _FakeAllocation:
    """In place of nodes: keeps the plan and the request, and answers with a timing."""

    cluster: Cluster
    where: Where = HERE
    plan: Plan | None = None
    request: dict[str, Any] = field(default_factory=dict)

    def measure(self, _program: str, request: JobRequest, plan: Plan, folder: Path, **_options: object) -> None:
        self.plan = plan
        self.request = request.to_mapping()
        JobProbe(timing("job"), ("nothing",)).save(folder / "probe.json")


def _measured(job: Job, plan: Plan, folder: Path, where: Where = HERE) -> _FakeAllocation:
    allocation = _FakeAllocation(Cluster((node("a", "NV4"),)), where)
    assert measure_job(job, plan, cast(Allocation, allocation), folder, 30.0, quiet=True) == (
        timing("job"),
        ["nothing"],
    )
    return allocation


JOB = Job(global_batch_size=100, virtual_shards=6)
BOTH = Plan(5, "cuda", (NodePlacement("a", 4, (0, 1, 2, 3)), NodePlacement("b", 1, (0,))))


def test_a_job_is_timed_on_all_workers_with_the_passes_that_they_will_make(tmp_path: Path) -> None:
    allocation = _measured(JOB, BOTH, tmp_path)
    assert allocation.plan == BOTH
    # Six shards of 17 and less: alone a worker computes all at once, among five the busiest has two of them.
    sizes = {name: allocation.request[name] for name in ("largest_micro_batch_size", "micro_batch_size", "shard_size")}
    assert sizes == {"largest_micro_batch_size": 100, "micro_batch_size": 34, "shard_size": 17}
    assert allocation.request["workers_on_node"] == 4

    bitwise = _measured(JOB.with_values(parity="bitwise"), BOTH, tmp_path)
    assert bitwise.request["largest_micro_batch_size"] == bitwise.request["micro_batch_size"] == 17


def test_workers_on_nodes_of_their_own_are_timed_together_too(tmp_path: Path) -> None:
    apart = Plan(2, "cuda", (NodePlacement("a", 1, (2,), ((7,),)), NodePlacement("b", 1, (0,), ((3,),))))
    assert _measured(JOB, apart, tmp_path).plan == apart  # sums of gradients go between them


def test_a_worker_started_to_be_debugged_is_timed_alone(tmp_path: Path) -> None:
    pair = Plan(2, "cuda", (NodePlacement("a", 2, (2, 3), ((7,), (8,))),))
    allocation = _measured(JOB, pair, tmp_path, Where(launcher="debug"))
    assert allocation.plan == Plan(1, "cuda", (NodePlacement("a", 1, (2,), ((7,),)),))
    assert allocation.request["micro_batch_size"] == 51  # the share of one of two all the same
