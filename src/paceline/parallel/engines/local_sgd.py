"""`aggregation.method = "local_sgd"` and `"diloco"`: groups train separately and synchronise every few steps.

A group is a worker, or several that sum their gradients in every step (`worker_groups.py`). Between two outer steps it
updates its own weights by the gradient of its own samples. With a the weights after the last outer step, x_g those of
group g now and n_g the samples it has computed in between, an outer step finds

    d = sum over g of n_g / n (x_g - a),    n = sum over g of n_g

the difference between a and the weighted mean of all x_g, and every group continues from

    a + d                                       local_sgd
    a + outer_lr (d + outer_momentum v)         diloco, after v <- outer_momentum v + d

so that local_sgd is diloco with outer_lr = 1 and outer_momentum = 0, and with an outer step after every step of plain
SGD it is synchronous training: d is then -lr times the mean gradient over all samples. The second line is a step of SGD
with Nesterov momentum along the pseudo-gradient -d. The optimizer that makes the steps in between keeps its state.

With `overlap_steps` groups train on while d is summed, and then continue from the new common weights plus what they
have moved since the sum began. That move is part of their next x_g - a, so every step counts in one outer step.

Where a loss is a `Mean`, n_g counts the units that it is the mean of, such as valid tokens, in place of samples.

Stich, "Local SGD Converges Fast and Communicates Little", 2018, arXiv 1805.09767; Lin, Stich, Patel, Jaggi, "Don't
Use Large Mini-Batches, Use Local SGD", 2018, arXiv 1808.07217; Douillard et al., "DiLoCo: Distributed
Low-Communication Training of Language Models", 2023, arXiv 2311.08105; Douillard et al., "Streaming DiLoCo with
overlapping communication", 2025, arXiv 2501.18512, which mixes both weights where this adds the move.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm import ALGORITHMS, Aggregator, Bucket, Scheduler, open_links
from paceline.errors import JobError
from paceline.object_collectives import all_gather_objects
from paceline.parallel.clock import mark
from paceline.parallel.engine import AS_RANK, Engine, StepInput, Update, broadcast
from paceline.parallel.engines.bitwise import BitwiseDataParallel
from paceline.parallel.engines.dp import DataParallel
from paceline.parallel.engines.outer_weights import Move, OuterStep, WeightBucket, by_name, fill, wide_dtype
from paceline.parallel.engines.worker_groups import WorkerGroups, among
from paceline.parallel.gradients.buckets import buckets
from paceline.parallel.losses import StepLoss
from paceline.spec import AggregationSpec, Job, Plan

_OWN_SAMPLES = "own_samples"
"""In a worker's own state: the weight of what its group has computed since the last outer step began."""
_OWN_PART = "own_part"
"""Likewise: its part of the outer step that is under way."""


class LocalSGD(Engine):
    """The engine of infrequent averaging: every `sync_every` steps an outer step synchronises all groups of workers.

    An outer step sends the weighted moves n_g / n (x_g - a), as gradients would. Running statistics of norm
    layers, and other floating-point buffers, are averaged like the weights, exactly and without the outer step (an
    extrapolated variance could be negative); all other buffers become rank 0's.
    """

    def __init__(
        self,
        model: nn.Module,
        job: Job,
        plan: Plan,
        device: torch.device,
        groups: WorkerGroups,
        aggregator: Aggregator | None,
        find_unused_parameters: bool,
    ) -> None:
        """
        Args:
            aggregator: aggregates over `groups.across`; None where that is None.
        """
        self._spec = job.aggregation
        self._groups = groups
        self._aggregator = aggregator
        broadcast([*model.parameters(), *model.buffers()], groups.everyone)
        self._every_step = _engine_inside(model, job, plan, device, groups, find_unused_parameters)
        super().__init__(self._every_step.module, device, self._every_step.layouts)
        self.notes = (describe_outer_steps(self._spec),)
        self.buffers = self._every_step.buffers
        is_local_sgd = self._spec.method == "local_sgd"
        self._outer_lr = 1.0 if is_local_sgd else self._spec.outer_lr
        self._outer_momentum = 0.0 if is_local_sgd else self._spec.outer_momentum
        self._weights = [
            WeightBucket(bucket, bool(self._outer_momentum))
            for bucket in buckets(
                ((name, p) for name, p in self.module.named_parameters() if p.requires_grad),
                lambda named: (wide_dtype(named[1]), named[1].numel() * wide_dtype(named[1]).itemsize),
            )
        ]
        self._buffers = _floating_buffers(self.module)
        self._has_begun = False
        self._num_steps = 0
        """Counted since the last outer step began, as the next three."""
        self._own_samples: float = 0
        """The weight of what this group has computed: samples, or the units of a `Mean`."""
        self._all_samples = 0
        self._losses: set[str] = set()
        """The names of the loss functions."""
        self._is_weighted: dict[str, bool] = {}
        """Whether a loss function returns a `Mean`, as far as all workers know."""
        self._under_way: OuterStep | None = None
        """The outer step whose sums are being sent."""
        self._holds_consensus = False
        self._mean: dict[str, Tensor] | None = None
        """The model that a checkpoint away from outer steps holds, until the next step."""

    def close(self, error: BaseException | None = None) -> None:
        if error is None:
            self._await_sums()  # else the process would end while they are being sent
        self._every_step.close(error)
        if self._aggregator is not None:
            self._aggregator.scheduler.close()

    def step(self, step: StepInput, update: Update) -> StepLoss:
        """Train on the samples of this worker's group.

        Without any such sample, or where their `Mean`s have no weight, no parameter gets a gradient, and the loss is
        NaN.
        """
        result = self._gradients(step)
        update(result.loss)
        if self._num_steps == self._spec.sync_every:
            self._begin_outer_step()
        if self._under_way is not None and self._num_steps == self._spec.overlap_steps:
            begin = mark(self._device)
            self._finish_outer_step(self._under_way)
            self.communication = begin, mark(self._device)
        return result

    def audit(self, step: StepInput) -> None:
        mine = among(step, self._groups.own)
        if mine.assignment.shard_sizes:
            self._every_step.audit(mine)

    def _gradients(self, step: StepInput) -> StepLoss:
        if self._holds_consensus:
            raise JobError("run.step has no effect inside run.consensus, which restores the weights; call it outside.")
        if not self._has_begun:  # weights may have been loaded since they were prepared
            self._remember()
            self._has_begun = True
        self._num_steps += 1
        self._mean = None
        self._losses.add(step.loss_name)
        self._all_samples += step.assignment.global_size
        mine = among(step, self._groups.own)
        if not mine.assignment.shard_sizes:
            now = mark(self._device)
            self.communication = now, now
            return StepLoss(torch.full((), torch.nan, device=self._device))
        result = self._every_step.gradients(mine)
        self.communication = self._every_step.communication  # unless an outer step follows
        if result.rescale is None:
            self._own_samples += mine.assignment.global_size
            return result
        weight = mine.assignment.global_size / float(result.rescale)
        self._own_samples += weight
        if not weight:
            for parameter in self.module.parameters():
                parameter.grad = None
        return result

    @torch.no_grad()
    def _begin_outer_step(self) -> None:
        if self._aggregator is not None:
            # The scheduler counts this as a step, so that it compares the calls of the first outer steps.
            self._aggregator.scheduler.begin_step()
        own_part = self._own_part()
        begun = [weights.current() if self._spec.overlap_steps else None for weights in self._weights]
        moves = self._begin_moves(own_part, exactly=False)
        self._under_way = OuterStep(own_part, moves, begun)
        self._num_steps = self._all_samples = 0
        self._own_samples = 0
        self._losses.clear()

    @torch.no_grad()
    def _finish_outer_step(self, outer: OuterStep) -> None:
        for number, ((weights, move, future), begun) in enumerate(zip(outer.moves, outer.begun, strict=True)):
            self._wait(future)
            self._groups.share(move, number)
            weights.step(move, self._outer_lr, self._outer_momentum)
            weights.write(weights.agreed if begun is None else weights.current().sub_(begun).add_(weights.agreed))
        self._average_buffers(outer.own_part)
        self._buffers = _floating_buffers(self.module)
        self._under_way = None

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """A context in which the model holds the weighted mean of all workers' weights; exact, without an outer step.

        Afterwards it is as it was.
        """
        if self._holds_consensus:
            yield
            return
        tensors = [*self.module.parameters(), *self.module.buffers()]
        self._await_sums()  # the group is used by one at a time
        with torch.no_grad():
            kept = [tensor.detach().clone() for tensor in tensors]
            own_part = self._own_part()
            moves = self._begin_moves(own_part, exactly=True)
            for number, (weights, move, future) in enumerate(moves):
                self._wait(future)
                self._groups.share(move, number)
                weights.write(weights.agreed + move)
            self._average_buffers(own_part)
        self._holds_consensus = True
        try:
            yield
        finally:
            self._holds_consensus = False
            with torch.no_grad():
                for tensor, own in zip(tensors, kept, strict=True):
                    tensor.copy_(own)

    weights_diverge = True
    changes_state = True

    @property
    def is_synchronised(self) -> bool:
        return self._num_steps == self._spec.overlap_steps and self._under_way is None

    def sync_buffers(self) -> bool:
        """Away from outer steps workers differ in more: a checkpoint has what each has, and the mean as the model."""
        if self.is_synchronised:
            return True
        if self._holds_consensus:
            raise JobError("run.save would save the weights of run.consensus as each worker's own; call it outside.")
        with self.consensus():
            self._mean = copy.deepcopy(super().model_state())
        for number, (_, move, _) in enumerate(self._under_way.moves if self._under_way is not None else ()):
            self._groups.share(move, number)
        return True

    def shared_state(self) -> dict[str, Any]:
        inside = self._every_step.shared_state()
        return {"inside": inside, "meetings": self.state_dict() if self._has_begun else None}

    def model_state(self) -> dict[str, Any]:
        if self._mean is not None:
            return self._mean
        state = super().model_state()
        if self._spec.overlap_steps:  # workers have moved on since they agreed
            agreed = by_name(self._weights, [weights.agreed for weights in self._weights])
            state |= {name: part.to(state[name]) for name, part in agreed.items()}
        return state

    def own_state(self) -> dict[str, Any]:
        if self._spec.groups and not self._groups.leads:
            return {AS_RANK: self._groups.own[0]}
        if self.is_synchronised and not self._spec.overlap_steps:
            return {}
        sums = {_OWN_SAMPLES: torch.tensor(float(self._own_samples), dtype=torch.float64)}
        means = {
            "weights": by_name(self._weights, [weights.current() for weights in self._weights]),
            "buffers": dict(self.module.named_buffers()),
        }
        if self._under_way is not None:
            sums[_OWN_PART] = torch.tensor(self._under_way.own_part, dtype=torch.float64)
            begun = [weights for weights in self._under_way.begun if weights is not None]
            means["begun"] = by_name(self._weights, begun)
        return {"sums": sums, "means": means}

    @torch.no_grad()
    def load_state(self, shared: dict[str, Any], own: dict[str, Any]) -> None:
        self._every_step.load_state(shared.get("inside", {}), {})
        self._under_way = self._mean = None
        meetings = shared.get("meetings") or {}
        if meetings:
            self._buffers = _floating_buffers(self.module)
            self.load_state_dict(meetings)
        sums, means = dict(own.get("sums", {})), dict(own.get("means", {}))
        mine = means.pop("weights", {}) | means.pop("buffers", {})
        for name, tensor in itertools.chain(self.module.named_parameters(), self.module.named_buffers()):
            if name in mine:
                tensor.copy_(mine[name])
        self._own_samples = float(sums.pop(_OWN_SAMPLES, self._own_samples))
        own_part, begun_at = sums.pop(_OWN_PART, None), means.pop("begun", {})
        if own_part is not None:
            moves, begun = ([torch.zeros_like(weights.agreed) for weights in self._weights] for _ in range(2))
            fill(self._weights, moves, meetings["under_way"])
            fill(self._weights, begun, begun_at)
            arrived = [(weights, move, None) for weights, move in zip(self._weights, moves, strict=True)]
            self._under_way = OuterStep(float(own_part), arrived, begun)

    def state_dict(self) -> dict[str, Any]:
        """The state of outer steps besides model and optimizer; between outer steps all three differ among workers.

        Values are views of the live state, per parameter. The sums of an outer step that is under way have arrived.
        """
        moves = [move for _, move, _ in self._under_way.moves] if self._under_way is not None else None
        return {
            "num_steps": self._num_steps,
            "own_samples": self._own_samples,
            "all_samples": self._all_samples,
            "losses": sorted(self._losses),
            "agreed": by_name(self._weights, [weights.agreed for weights in self._weights]),
            "momentum": by_name(self._weights, self._momenta) if self._outer_momentum else {},
            "buffers": dict(self._buffers),
            "under_way": None if moves is None else by_name(self._weights, moves),
        }

    @property
    def _momenta(self) -> list[Tensor]:
        return [weights.momentum for weights in self._weights if weights.momentum is not None]

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state; the caller loads the model's weights and buffers."""
        self._num_steps = state["num_steps"]
        self._own_samples, self._all_samples = state["own_samples"], state["all_samples"]
        self._losses = set(state.get("losses", ()))
        fill(self._weights, [weights.agreed for weights in self._weights], state["agreed"])
        if self._outer_momentum:
            fill(self._weights, self._momenta, state["momentum"])
        self._buffers |= {name: one.to(self._device) for name, one in state.get("buffers", {}).items()}
        self._has_begun = True

    def _own_part(self) -> float:
        """This group's fraction of the samples since the last outer step, or of the units of `Mean`s; equal fractions
        if there are none. A collective where a loss function is new or returns a `Mean`."""
        own, total = self._own_samples, float(self._all_samples)
        for name in sorted(self._losses - self._is_weighted.keys()):
            returned = all_gather_objects(self._every_step.layouts.may_be_weighted(name), self._groups.everyone)
            self._is_weighted[name] = all(returned)
        if any(self._is_weighted[name] for name in self._losses):
            owns = all_gather_objects(own, self._groups.everyone)
            total = math.fsum(owns[group[0]] for group in self._groups.members)
        return own / total if total else 1 / len(self._groups.members)

    def _begin_moves(self, own_part: float, *, exactly: bool) -> list[Move]:
        """Begin to sum the differences from the last common weights to the mean of the current ones.

        Args:
            exactly: whether nothing is left out, and nothing added that was left out before.
        """
        moves: list[Move] = []
        for number, weights in enumerate(self._weights):
            move = (weights.current() - weights.agreed).mul_(own_part)
            parts = tuple(weights.named(move))
            future = None
            if self._aggregator is not None and self._groups.adds_up(number):
                sums = self._aggregator
                future = sums.sum_exactly(move, "weights") if exactly else sums.sum_bucket(Bucket(move, parts))
            moves.append((weights, move, future))
        return moves

    def _average_buffers(self, own_part: float) -> None:
        others: list[Tensor] = []
        floating: list[tuple[Tensor, Tensor]] = []
        for name, buffer in self.module.named_buffers():
            if not buffer.is_floating_point():
                others.append(buffer)
            else:
                floating.append((buffer, self._buffers.get(name, torch.zeros_like(buffer))))
        if floating:
            # A constant, were it infinite, is not moved at all.
            moves = [torch.where(now == agreed, 0.0, now.double() - agreed.double()) for now, agreed in floating]
            flat = torch.cat([move.reshape(-1) for move in moves]).mul_(own_part)
            if self._aggregator is not None and self._groups.adds_up(0):
                self._wait(self._aggregator.sum_exactly(flat, "buffers"))
            self._groups.share(flat, 0)
            pieces = flat.split([move.numel() for move in moves])
            for (buffer, agreed), piece in zip(floating, pieces, strict=True):
                buffer.copy_(agreed.double() + piece.view(buffer.shape))
        broadcast(others, self._groups.everyone)

    def _await_sums(self) -> None:
        """Wait for those of the outer step that is under way, if one is."""
        for _, _, future in self._under_way.moves if self._under_way is not None else ():
            self._wait(future)

    def _wait(self, future: torch.futures.Future[Tensor] | None) -> None:
        if future is not None and self._aggregator is not None:
            future.wait()
            self._aggregator.scheduler.raise_error()

    def _remember(self) -> None:
        for weights in self._weights:
            weights.agreed.copy_(weights.current())
        self._buffers = _floating_buffers(self.module)


def _engine_inside(
    model: nn.Module,
    job: Job,
    plan: Plan,
    device: torch.device,
    groups: WorkerGroups,
    find_unused_parameters: bool,
) -> DataParallel | BitwiseDataParallel:
    """The engine by which the workers of each group train together."""
    if job.parity == "bitwise":
        return BitwiseDataParallel(model, device, groups.inside, plan.timeout_s)
    aggregator = None
    if len(groups.members) < sum(map(len, groups.members)):
        links = open_links(groups.inside, device, plan.timeout_s)
        if links is not None:
            scheduler = Scheduler(links.group, device, check_always=plan.debug_comm)
            aggregator = Aggregator(ALGORITHMS["hierarchical"], links, scheduler)
    return DataParallel(model, plan, device, groups.inside, aggregator, find_unused_parameters)


def describe_outer_steps(spec: AggregationSpec) -> str:
    """Notes for the run's log and report."""
    who = "nodes" if spec.sync_inside_nodes else f"{spec.groups} groups of workers" if spec.groups else "workers"
    when = "step" if spec.sync_every == 1 else f"{spec.sync_every} steps"
    details: list[str] = [spec.method]
    if spec.method == "diloco":
        details += [f"outer lr {spec.outer_lr:g}", f"momentum {spec.outer_momentum:g}"]
    if spec.overlap_steps:
        details.append(f"applied {spec.overlap_steps} steps late")
    return (
        f"the weights of the {who} are averaged every {when} ({', '.join(details)}); in between each trains on its own "
        "samples of every batch, so the result depends on their number, and the training loss is that of rank 0"
    )


def _floating_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Copies, by name."""
    return {name: buffer.detach().clone() for name, buffer in model.named_buffers() if buffer.is_floating_point()}
