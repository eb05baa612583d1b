"""Examines virtual shards that are to go through the model together: does each get what it would get alone?

The shards go through the model one by one and then together, without a trace, and without gradients unless the loss
function computes some itself, or there may be code in the backward pass to notice (`backward_code`). Their loss has to
be the mean of their own losses (`coupling`), at the model's weights and beside them (`nearby_weights`), and each has to
draw its own random numbers (`shard_draws`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from paceline.parallel.assignment import ShardRange
from paceline.parallel.engine import StepInput
from paceline.parallel.loss.coupling import (
    AUX_LOSS,
    are_zero,
    check_repeatable,
    describe_coupling,
    returns_aux_loss,
    tolerance,
)
from paceline.parallel.loss.loss_functions import DRAWS
from paceline.parallel.loss.nearby_weights import nearby_weights
from paceline.parallel.losses import ShardLoss, watching_outputs
from paceline.parallel.micro_batch import is_out_of_memory
from paceline.parallel.random_numbers.shard_draws import (
    OneNumber,
    Pattern,
    SeedOfShard,
    ShardDraws,
    SharedPass,
    SingleShardRehearsal,
)
from paceline.parallel.shards.backward_code import (
    COUPLES_CONSTANTS,
    MAY_COUPLE_GRADIENTS,
    BackwardCode,
    Gradient,
    are_coupled,
    describe_gradients,
)
from paceline.parallel.shards.calls_without_trace import loss_of_stand_in, with_gradients_if_needed, without_trace
from paceline.parallel.shards.held_constants import HeldConstants

if TYPE_CHECKING:
    from paceline.parallel.kept.snapshot import KeptSnapshot
    from paceline.parallel.shards.passes import Passes

Rehearsal = SingleShardRehearsal | SharedPass | OneNumber

_COARSE = 1e-3
"""From this tolerance on, a wrong mask may by chance leave the loss as it is: then three rehearsals have to agree."""


@dataclass(frozen=True)
class Examined:
    """What an examination has shown."""

    reason: str = ""
    """Why the shards have to go one by one: a sentence, `DRAWS`, or nothing."""
    pattern: Pattern = ()
    """What they draw together, each its own."""


def examine(
    passes: Passes,
    step: StepInput,
    module: nn.Module,
    shards: ShardRange | None,
    draws: ShardDraws | None,
    *,
    most_shards: int = 0,
) -> Examined:
    """Examine shards of this worker, which may be none. Afterwards the loss function and the models keep what they kept
    before.

    Args:
        draws: None if shards that draw random numbers have to go one by one in any case.
        most_shards: if given, this is a collective: every worker makes as many passes as one with so many shards.
    """
    with step.kept.unchanged() as before:
        return with_gradients_if_needed(
            passes, step, lambda: _examine(passes, step, module, shards, draws, most_shards, before)
        )


def _examine(
    passes: Passes,
    step: StepInput,
    module: nn.Module,
    shards: ShardRange | None,
    draws: ShardDraws | None,
    most_shards: int,
    before: KeptSnapshot,
) -> Examined:
    is_coarse = _tolerance(passes, step, torch.float32) >= _COARSE
    if shards is not None and len(shards.sizes) > 1:
        # Shards that differ as much as they can, the first two most of all: with as many valid tokens in each by
        # chance, a mean over tokens would be the mean of theirs.
        step = replace(step, batch=step.batch.sorted_by_values(shards.start, shards.stop, shards.sizes[0]))
    all_found = []
    examinations = [_Examination(passes, step, module, draws, number) for number in range(3 if is_coarse else 1)]
    for examination in examinations:
        if shards is None:
            _pass_as_others(passes, step, module, most_shards)
            all_found.append(Examined())
        else:
            before.restore()
            all_found.append(examination.run(shards, most_shards, before))
        if not most_shards and (all_found[-1].reason or not all_found[-1].pattern):
            break
    first = None if shards is None else passes.single(step, shards.first_shard)
    other = None if shards is None else passes.single(step, min(shards.first_shard + 1, shards.stop_shard - 1))
    examinations[0].check_next_step(first, other, before, is_collective=most_shards > 0)
    return next((found for found in all_found if found.reason), all_found[-1])


def _pass_as_others(passes: Passes, step: StepInput, module: nn.Module, most_shards: int) -> None:
    """Make the passes of `_Examination.run` for a worker without samples: others gather parameters in theirs."""

    def stand_in(times: int) -> None:
        for _ in range(times):
            loss_of_stand_in(passes, step, module)

    stand_in(2 + most_shards)
    if most_shards > 1:
        with nearby_weights(passes.model):
            stand_in(3)
        if passes.functions.is_so_anywhere(False):
            stand_in(3)
            with nearby_weights(passes.model):
                stand_in(3)


class _Examination:
    """One comparison of shards that go together and one by one."""

    def __init__(
        self, passes: Passes, step: StepInput, module: nn.Module, draws: ShardDraws | None, number: int
    ) -> None:
        self._passes = passes
        self._step = step
        self._module = module
        self._draws = draws
        self._seed_of: SeedOfShard = lambda shard: step.shard_seed(shard) + number
        self._draws_alone = False
        """Whether it was seen that shards cannot draw together."""
        self._has_aux_loss = False
        self.made: list[str] = []
        """The names of what the first call has made."""

    def run(self, shards: ShardRange, most_shards: int, before: KeptSnapshot) -> Examined:
        """
        Args:
            before: what the loss function and the models keep.
        """
        is_collective = most_shards > 0
        singles = [self._passes.single(self._step, one) for one in range(shards.first_shard, shards.stop_shard)]
        rehearsals = [self._single_rehearsal(one) for one in singles]
        losses = [self._loss(singles[0], rehearsals[0])]
        self.made = before.made()
        if self.made:  # other samples make them now, and then the first ones have to give the same loss
            before.restore()
        losses += [self._loss(one, rehearsal) for one, rehearsal in zip(singles[1:], rehearsals[1:], strict=True)]
        together = self._shared_rehearsal(shards, rehearsals)
        loss = self._loss(shards, together or self._single_rehearsal(shards))
        code, constants = BackwardCode(self._passes.model), HeldConstants()
        # With sharding, a forward pass with gradients has to be followed by its backward pass.
        again = self._loss(singles[0], self._single_rehearsal(singles[0]), constants if is_collective else code)
        for _ in range(most_shards - len(singles)):
            self._loss(singles[-1], self._single_rehearsal(singles[-1]))
        pattern: Pattern = ()
        if together is not None:
            pattern = together.pattern
            self._draws_alone |= not together.is_known
            self._draws_alone |= any(len(one.draws) != len(pattern) for one in rehearsals if one is not None)
        if pattern and not self._draws_alone:
            self._draws_alone = self._answers_decide(singles[0], rehearsals[0], is_collective)
        two = self._passes.first_of(self._step, shards, 2)
        nearby = self._losses_nearby(two, most_shards)
        with_constants: list[ShardLoss] = []
        if most_shards > 1 and self._passes.functions.is_so_anywhere(bool(constants.values)):
            with_constants = self._losses_with_constants(two)
        self._passes.norm.end_pass()
        most = _tolerance(self._passes, self._step, loss.mean.dtype)
        if self.made or not self._draws_alone:
            check_repeatable(losses[0], again, most, self.made)
        if self._draws_alone:
            return Examined(self._coupling_besides_draws(shards, singles, is_collective) or DRAWS)
        if len(singles) == 1:
            return Examined()
        if self._has_aux_loss:
            return Examined(AUX_LOSS)
        coupling = describe_coupling(loss, losses, most)
        if nearby and (not coupling or are_zero([loss, *losses])):
            coupling = describe_coupling(nearby[-1], nearby[:-1], most)
        if with_constants and not coupling and describe_coupling(with_constants[-1], with_constants[:-1], most):
            coupling = COUPLES_CONSTANTS
        if code.is_found and not coupling and is_collective:
            coupling = MAY_COUPLE_GRADIENTS
        elif (code.is_found or code.has_constants) and not coupling:
            coupling = describe_gradients(code, self._couples_gradients(two, singles[:2], rehearsals[:2], most))
        if pattern and (coupling or not _are_finite([loss, *losses])):
            return Examined(self._coupling_besides_draws(shards, singles, is_collective) or DRAWS)
        return Examined(coupling, pattern)

    def _losses_nearby(self, shards: ShardRange, most_shards: int) -> list[ShardLoss]:
        """`_losses_of_two` at other weights; none where the loss is not defined there, or there is one shard.

        Args:
            shards: two, which show as much as more; or one, where a worker has no others.
        """
        if max(len(shards.sizes), most_shards) == 1:
            return []
        with nearby_weights(self._passes.model):
            try:
                return self._losses_of_two(shards)
            except Exception as problem:
                if most_shards or is_out_of_memory(problem):
                    raise
                return []

    def _losses_with_constants(self, shards: ShardRange) -> list[ShardLoss]:
        """`_losses_of_two` at other weights, with the constants of the model's own weights."""
        constants = [HeldConstants() for _ in range(3)]
        self._losses_of_two(shards, constants)
        with nearby_weights(self._passes.model):
            return self._losses_of_two(shards, [one.held() for one in constants])

    def _losses_of_two(
        self, shards: ShardRange, watches: Sequence[HeldConstants | None] = (None,) * 3
    ) -> list[ShardLoss]:
        """The losses of two single shards and of both; `watches` are contexts for the three calls."""
        first, last = (self._passes.single(self._step, one) for one in (shards.first_shard, shards.stop_shard - 1))
        rehearsals = [self._single_rehearsal(one) for one in (first, last)]
        losses = [self._loss(first, rehearsals[0], watches[0]), self._loss(last, rehearsals[1], watches[1])]
        together = self._shared_rehearsal(shards, rehearsals) or self._single_rehearsal(shards)
        return [*losses, self._loss(shards, together, watches[2])]

    def check_next_step(
        self, first: ShardRange | None, other: ShardRange | None, before: KeptSnapshot, *, is_collective: bool
    ) -> None:
        """Check that the loss of later steps does not follow from what every call of the first step makes anew, as it
        does by a counter that is 0 in all of them.

        Args:
            first, other: shards of this worker with other samples; None: a stand-in.
            is_collective: whether every worker makes as many passes.

        Raises:
            ModelError: it does.
        """
        has_made = bool(self.made)
        if not (self._passes.functions.is_so_anywhere(has_made) if is_collective else has_made):
            return
        losses = []
        for maker in (first, other):
            before.restore()
            self._loss_of_one(maker)
            of_loss = self._passes.functions.counters.get(self._step.loss_name)
            with (
                self._passes.buffers.counters.as_in_next_step(),
                of_loss.as_in_next_step() if of_loss else nullcontext(),
            ):
                losses.append(self._loss_of_one(first))
        if first is not None:
            most = _tolerance(self._passes, self._step, losses[0].mean.dtype)
            check_repeatable(losses[0], losses[1], most, self.made)

    def _loss_of_one(self, shard: ShardRange | None) -> ShardLoss:
        if shard is None:
            return loss_of_stand_in(self._passes, self._step, self._module)
        return self._loss(shard, self._single_rehearsal(shard))

    def _single_rehearsal(self, shard: ShardRange, *, inverts_answers: bool = False) -> SingleShardRehearsal | None:
        if self._draws is None:
            return None
        return self._draws.single_rehearsal(shard, self._seed_of, inverts_answers=inverts_answers)

    def _shared_rehearsal(
        self, shards: ShardRange, singles: Sequence[SingleShardRehearsal | None]
    ) -> SharedPass | None:
        if self._draws is None or len(shards.sizes) == 1:
            return None
        return self._draws.shared_rehearsal(shards, self._seed_of, [one for one in singles if one is not None])

    def _loss(
        self, shards: ShardRange, rehearsal: Rehearsal | None, watch: AbstractContextManager[Any] | None = None
    ) -> ShardLoss:
        """
        Args:
            watch: a context for the call; with a `BackwardCode` it is made with gradients.
        """
        code = watch if isinstance(watch, BackwardCode) else None
        with self._loss_in(watch or nullcontext(), shards, rehearsal, with_gradients=code is not None) as loss:
            if code is not None:
                code.look_at(loss)
            return loss.detached()

    @contextmanager
    def _loss_in(
        self,
        watch: AbstractContextManager[Any],
        shards: ShardRange,
        rehearsal: Rehearsal | None,
        *,
        with_gradients: bool,
    ) -> Iterator[ShardLoss]:
        """A context with the loss, which can be differentiated in it if asked for; `watch` is that of the call."""
        passes, step = self._passes, self._step
        with without_trace(passes, step, with_gradients=with_gradients):
            passes.enter(step, shards)
            before = passes.generator_states(step)
            with watching_outputs(self._module) as outputs:
                samples = passes.samples(step, shards, copies=True)
                with watch:
                    loss = passes.read(step, self._module, shards, samples, rehearsal, are_copies=True)
            self._draws_alone |= before != passes.generator_states(step)
            self._draws_alone |= passes.buffers.changed_now() is not None or step.companions.have_changed()
            self._draws_alone |= rehearsal is not None and not rehearsal.is_possible
            self._has_aux_loss |= returns_aux_loss(outputs)
            yield loss

    def _couples_gradients(
        self,
        shards: ShardRange,
        singles: Sequence[ShardRange],
        rehearsals: Sequence[SingleShardRehearsal | None],
        most: float,
    ) -> bool | None:
        """Whether the gradient of shards together is not the sum of theirs; None where torch computes none.

        Args:
            most: the relative difference of two losses that is put down to rounding.
        """
        trained = [parameter for parameter in self._passes.model.parameters() if parameter.requires_grad]
        found = []
        for one in (shards, *singles):
            rehearsal = self._single_rehearsal(one) if one in singles else self._shared_rehearsal(shards, rehearsals)
            try:
                with self._loss_in(nullcontext(), one, rehearsal, with_gradients=True) as loss:
                    found.append(Gradient.of(loss, trained))
            except RuntimeError as problem:  # torch refuses so with checkpointing that is reentrant
                if is_out_of_memory(problem):
                    raise
                return None
        return are_coupled(found[0], found[1:], most)

    def _coupling_besides_draws(self, shards: ShardRange, singles: Sequence[ShardRange], is_collective: bool) -> str:
        """A sentence if the loss couples samples, whatever they draw; unknown where all workers make equally many
        passes."""
        if self._draws is None or is_collective or len(singles) == 1:
            return ""
        ranges = shards, *singles
        numbers = [self._draws.one_number(singles[0]) for _ in ranges]
        try:
            together, *alone = [self._loss(one, number) for one, number in zip(ranges, numbers, strict=True)]
        except Exception as problem:
            if is_out_of_memory(problem):
                raise
            return ""
        if not all(one.is_possible for one in numbers):
            return ""
        return describe_coupling(together, alone, _tolerance(self._passes, self._step, together.mean.dtype))

    def _answers_decide(self, shard: ShardRange, rehearsal: SingleShardRehearsal | None, is_collective: bool) -> bool:
        """Whether what a shard draws depends on its values: the model asks for a truth value, and with the other answer
        it draws otherwise."""
        if rehearsal is None or not rehearsal.depends_on_answers:
            return False
        if is_collective:  # with another answer it may call other collectives
            return True
        inverted = self._single_rehearsal(shard, inverts_answers=True)
        assert inverted is not None
        try:
            self._loss(shard, inverted)
        except Exception as problem:
            if is_out_of_memory(problem):
                raise
            return True
        return inverted.draws != rehearsal.draws


def _tolerance(passes: Passes, step: StepInput, dtype: torch.dtype) -> float:
    with step.within():
        return tolerance(passes.model, passes.device, dtype)


def _are_finite(losses: Sequence[ShardLoss]) -> bool:
    """Whether losses can be compared at all."""
    return all(math.isfinite(float(one.mean)) and float(one.weight) > 0 for one in losses)


def check_repeatable_alone(passes: Passes, step: StepInput, module: nn.Module, *, is_collective: bool) -> None:
    """Do what `_Examination.run` does for shards that never go together, once for each loss function.

    Args:
        is_collective: whether every worker makes as many passes, with samples or without.

    Raises:
        ModelError: the loss of a shard follows from what earlier calls of the loss function left behind.
    """
    if step.loss_name in passes.functions.repeatable or not (step.assignment.sizes or is_collective):
        return
    passes.functions.repeatable.add(step.loss_name)

    def examine(before: KeptSnapshot) -> None:
        examination = _Examination(passes, step, module, None, 0)
        first_shard, stop = step.assignment.own
        first = passes.single(step, first_shard) if stop > first_shard else None
        # Something that leaves behind something else than `first` does.
        other = passes.single(step, stop - 1) if stop - first_shard > 1 else None
        before.restore()
        loss = examination._loss_of_one(first)
        if first is not None:
            examination.made = before.made()
        before.restore()
        examination._loss_of_one(other)
        again = examination._loss_of_one(first)
        if first is not None:
            check_repeatable(loss, again, _tolerance(passes, step, loss.mean.dtype), examination.made)
        examination.check_next_step(first, other, before, is_collective=is_collective)

    with step.kept.unchanged() as before:
        with_gradients_if_needed(passes, step, lambda: examine(before))
