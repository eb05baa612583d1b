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
from torch import Tensor, nn

from paceline.comm import Aggregator
from paceline.errors import JobError
from paceline.object_collectives import all_gather_objects
from paceline.parallel.assignment import Assignment
from paceline.parallel.buckets import buckets
from paceline.parallel.clock import mark
from paceline.parallel.engine import Engine, Update
from paceline.parallel.initial_weights import broadcast
from paceline.parallel.layout import Whole
from paceline.parallel.losses import StepLoss
from paceline.parallel.running_sum import RunningSum
from paceline.parallel.step_input import StepInput
from paceline.spec import AggregationSpec

_OWN_SAMPLES = "own_samples"
"""In a worker's own state: the weight of what it has computed since the last outer step."""


class OuterSteps(Engine):
    """The engine of infrequent averaging: every `sync_every` steps an outer step synchronises all workers.

    An outer step sends the weighted moves n_w / n (x_w - a), as gradients would. Running statistics of norm layers, and
    other floating-point buffers, are averaged like the weights, exactly and without the outer step (an extrapolated
    variance could be negative); all other buffers become rank 0's.
    """

    changes_state = True

    def __init__(
        self,
        layout: Whole,
        spec: AggregationSpec,
        everyone: dist.ProcessGroup | None,
        aggregator: Aggregator | None,
        notes: Sequence[str] = (),
    ) -> None:
        """
        Args:
            layout: of a worker that trains alone.
            everyone: all workers, which have equal weights; None: there is one.
            aggregator: sums over them.
        """
        super().__init__(layout, RunningSum(layout, None), notes=[*notes, describe_outer_steps(spec)])
        self._spec = spec
        self._everyone = everyone
        self._aggregator = aggregator
        is_local_sgd = spec.method == "local_sgd"
        self._outer_lr = 1.0 if is_local_sgd else spec.outer_lr
        self._outer_momentum = 0.0 if is_local_sgd else spec.outer_momentum
        trained = [(name, p) for name, p in self.module.named_parameters() if p.requires_grad]
        self._weights = [_Weights(bucket, bool(self._outer_momentum)) for bucket in buckets(trained, _kind)]
        self._buffers: dict[str, Tensor] = {}
        """The floating-point buffers after the last outer step."""
        self._has_begun = False
        self._num_steps = 0
        """Counted since the last outer step, as the next three."""
        self._own_samples: float = 0
        """The weight of what this worker has computed: samples, or the units of a `Mean`."""
        self._all_samples = 0
        self._losses: set[str] = set()
        """The names of the loss functions."""
        self._holds_consensus = False
        self._mean: dict[str, Tensor] | None = None
        """The model that a checkpoint away from outer steps holds, until the next step."""

    def close(self, error: BaseException | None = None) -> None:
        super().close(error)
        if self._aggregator is not None:
            self._aggregator.scheduler.close()

    # --- steps ---

    def step(self, step: StepInput, update: Update) -> StepLoss:
        """Train on the samples of this worker.

        Without any such sample, or where their `Mean`s have no weight, no parameter gets a gradient, and the loss is
        NaN.
        """
        result = self._own_gradients(step)
        update(result.loss)
        if self._num_steps == self._spec.sync_every:
            begin = mark(self.layout.device)
            self._outer_step()
            self.communication = begin, mark(self.layout.device)
        return result

    def _own_gradients(self, step: StepInput) -> StepLoss:
        if self._holds_consensus:
            raise JobError("run.step has no effect inside run.consensus, which restores the weights; call it outside.")
        if not self._has_begun:  # weights may have been loaded since they were prepared
            self._agree()
            self._has_begun = True
        self._num_steps += 1
        self._mean = None
        self._losses.add(step.loss_name)
        self._all_samples += step.assignment.global_size
        mine = _own_part_of(step)
        num_samples = mine.assignment.global_size
        if not num_samples:
            now = mark(self.layout.device)
            self.communication = now, now
            return StepLoss(torch.full((), torch.nan, device=self.layout.device))
        result = self.gradients(mine)
        weight = num_samples if result.rescale is None else num_samples / float(result.rescale)
        self._own_samples += weight
        if not weight:
            for parameter in self.module.parameters():
                parameter.grad = None
        return result

    def audit(self, step: StepInput) -> None:
        mine = _own_part_of(step)
        if mine.assignment.shard_sizes:
            super().audit(mine)

    @torch.no_grad()
    def _outer_step(self) -> None:
        if self._aggregator is not None:
            # The scheduler counts this as a step, so that it compares the calls of the first outer steps.
            self._aggregator.scheduler.begin_step()
        part = self._part_of_samples()
        for weights, move in zip(self._weights, self._sum_moves(part, exactly=False), strict=True):
            weights.step(move, self._outer_lr, self._outer_momentum)
            weights.write(weights.agreed)
        self._average_buffers(part)
        self._buffers = _floating_buffers(self.module)
        self._num_steps = self._all_samples = 0
        self._own_samples = 0
        self._losses.clear()

    @torch.no_grad()
    def _agree(self) -> None:
        """Take the present weights for those after the last outer step."""
        for weights in self._weights:
            weights.agreed.copy_(weights.current())
        self._buffers = _floating_buffers(self.module)

    def _part_of_samples(self) -> float:
        """This worker's fraction of the samples since the last outer step, or of the units of `Mean`s; equal fractions
        if there are none. A collective."""
        may_be_weighted = any(self.layouts.may_be_weighted(name) for name in self._losses)
        everyone = all_gather_objects([may_be_weighted, self._own_samples], self._everyone)
        total: float = self._all_samples
        if any(weighted for weighted, _ in everyone):
            total = math.fsum(samples for _, samples in everyone)
        return self._own_samples / total if total else 1 / len(everyone)

    def _sum_moves(self, part: float, *, exactly: bool) -> list[Tensor]:
        """The differences from the last common weights to the mean of the current ones.

        Args:
            exactly: whether nothing is rounded to the run's wire format.
        """
        moves = [(weights.current() - weights.agreed).mul_(part) for weights in self._weights]
        sums = self._aggregator
        if sums is not None:
            futures = [
                sums.sum_exactly(move, "weights")
                if exactly
                else sums.sum_bucket(move, [name for name, _ in weights.named(move)])
                for weights, move in zip(self._weights, moves, strict=True)
            ]
            for future in futures:
                future.wait()
            sums.scheduler.raise_error()
        return moves

    def _average_buffers(self, part: float) -> None:
        named = dict(self.module.named_buffers())
        floating = {name: buffer for name, buffer in named.items() if buffer.is_floating_point()}
        before = [self._buffers.get(name, torch.zeros_like(buffer)) for name, buffer in floating.items()]
        if floating:
            # A constant, were it infinite, is not moved at all.
            moves = [
                torch.where(now == agreed, 0.0, now.double() - agreed.double())
                for now, agreed in zip(floating.values(), before, strict=True)
            ]
            flat = torch.cat([move.reshape(-1) for move in moves]).mul_(part)
            if self._aggregator is not None:
                self._aggregator.sum_now(flat, "buffers")
            pieces = flat.split([move.numel() for move in moves])
            for buffer, agreed, piece in zip(floating.values(), before, pieces, strict=True):
                buffer.copy_(agreed.double() + piece.view(buffer.shape))
        broadcast([buffer for name, buffer in named.items() if name not in floating], self._everyone)

    # --- workers that differ ---

    @property
    def weights_diverge(self) -> bool:
        return True

    @property
    def is_synchronised(self) -> bool:
        return self._num_steps == 0

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
            part = self._part_of_samples()
            for weights, move in zip(self._weights, self._sum_moves(part, exactly=True), strict=True):
                weights.write(weights.agreed + move)
            self._average_buffers(part)
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
        return {"inside": super().shared_state(), "outer_steps": self._outer_state() if self._has_begun else None}

    def _outer_state(self) -> dict[str, Any]:
        """The state of outer steps besides model and optimizer; values are views of the live state, per parameter."""
        return {
            "num_steps": self._num_steps,
            "own_samples": self._own_samples,
            "all_samples": self._all_samples,
            "losses": sorted(self._losses),
            "agreed": _by_name(self._weights, [weights.agreed for weights in self._weights]),
            "momentum": _by_name(self._weights, self._momenta) if self._outer_momentum else {},
            "buffers": dict(self._buffers),
        }

    @property
    def _momenta(self) -> list[Tensor]:
        return [weights.momentum for weights in self._weights if weights.momentum is not None]

    def model_state(self) -> dict[str, Any]:
        return super().model_state() if self._mean is None else self._mean

    def own_state(self) -> dict[str, Any]:
        if self.is_synchronised:
            return {}
        means = {
            "weights": _by_name(self._weights, [weights.current() for weights in self._weights]),
            "buffers": dict(self.module.named_buffers()),
        }
        return {"sums": {_OWN_SAMPLES: torch.tensor(float(self._own_samples), dtype=torch.float64)}, "means": means}

    @torch.no_grad()
    def load_state(self, shared: dict[str, Any], own: dict[str, Any]) -> None:
        super().load_state(shared.get("inside", {}), {})
        self._mean = None
        state = shared.get("outer_steps")
        if state:
            self._num_steps = state["num_steps"]
            self._own_samples, self._all_samples = state["own_samples"], state["all_samples"]
            self._losses = set(state["losses"])
            _fill(self._weights, [weights.agreed for weights in self._weights], state["agreed"])
            if self._outer_momentum:
                _fill(self._weights, self._momenta, state["momentum"])
            self._buffers = _floating_buffers(self.module)
            self._buffers |= {name: one.to(self.layout.device) for name, one in state["buffers"].items()}
            self._has_begun = True
        means = own.get("means", {})
        mine = means.get("weights", {}) | means.get("buffers", {})
        for name, tensor in (*self.module.named_parameters(), *self.module.named_buffers()):
            if name in mine:
                tensor.copy_(mine[name])
        self._own_samples = float(own.get("sums", {}).get(_OWN_SAMPLES, self._own_samples))


class _Weights:
    """A bucket of parameters, and their values after the last outer step."""

    def __init__(self, parameters: Sequence[tuple[str, nn.Parameter]], has_momentum: bool) -> None:
        self._parameters = parameters
        self._dtype = _kind(parameters[0])[0]
        self.agreed = self.current()
        """A flat vector; in float32 where the parameters have less precision, so that small moves add up."""
        self.momentum = torch.zeros_like(self.agreed) if has_momentum else None

    def current(self) -> Tensor:
        """The parameters' values as a flat vector."""
        return torch.cat([parameter.detach().reshape(-1).to(self._dtype) for _, parameter in self._parameters])

    def named(self, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Each parameter's name and its slice of a flat vector, in its own shape."""
        pieces = flat.split([parameter.numel() for _, parameter in self._parameters])
        for (name, parameter), piece in zip(self._parameters, pieces, strict=True):
            yield name, piece.view(parameter.shape)

    def write(self, flat: Tensor) -> None:
        """Give the parameters the values of a flat vector."""
        for (_, parameter), (_, piece) in zip(self._parameters, self.named(flat), strict=True):
            parameter.copy_(piece)

    def step(self, move: Tensor, lr: float, momentum: float) -> None:
        """SGD with Nesterov momentum on the common weights, along the pseudo-gradient -move; changes `move`."""
        if self.momentum is not None:
            self.momentum.mul_(momentum).add_(move)
            move.add_(self.momentum, alpha=momentum)
        self.agreed.add_(move, alpha=lr)


def _kind(named: tuple[str, Tensor]) -> tuple[torch.dtype, int]:
    """The dtype in which moves of a parameter add up, float64 for float64, else float32; and their bytes."""
    dtype = torch.float64 if named[1].dtype == torch.float64 else torch.float32
    return dtype, named[1].numel() * dtype.itemsize


def _by_name(weights: Sequence[_Weights], flats: Sequence[Tensor]) -> dict[str, Tensor]:
    """Slices of flat vectors, one of each bucket, by the parameters' names."""
    return {name: part for bucket, flat in zip(weights, flats, strict=True) for name, part in bucket.named(flat)}


def _fill(weights: Sequence[_Weights], flats: Sequence[Tensor], saved: Mapping[str, Tensor]) -> None:
    """Give flat vectors, one of each bucket, the values that `_by_name` found."""
    for name, part in _by_name(weights, flats).items():
        part.copy_(saved[name])


def _floating_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Copies, by name."""
    return {name: buffer.detach().clone() for name, buffer in model.named_buffers() if buffer.is_floating_point()}


def _own_part_of(step: StepInput) -> StepInput:
    """The step as if this worker's samples were the whole batch; every shard keeps its own random numbers."""
    first, stop = step.assignment.own
    assignment = Assignment(step.assignment.sizes, ((0, stop - first),), rank=0)
    return replace(step, assignment=assignment, shard_seed=lambda shard: step.shard_seed(first + shard))


def describe_outer_steps(spec: AggregationSpec) -> str:
    """Notes for the run's log and report."""
    when = "step" if spec.sync_every == 1 else f"{spec.sync_every} steps"
    details: list[str] = [spec.method]
    if spec.method == "diloco":
        details += [f"outer lr {spec.outer_lr:g}", f"momentum {spec.outer_momentum:g}"]
    return (
        f"the weights of the workers are averaged every {when} ({', '.join(details)}); in between each trains on its "
        "own samples of every batch, so the result depends on their number, and the training loss is that of rank 0"
    )
