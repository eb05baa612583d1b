"""A worker's virtual shards through the model: which go together, with which weights, seeds and norm statistics.

Several shards go through the model together where that changes nothing. A dropout mask belongs to its shard, so where
the forward pass draws random numbers the shards go one by one, each with its own seed. A model may begin to draw at any
step (a dropout rate that rises from 0), so every pass over several shards is watched: if it drew random numbers, the
step starts over, shard by shard.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from paceline.errors import ModelError
from paceline.parallel.assignment import Assignment, ShardRange
from paceline.parallel.coupling import AUX_LOSS, describe_coupling, leaving_no_trace, returns_aux_loss, tolerance
from paceline.parallel.engine import StepInput, statistics_dtype
from paceline.parallel.forward_buffers import ForwardBuffers
from paceline.parallel.generators import generator_states
from paceline.parallel.loss_functions import DRAWS, LossFunctions
from paceline.parallel.losses import ShardLoss, counts, ignore_unless, read_loss, watching_outputs
from paceline.parallel.micro_batch import MicroBatchLimit, free_memory, is_out_of_memory
from paceline.parallel.norm import NormStatistics, has_other_norms, standing_in
from paceline.parallel.novelty import Novelty
from paceline.samples import Turns

Result = TypeVar("Result")


class StartOverError(Exception):
    """The passes of a step have to be made again, after `prepare`."""

    def __init__(self, prepare: Callable[[], object]) -> None:
        super().__init__()
        self.prepare = prepare


@dataclass
class Passed:
    """What came of this worker's passes in a step."""

    losses: Tensor | None = None
    """The sums of its losses; None where it has no sample, or not the last stage."""
    first_weight: float | Tensor = 0.0
    first_sqr: Tensor | None = None
    """Where gradient noise can be measured by it: the squared norm of the gradient of all workers' first passes."""
    first_samples: int = 0
    """The number of samples behind it."""

    def add(self, loss: ShardLoss) -> None:
        if self.losses is None:
            self.first_weight = loss.weight
        self.losses = loss.sums if self.losses is None else self.losses + loss.sums


class Passes:
    """Runs the forward and backward passes of one worker, or of one device of a worker."""

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        functions: LossFunctions,
        micro_batch: MicroBatchLimit | None = None,
        *,
        may_split: bool = True,
        one_by_one: bool = False,
        refusal: str = "",
        is_concurrent: bool = False,
    ) -> None:
        """
        Args:
            functions, micro_batch: shared by the devices of a worker; without a limit all of an assignment goes
                together.
            may_split: whether shards that could go together may also go one by one.
            one_by_one: whether they always do.
            refusal: the error message for a model that draws random numbers, if the engine cannot train one.
            is_concurrent: whether other devices use the same generators at the same time, until numbers are drawn.
        """
        self.norm = NormStatistics(model)
        self.buffers = ForwardBuffers(model, self.norm)
        self.functions = functions
        self.like = torch.zeros((), dtype=statistics_dtype(model), device=device)
        """A tensor of the dtype, and on the device, in which losses are added."""
        self._model = model
        self._device = device
        self._micro_batch = micro_batch
        self.num_shards_in_pass = 0
        """How many shards went through the model together last."""
        self._may_split = may_split
        self._one_by_one = one_by_one
        # Where batch norm mixes the shards of a pass, their losses differ from those of single shards.
        self._examines = may_split and not one_by_one and not has_other_norms(model)
        self._novelties: defaultdict[str, Novelty] = defaultdict(Novelty)
        self._refusal = refusal
        self._is_concurrent = is_concurrent
        # Shards that take turns are one batch of more channels, which in this format would be a copy to begin with. On
        # a CPU a kernel for each shard costs little.
        self._norms_rows = device.type == "cpu" and _has_channels_last(model)
        self._turns = Turns()

    # --- which shards go together ---

    def ranges(self, step: StepInput, rank: int) -> list[ShardRange]:
        """The shards of each pass of worker `rank`, by the current knowledge of random draws and of the loss."""
        return self._ranges(step, rank, self._most_samples(step))

    def _ranges(self, step: StepInput, rank: int, max_samples: int | None) -> list[ShardRange]:
        of_rank = replace(step, assignment=replace(step.assignment, rank=rank))
        next_shard, stop = of_rank.assignment.own
        found: list[ShardRange] = []
        while next_shard < stop:
            found.append(self._range(of_rank, next_shard, max_samples))
            next_shard = found[-1].stop_shard
        return found

    def _range(self, step: StepInput, first_shard: int, max_samples: int | None) -> ShardRange:
        """Shards that go together; where batch norm layers gain by it, they take turns."""
        shards = step.assignment.shard_range(first_shard, max_samples)
        gain = (self.norm.exist or step.companions.have_norms) and not self._norms_rows
        if len(shards.sizes) > 1 == len(set(shards.sizes)) and gain and step.batch.can_interleave:
            return replace(shards, are_interleaved=True)
        return shards

    def _most_samples(self, step: StepInput) -> int | None:
        """The most samples of a pass: 1, less than a shard, where the model draws random numbers or the loss couples
        samples, as far as is known."""
        couples = self._examines and self.functions.couples.get(step.loss_name) is not False
        if self._one_by_one or (self._may_split and (couples or self.functions.draws is not False)):
            return 1
        return self._limit

    @property
    def _limit(self) -> int | None:
        return None if self._micro_batch is None else self._micro_batch.size

    # --- a loss that couples samples ---

    def find_coupling(self, step: StepInput, module: nn.Module, *, in_step: bool = False) -> tuple[str, ...]:
        """Find out whether shards may go through the model together, in the first step of a loss function in which a
        worker has two that could: then a collective. Returns a sentence for the user if they must not.

        The first shards of each worker are computed together and one by one, without gradients and without a trace.

        Args:
            in_step: whether all workers have to make equally many passes.
        """
        if not self._examines or step.loss_name in self.functions.couples:
            return ()
        return self.find_coupling_again(step, module, None, in_step=in_step)

    def find_coupling_again(
        self, step: StepInput, module: nn.Module, suspect: ShardRange | None, *, in_step: bool
    ) -> tuple[str, ...]:
        """As `find_coupling`, in a later step, of shards that look new on this worker; a collective."""
        every = [self._ranges(step, rank, self._limit) for rank in range(len(step.assignment.shards_of_rank))]
        most = max((len(shards.sizes) for of_rank in every for shards in of_rank), default=1)
        if most == 1:
            return ()
        own = suspect or next(iter(every[step.assignment.rank]), None)
        reason = ""
        if in_step:
            reason = self._compare(step, module, own, 1 + most)
        elif own is not None:
            reason = self._compare_what_fits(step, module, own)
        return self.functions.agree_on_coupling(step.loss_name, reason)

    def shows_new_values(self, step: StepInput, shards: ShardRange, samples: Any) -> bool:
        """Whether samples that are to go through the model together show what no step has shown before."""
        return len(shards.sizes) > 1 and self._examines and self._novelties[step.loss_name].learn(samples)

    def shows_new_operations(self, step: StepInput, shards: ShardRange, loss: ShardLoss) -> bool:
        """Whether the loss of shards that went through the model together was computed as in no step before."""
        return len(shards.sizes) > 1 and self._examines and self._novelties[step.loss_name].learn_graph(loss.mean)

    def _couples_now(self, step: StepInput, module: nn.Module, shards: ShardRange) -> bool:
        """Examine shards that look new; whether shards have to go one by one from now on. Other workers see by
        themselves whether theirs have to."""
        reason = self._compare_what_fits(step, module, shards)
        if reason:
            self.functions.couples[step.loss_name] = True
            self.functions.found_late = "" if reason == DRAWS else reason
        return bool(reason)

    def _compare_what_fits(self, step: StepInput, module: nn.Module, shards: ShardRange) -> str:
        """Examine as many of these shards as memory has room for."""
        while len(shards.sizes) > 1:
            try:
                return self._compare(step, module, shards)
            except (RuntimeError, MemoryError) as problem:
                if self._micro_batch is None or not self._micro_batch.is_automatic or not is_out_of_memory(problem):
                    raise
            free_memory(self._device)
            shards = self._range(step, shards.first_shard, sum(shards.sizes[: len(shards.sizes) // 2]))
        return ""

    def _compare(self, step: StepInput, module: nn.Module, shards: ShardRange | None, num_passes: int = 0) -> str:
        """Examine shards of this worker, which may be none, in at least so many passes."""
        found: list[ShardLoss] = []
        draws = has_aux_loss = False
        passes: list[ShardRange | None] = [None]
        if shards is not None:
            passes = [shards, *(self._range(step, one, 1) for one in range(shards.first_shard, shards.stop_shard))]
        passes += [passes[-1]] * (num_passes - len(passes))
        for one in passes:
            with self._leaving_no_trace(step):
                if one is None:
                    with standing_in(self._model), step.companions.standing_in():
                        step.loss_of(module, step.batch.cut(0, 1))
                    continue
                self.enter(step, one)
                before = generator_states(self._device)
                with watching_outputs(module) as outputs:
                    found.append(self.read(step, module, one, self.samples(step, one)))
                draws |= before != generator_states(self._device)
                draws |= self.buffers.changed_now() is not None or step.companions.have_changed()
                has_aux_loss |= returns_aux_loss(outputs)
        self.norm.end_pass()
        if draws:
            return DRAWS
        if shards is None or len(shards.sizes) == 1:
            return ""
        if has_aux_loss:
            return AUX_LOSS
        self._novelties[step.loss_name].learn(self.samples(step, shards))
        with step.within():
            most = tolerance(self._model, self._device, found[0].mean.dtype)
        return describe_coupling(found[0], found[1 : 1 + len(shards.sizes)], most)

    @contextmanager
    def _leaving_no_trace(self, step: StepInput) -> Iterator[None]:
        with (
            self.buffers.untouched(),
            leaving_no_trace(self._model, self._device),
            self.norm.forgotten_after_error(),
            self.norm.backward(),
            step.companions.backward(),
        ):
            yield

    def _must_not_draw(self, shards: ShardRange) -> bool:
        if self._refusal or self.functions.draws is not False:
            return bool(self._refusal)
        return self._is_concurrent or (self._may_split and len(shards.sizes) > 1)

    # --- passes ---

    def losses(self, step: StepInput, module: nn.Module) -> Iterator[tuple[ShardRange, ShardLoss]]:
        """A forward pass over each range of this worker's shards; `backward` has to follow before the next one.

        Raises:
            StartOverError: caught by `starting_over`.
        """
        next_shard, stop = step.assignment.own
        while next_shard < stop:
            shards = self._range(step, next_shard, self._most_samples(step))
            samples = self.samples(step, shards)
            if self.shows_new_values(step, shards, samples) and self._couples_now(step, module, shards):
                continue  # with the first of them alone
            is_wrong_if_drawn = self._must_not_draw(shards)
            loss, drew = self.compute_loss(step, module, shards, samples)
            if drew and is_wrong_if_drawn:
                raise StartOverError(self.go_one_by_one)
            if self.functions.draws is None:
                self.functions.draws = drew
            if self.shows_new_operations(step, shards, loss):
                raise StartOverError(partial(self._couples_now, step, module, shards))
            yield shards, loss
            next_shard = shards.stop_shard

    def compute_loss(
        self, step: StepInput, module: nn.Module, shards: ShardRange, samples: Any
    ) -> tuple[ShardLoss, bool]:
        """The loss of some shards' samples, and whether they must go one by one, if that was not known before: they
        drew random numbers, or changed buffers."""
        self.enter(step, shards)
        self.buffers.begin_pass()
        is_watched = self.functions.draws is None or self._must_not_draw(shards)
        before = generator_states(self._device) if is_watched else None
        loss = self.read(step, module, shards, samples)
        changed = (self.buffers.end_forward(shards) | step.companions.have_changed()) and not self._refusal
        return loss, before is not None and (changed or before != generator_states(self._device))

    def samples(self, step: StepInput, shards: ShardRange) -> Any:
        """The content of the batch for some shards."""
        if shards.are_interleaved:
            return step.batch.interleaved(shards.start, shards.stop, len(shards.sizes), self._turns)
        return step.batch.cut(shards.start, shards.stop)

    def read(self, step: StepInput, module: nn.Module, shards: ShardRange, samples: Any) -> ShardLoss:
        """Call the loss function with some shards' samples, and see what it returned."""
        watch = self.functions.may_be_weighted(step.loss_name)
        with watching_outputs(module) if watch else nullcontext() as outputs:
            returned = step.loss_of(module, samples)
        loss = read_loss(returned, shards.weight, step.assignment.global_size, self.like)
        self.functions.has_returned(step.loss_name, loss.layout)
        if outputs is not None:
            ignore_unless(counts(loss), outputs)
        return loss

    def enter(self, step: StepInput, shards: ShardRange) -> None:
        """Set which shards are in the model, and seed the generators for them if numbers may be drawn."""
        self.num_shards_in_pass = len(shards.sizes)
        self.norm.begin_pass(shards)
        step.companions.enter(shards)
        if not self._must_not_draw(shards):
            step.seed_shard(shards.first_shard)

    def backward(self, step: StepInput, loss: ShardLoss) -> None:
        """Add the gradient of some shards' loss, times their weight, to `.grad`."""
        with self.norm.backward(), step.companions.backward():
            step.scale(loss.weighted).backward()
        self.norm.end_pass()

    @contextmanager
    def stand_in(self, step: StepInput, module: nn.Module) -> Iterator[Tensor]:
        """The loss of one sample that counts for nothing, for a worker that has to go through collectives with others.

        Its backward pass belongs inside.
        """
        self.num_shards_in_pass = 1
        with standing_in(self._model), step.companions.standing_in():
            yield step.scale(self.loss_of_nothing(step, module))

    def loss_of_nothing(self, step: StepInput, module: nn.Module) -> Tensor:
        """The loss of the first sample times 0, through which nothing flows back."""
        with watching_outputs(module) as outputs:
            loss = read_loss(step.loss_of(module, step.batch.cut(0, 1)), 0.0, 1, self.like).mean
        ignore_unless(False, outputs)
        return loss * 0.0

    # --- a step that starts over ---

    def starting_over(self, attempt: Callable[[], Result]) -> Result:
        """Run `attempt`, the passes of a step; repeated where it raises `StartOverError`.

        Nothing is left of a failed attempt: no gradients, no norm statistics, no changes of buffers.
        """
        drew_before = self.functions.draws
        self.buffers.begin_step()
        while True:
            try:
                with self.norm.forgotten_after_error():
                    return attempt()
            except StartOverError as problem:
                prepare = problem.prepare
            self.buffers.start_over()
            self.norm.reset()
            for parameter in self._model.parameters():
                parameter.grad = None
            self.functions.draws = drew_before  # the first pass of a run is one shard, in each attempt
            prepare()

    def go_one_by_one(self) -> None:
        """Have shards that drew random numbers together go one by one from now on."""
        if self._refusal:
            raise ModelError(self._refusal)
        self.functions.draws = True

    def halve(self, assignment: Assignment) -> None:
        """Have half as many shards go together from now on, because memory ran out."""
        assert self._micro_batch is not None
        free_memory(self._device)
        self._micro_batch.halve(assignment)


def _has_channels_last(model: nn.Module) -> bool:
    """Whether some weight lies in memory with its channels last, as what its layer returns then does."""
    weights = (one for one in model.parameters() if one.dim() == 4)
    return any(one.is_contiguous(memory_format=torch.channels_last) and not one.is_contiguous() for one in weights)
