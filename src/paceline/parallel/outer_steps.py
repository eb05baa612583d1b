"""`aggregation.method = "local_sgd"` and `"diloco"`: workers train separately and synchronise every few steps.

Between two outer steps a worker updates its own weights by the gradient of its own samples. With a the weights after
the last outer step, x_w those of worker w now and n_w the samples it has computed in between, an outer step finds

    d = sum over w of n_w / n (x_w - a),    n = sum over w of n_w

the difference between a and the weighted mean of all x_w, and every worker continues from

    a + d                                       local_sgd
    a + outer_lr (d + outer_momentum v)         diloco, after v <- outer_momentum v + d

so that local_sgd is diloco with outer_lr = 1 and outer_momentum = 0, and with an outer step after every step of plain
SGD it is synchronous training: d is then -lr times the mean gradient over all samples. The second line is a step of SGD
with Nesterov momentum along the pseudo-gradient -d. The optimizer that makes the steps in between keeps its state.

Where a loss is a `Mean`, n_w counts the units that it is the mean of, such as valid tokens, in place of samples.

Stich, "Local SGD Converges Fast and Communicates Little", 2018, arXiv 1805.09767; Lin, Stich, Patel, Jaggi, "Don't
Use Large Mini-Batches, Use Local SGD", 2018, arXiv 1808.07217; Douillard et al., "DiLoCo: Distributed
Low-Communication Training of Language Models", 2023, arXiv 2311.08105.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm import Aggregator
from paceline.comm.buckets import broadcast, buckets
from paceline.errors import JobError
from paceline.object_collectives import all_gather_objects
from paceline.parallel.engine import Engine, Update, time_mark
from paceline.parallel.layout import Layout
from paceline.parallel.losses import StepLoss
from paceline.parallel.running_sum import RunningSum
from paceline.parallel.step_input import Assignment, StepInput
from paceline.spec.algorithm import AlgorithmName
from paceline.spec.job import AggregationSpec
from paceline.words import number_of


class OuterSteps(Engine):
    """The engine of infrequent averaging: every `sync_every` steps an outer step synchronises all workers.

    An outer step sends the weighted moves n_w / n (x_w - a), as gradients would. Running statistics of norm layers, and
    other floating-point buffers, are averaged like the weights, exactly and without the outer step (an extrapolated
    variance could be negative); all other buffers become rank 0's.
    """

    changes_state = True
    weights_diverge = True

    def __init__(
        self,
        layout: Layout,
        spec: AggregationSpec,
        everyone: dist.ProcessGroup | None,
        aggregator: Aggregator | None,
        notes: Sequence[str],
        algorithm: AlgorithmName | None,
    ) -> None:
        """
        Args:
            layout: of a worker that trains alone.
            everyone: all workers, which have equal weights; None: there is one.
            aggregator, notes, algorithm: how they sum moves.
        """
        note = (
            f"the weights of the workers are averaged every {number_of(spec.sync_every, 'step')} ({spec.method}); in "
            "between each trains on its own samples of every batch, so the result depends on their number, and the "
            "training loss is that of rank 0"
        )
        super().__init__(layout, RunningSum(layout, None), notes=[*notes, note], algorithm=algorithm)
        self._spec = spec
        self._everyone = everyone
        self._aggregator = aggregator
        is_local_sgd = spec.method == "local_sgd"
        self._outer_lr = 1.0 if is_local_sgd else spec.outer_lr
        self._outer_momentum = 0.0 if is_local_sgd else spec.outer_momentum
        self._buffers = {name for name, _ in self.module.named_buffers()}
        self._agreed: dict[str, Tensor] = {}
        """The weights and floating-point buffers after the last outer step, in `_wide` precision."""
        self._momentum: dict[str, Tensor] = {}
        self._num_steps = 0
        """Since the last outer step."""
        self._own_samples = 0.0
        """The weight of what this worker has computed since then: samples, or the units of a `Mean`."""
        self._holds_consensus = False
        self._mean: dict[str, Tensor] | None = None
        """The model that a checkpoint away from outer steps holds, until the next step."""

    def close(self, error: BaseException | None = None) -> None:
        super().close(error)
        if self._aggregator is not None:
            self._aggregator.close()

    # --- steps ---

    def step(self, step: StepInput, update: Update) -> StepLoss:
        """Train on the samples of this worker.

        Without any such sample, or where their `Mean`s have no weight, no parameter gets a gradient, and the loss is
        NaN.
        """
        if self._holds_consensus:
            raise JobError("run.step has no effect inside run.consensus, which restores the weights; call it outside.")
        # Not earlier: weights may have been loaded since they were prepared, or unfrozen.
        new = {name: one for name, one in self._averaged().items() if name not in self._agreed}
        self._agreed |= {name: _wide(one, copy=True) for name, one in new.items()}
        self._num_steps += 1
        self._mean = None
        result = StepLoss(torch.full((), torch.nan, device=self.layout.device))
        mine = _own_part_of(step)
        if num_samples := mine.assignment.global_size:
            result = self.gradients(mine)
            weight = num_samples if result.rescale is None else num_samples / float(result.rescale)
            self._own_samples += weight
            if not weight:
                self.module.zero_grad()
        update(result.loss)
        self.is_synchronised = self._num_steps == self._spec.sync_every
        if self.is_synchronised:
            begin = time_mark(self.layout.device)
            self._outer_step(step.number)
            self.communication = begin, time_mark(self.layout.device)
        return result

    def audit(self, step: StepInput, *, has_gradients: bool) -> None:
        mine = _own_part_of(step)
        if mine.assignment.shard_sizes:
            super().audit(mine, has_gradients=has_gradients)

    @torch.no_grad()
    def _outer_step(self, number: int) -> None:
        if self._aggregator is not None:
            self._aggregator.begin_step(number)  # and so it compares the calls of the first outer steps
        for name, move in self._mean_moves(exactly=False).items():
            if name in self._buffers:
                self._agreed[name].add_(move)
                continue
            if self._outer_momentum:  # Nesterov's
                momentum = self._momentum.setdefault(name, torch.zeros_like(move))
                momentum.mul_(self._outer_momentum).add_(move)
                move.add_(momentum, alpha=self._outer_momentum)
            self._agreed[name].add_(move, alpha=self._outer_lr)
        self._hold(self._agreed)
        self._num_steps, self._own_samples = 0, 0.0

    def _averaged(self) -> dict[str, Tensor]:
        """The weights of this worker that are trained, or were before, and its floating-point buffers, by name."""
        trained = {name: p for name, p in self.module.named_parameters() if p.requires_grad or name in self._agreed}
        floating = {name: one for name, one in self.module.named_buffers() if one.is_floating_point()}
        return {name: one.detach() for name, one in (trained | floating).items()}

    def _hold(self, values: Mapping[str, Tensor]) -> None:
        """Hold what workers agree on, and rank 0's other buffers."""
        averaged = self._averaged()
        for name, value in values.items():
            averaged[name].copy_(value)
        broadcast([one for name, one in self.module.named_buffers() if name not in averaged], self._everyone)

    def _mean_moves(self, *, exactly: bool) -> dict[str, Tensor]:
        """The differences from what workers last agreed on to the mean of what they have, by name. A collective.

        Each counts by its fraction of the samples since the last outer step, or of the units of `Mean`s; equally if
        there are none.

        Args:
            exactly: whether no weight is rounded to the run's wire format; no buffer ever is.
        """
        of_workers = all_gather_objects(self._own_samples, self._everyone)
        total = math.fsum(of_workers)
        part = self._own_samples / total if total else 1 / len(of_workers)
        averaged = self._averaged()
        moves: dict[str, Tensor] = {}
        arriving = []
        for bucket in buckets(
            self._agreed.items(), lambda named: ((named[0] in self._buffers, named[1].dtype), named[1].nbytes)
        ):
            names = [name for name, _ in bucket]
            # What has not moved may be infinite.
            own = [torch.where(now == old, 0.0, now - old) for now, old in ((_wide(averaged[n]), o) for n, o in bucket)]
            flat = torch.cat([one.reshape(-1) for one in own]).mul_(part)
            pieces = flat.split([agreed.numel() for _, agreed in bucket])
            moves |= {name: piece.view_as(agreed) for (name, agreed), piece in zip(bucket, pieces, strict=True)}
            if (sums := self._aggregator) is not None:
                is_exact = exactly or names[0] in self._buffers
                arriving.append(sums.sum_exactly(flat, "weights") if is_exact else sums.sum_bucket(flat, names))
        for future in arriving:
            future.wait()
        if self._aggregator is not None:
            self._aggregator.raise_error()
        return moves

    # --- workers that differ ---

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """A context in which the model holds the weighted mean of all workers' weights; exact, without an outer step.

        Afterwards it is as it was.
        """
        if self._holds_consensus:
            yield
            return
        tensors = [*self.module.parameters(), *self.module.buffers()]
        with torch.no_grad():
            kept = [tensor.detach().clone() for tensor in tensors]
            self._hold({name: self._agreed[name] + move for name, move in self._mean_moves(exactly=True).items()})
        self._holds_consensus = True
        try:
            yield
        finally:
            self._holds_consensus = False
            with torch.no_grad():
                for tensor, own in zip(tensors, kept, strict=True):
                    tensor.copy_(own)

    def sync_buffers(self) -> bool:
        """Away from outer steps workers differ in more: a checkpoint has what each has, and the mean as the model."""
        if not self.is_synchronised:
            if self._holds_consensus:
                raise JobError(
                    "run.save would save the weights of run.consensus as each worker's own; call it outside."
                )
            with self.consensus():
                self._mean = copy.deepcopy(super().model_state())
        return True

    # --- checkpoints ---

    def shared_state(self) -> dict[str, Any]:
        outer_steps = None  # values are of the live state, per parameter
        if self._agreed:
            outer_steps = {
                "num_steps": self._num_steps,
                "agreed": dict(self._agreed),
                "momentum": dict(self._momentum),
            }
        return {"inside": super().shared_state(), "outer_steps": outer_steps}

    def model_state(self) -> dict[str, Any]:
        return super().model_state() if self._mean is None else self._mean

    def own_state(self) -> dict[str, Any]:
        if self.is_synchronised:
            return {}
        every = self._averaged() | dict(self.module.named_buffers())
        means = {name: _wide(one) if one.is_floating_point() else one for name, one in every.items()}
        samples = torch.tensor(float(self._own_samples), dtype=torch.float64)
        return {"sums": {"own_samples": samples}, "means": {"tensors": means}}

    @torch.no_grad()
    def load_state(self, shared: dict[str, Any], own: dict[str, Any]) -> None:
        super().load_state(shared.get("inside", {}), {})
        self._mean = None
        state = shared.get("outer_steps")
        if state:
            self._num_steps = state["num_steps"]
            self.is_synchronised = not self._num_steps
            self._agreed, self._momentum = (
                {name: one.to(self.layout.device) for name, one in state[key].items()} for key in ("agreed", "momentum")
            )
        mine = own.get("means", {}).get("tensors", {})
        for name, tensor in (*self.module.named_parameters(), *self.module.named_buffers()):
            if name in mine:
                tensor.copy_(mine[name])
        self._own_samples = float(own.get("sums", {}).get("own_samples", 0.0))


def _wide(tensor: Tensor, *, copy: bool = False) -> Tensor:
    """Weights in float32 where they have less precision, so that small moves add up."""
    return tensor.detach().to(torch.float64 if tensor.dtype == torch.float64 else torch.float32, copy=copy)


def _own_part_of(step: StepInput) -> StepInput:
    """The step as if this worker's samples were the whole batch; every shard keeps its own random numbers."""
    first, stop = step.assignment.own
    assignment = Assignment(step.assignment.sizes, ((0, stop - first),), rank=0)
    return replace(step, assignment=assignment, shard_seed=lambda shard: step.shard_seed(first + shard))
