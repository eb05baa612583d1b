"""`aggregation.method = "parameter_server_async"`: what a worker holds of the model while servers update it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.comm.links import node_of_every_rank, open_node_group
from paceline.comm.parameter_server_async import Course, ParameterServerAsync, Terms
from paceline.errors import JobError
from paceline.parallel.clock import Clock
from paceline.parallel.engine import Engine, StepInput, broadcast
from paceline.parallel.passes import ShardByShard
from paceline.spec import AggregationSpec, Job, Plan


class AsyncServers(Engine):
    """Computes shards as they come. An engine for all but the step itself, which no worker makes on its own."""

    def __init__(self, model: nn.Module, device: torch.device, group: dist.ProcessGroup | None) -> None:
        self.shards = ShardByShard(model, device)
        self.module = self.shards.module
        self._group = group
        self._collect: Callable[[], object] | None = None
        now = Clock(device).mark()
        self.communication = now, now
        broadcast([*self.module.parameters(), *self.module.buffers()], group)

    def gradients(self, step: StepInput) -> Tensor:  # noqa: ARG002 - it is an engine
        raise JobError(
            "aggregation.method = 'parameter_server_async' has no step that all workers make together, so run.step "
            "cannot do it; train the job with `paceline train`, or use another method."
        )

    changes_buffers = True

    @property
    def weights_diverge(self) -> bool:
        """Optimizers live on the servers, and gradients are under way, but for the moments of rest."""
        return self._collect is None

    @contextmanager
    def at_rest(self, collect: Callable[[], object]) -> Iterator[None]:
        """Inside, no gradient is under way; `collect`, a common act, brings the optimizer's state to every worker."""
        self._collect = collect
        try:
            yield
        finally:
            self._collect = None

    def sync_buffers(self) -> bool:
        if self._collect is None:
            return False
        self._collect()
        broadcast(self.module.buffers(), self._group)
        return True

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """At the end of `ParameterServerAsync.work` all workers have the servers' parameters."""
        broadcast(self.module.buffers(), self._group)
        yield


def open_servers(
    job: Job, plan: Plan, rank: int, group: dist.ProcessGroup, optimizer: Optimizer, course: Course
) -> ParameterServerAsync:
    """The servers of a run, spread over its first workers; a common act of all of them."""
    spec = job.aggregation
    nodes: tuple[tuple[int, ...], ...] = tuple((one,) for one in range(plan.world_size))
    node_group = None
    if spec.sync_inside_nodes:
        nodes = node_of_every_rank(group)
        node_group = open_node_group(nodes, group, plan.timeout_s)
    terms = Terms(
        staleness=spec.staleness, num_servers=plan.num_servers, lease_s=plan.timeout_s, timeout_s=plan.timeout_s
    )
    store = dist.distributed_c10d._get_default_store()
    return ParameterServerAsync(optimizer, course, terms, store=store, rank=rank, nodes=nodes, node_group=node_group)


def describe_asynchrony(spec: AggregationSpec, plan: Plan) -> str:
    """What a reader of the result must know."""
    servers = f"{plan.num_servers} parameter server{'s' if plan.num_servers > 1 else ''}"
    if spec.staleness == 0:
        return f"{servers}, staleness 0: workers take shards as they come, the result is that of synchronous training"
    return (
        f"{servers}: a gradient may come from parameters that are up to {spec.staleness} updates late, as chance has "
        "it, so the result is not repeatable and may depend on the number of workers"
    )
