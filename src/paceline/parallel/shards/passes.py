"""A worker's virtual shards through the model: which go together, with which weights, seeds and norm statistics.

Several shards go through the model together where that changes nothing. A dropout mask belongs to its shard, so where
the forward pass draws random numbers each shard draws its own (`shard_draws`), and where that is not possible shards go
one by one, each with its own seed. A model may begin to draw at any step (a dropout rate that rises from 0), so every
pass over several shards is watched: if it drew in a way that was not examined, the step starts over.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from paceline.containers import copied, tensors, versions
from paceline.errors import ModelError
from paceline.parallel.assignment import Assignment, ShardRange
from paceline.parallel.batch_norm.norm import NormStatistics, can_mix_nothing, has_other_norms, standing_in
from paceline.parallel.engine import StepInput, statistics_dtype
from paceline.parallel.kept.forward_buffers import ForwardBuffers
from paceline.parallel.loss.loss_functions import DRAWS, LossFunctions
from paceline.parallel.loss.novelty import MOST_LOOKS, Novelty
from paceline.parallel.loss.parameter_watch import ParameterWatch
from paceline.parallel.losses import ShardLoss, counts, ignore_unless, read_loss, watching_outputs
from paceline.parallel.memory_order import has_channels_last
from paceline.parallel.micro_batch import MicroBatchLimit, free_memory, is_out_of_memory
from paceline.parallel.random_numbers.generators import generator_states, seed_generators
from paceline.parallel.random_numbers.shard_draws import ShardDraws
from paceline.parallel.shards.examination import check_repeatable_alone, examine
from paceline.parallel.shards.outcomes import ForwardPass, StartOverError

Result = TypeVar("Result")

_MODEL_DRAWS = "this model draws random numbers (dropout), which belong to one shard each"
_LOSS_COUPLES = (
    "the loss of several shards is not the mean of their own losses, as that of a contrastive loss, or of a mean over "
    "valid tokens that is not returned as paceline.Mean"
)


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
            refusal: the error message for what would need shards to go one by one, where they never do; `{}` stands
                for the reason.
            is_concurrent: whether other devices use the same generators at the same time, until numbers are drawn.
        """
        self.norm = NormStatistics(model)
        self.buffers = ForwardBuffers(model, self.norm)
        self.functions = functions
        self._watch_parameters = ParameterWatch(model, shards_are_alone=one_by_one)
        self.like = torch.zeros((), dtype=statistics_dtype(model), device=device)
        """A tensor of the dtype, and on the device, in which losses are added."""
        self.model = model
        self.device = device
        self._micro_batch = micro_batch
        self.num_shards_in_pass = 0
        """How many shards went through the model together last."""
        self._may_split = may_split
        self._one_by_one = one_by_one
        # Where batch norm mixes the shards of a pass, their losses differ from those of single shards; synchronised
        # layers can do without that (`mixing_nothing`).
        mixes = has_other_norms(model) and not (refusal and can_mix_nothing(model))
        self._examines = not one_by_one and not mixes and (may_split or bool(refusal))
        self._may_share_draws = self._examines and not refusal and not is_concurrent
        """Whether shards that draw random numbers may go together."""
        self._draws: defaultdict[str, ShardDraws] = defaultdict(partial(ShardDraws, device))
        self._num_looks_at_draws = 0
        self._novelties: defaultdict[str, Novelty] = defaultdict(Novelty)
        self._refusal = refusal
        self._last_looked_new = False
        """Whether the last pass could not be examined, though its loss was computed as in no step before."""
        self._is_concurrent = is_concurrent
        # Shards that take turns are one batch of more channels, which in this format would be a copy to begin with. On
        # a CPU a kernel for each shard costs little.
        self._norms_rows = device.type == "cpu" and has_channels_last(model)

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
        """The most samples of a pass: 1, less than a shard, where shards have to go one by one, as far as is known."""
        couples = self._examines and self.functions.couples.get(step.loss_name) is not False
        draws = self.functions.draws
        draws_alone = draws is None or (draws and not self._may_share_draws)
        if self._one_by_one or (self._may_split and (couples or draws_alone)):
            return 1
        return self._limit

    def single(self, step: StepInput, shard: int) -> ShardRange:
        """One shard of this worker."""
        return self._range(step, shard, 1)

    def first_of(self, step: StepInput, shards: ShardRange, num_shards: int) -> ShardRange:
        """The first `num_shards` of these shards, or all of fewer."""
        return self._range(step, shards.first_shard, sum(shards.sizes[:num_shards]))

    @property
    def _limit(self) -> int | None:
        return None if self._micro_batch is None else self._micro_batch.size

    # --- a loss that couples samples ---

    def find_coupling(self, step: StepInput, module: nn.Module, *, in_step: bool = False) -> tuple[str, ...]:
        """Find out whether shards may go through the model together, in the first step of a loss function in which a
        worker has two that could, and in some that follow: then a collective. Returns a sentence if they must not.

        The first shards of each worker are computed together and one by one, without gradients and without a trace.

        Args:
            in_step: whether all workers have to make equally many passes.
        """
        if self._one_by_one:
            check_repeatable_alone(self, step, module, is_collective=in_step)
        if not self._examines or not self.functions.begin_step(step.loss_name):
            return ()
        num_shards = 2 if step.loss_name in self.functions.couples else 0  # two show as much as more, in less time
        return self.find_coupling_again(step, module, None, in_step=in_step, num_shards=num_shards)

    def find_coupling_again(
        self, step: StepInput, module: nn.Module, suspect: ShardRange | None, *, in_step: bool, num_shards: int = 0
    ) -> tuple[str, ...]:
        """As `find_coupling`, in a later step, of shards that look new on this worker; a collective. Compares the first
        `num_shards` of those that go together, or all of them (0)."""
        every = [self._ranges(step, rank, self._limit) for rank in range(len(step.assignment.shards_of_rank))]
        most = max((len(shards.sizes) for of_rank in every for shards in of_rank), default=1)
        if most == 1:
            check_repeatable_alone(self, step, module, is_collective=in_step)
            return ()
        own = suspect or next(iter(every[step.assignment.rank]), None)
        if num_shards and own is not None:
            own = self.first_of(step, own, num_shards)
        reason = DRAWS if self.functions.couples.get(step.loss_name) else ""  # maybe known to this worker alone
        if not reason and in_step:
            reason = self._examine(step, module, own, min(most, num_shards or most))
        elif not reason and own is not None:
            reason = self._examine_what_fits(step, module, own)
        sentences = self.functions.agree_on_coupling(step.loss_name, reason)
        if sentences and self._refusal:
            raise ModelError(self._refusal.format(_LOSS_COUPLES))
        return sentences

    def shows_new_values(self, step: StepInput, shards: ShardRange, samples: Any) -> bool:
        """Whether samples that are to go through the model together show what no step has shown before."""
        return len(shards.sizes) > 1 and self._examines and self._novelties[step.loss_name].learn(samples)

    def shows_new_operations(self, step: StepInput, shards: ShardRange, loss: ShardLoss) -> bool:
        """Whether the loss of shards that went through the model together was computed as in no step before."""
        return len(shards.sizes) > 1 and self._examines and self._novelties[step.loss_name].learn_graph(loss.mean)

    def examine_draws(self, step: StepInput, module: nn.Module, shards: ShardRange) -> None:
        """Examine shards that drew random numbers in a new way."""
        if self.expect_draws(step.loss_name):
            self._couples_now(step, module, shards)

    def expect_draws(self, loss_name: str) -> bool:
        """Expect random numbers from now on; whether it is worth while to examine once more how they are drawn."""
        self.functions.draws = True
        self._num_looks_at_draws += 1
        if self._num_looks_at_draws > MOST_LOOKS:
            self.go_one_by_one(loss_name)
        return self._num_looks_at_draws <= MOST_LOOKS

    def _couples_now(self, step: StepInput, module: nn.Module, shards: ShardRange) -> bool:
        """Examine shards that look new; whether shards have to go one by one from now on. Other workers see by
        themselves whether theirs have to."""
        reason = self._examine_what_fits(step, module, shards)
        if self._refusal and reason not in ("", DRAWS):
            raise ModelError(self._refusal.format(_LOSS_COUPLES))
        if reason:
            self.functions.couples[step.loss_name] = True
            self.functions.found_late = "" if reason == DRAWS else reason
        return bool(reason)

    def _examine(self, step: StepInput, module: nn.Module, shards: ShardRange | None, most_shards: int = 0) -> str:
        """Why these shards have to go one by one, if they have to; a collective if `most_shards` is given."""
        draws = self._draws[step.loss_name] if self._may_share_draws else None
        found = examine(self, step, module, shards, draws, most_shards=most_shards)
        if not found.reason and shards is not None and len(shards.sizes) > 1:
            self._novelties[step.loss_name].learn(self.samples(step, shards))
            if draws is not None and found.pattern:
                draws.learn(found.pattern)
        return found.reason

    def _examine_what_fits(self, step: StepInput, module: nn.Module, shards: ShardRange) -> str:
        """Call `_examine` on as many of these shards as memory has room for."""
        while len(shards.sizes) > 1:
            try:
                return self._examine(step, module, shards)
            except (RuntimeError, MemoryError) as problem:
                if self._micro_batch is None or not self._micro_batch.is_automatic or not is_out_of_memory(problem):
                    raise
            free_memory(self.device)
            shards = self.first_of(step, shards, len(shards.sizes) // 2)
        return ""

    def _must_not_draw(self, shards: ShardRange) -> bool:
        if self._refusal or self.functions.draws is not False:
            return bool(self._refusal)
        return self._is_concurrent or (self._may_split and len(shards.sizes) > 1)

    def _share_draws(self, shards: ShardRange) -> bool:
        """Whether several shards draw random numbers in one pass, each its own."""
        return len(shards.sizes) > 1 and self._may_share_draws and self.functions.draws is True

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
            looks_new = self.shows_new_values(step, shards, samples) or self._last_looked_new
            self._last_looked_new = False
            if looks_new and self._couples_now(step, module, shards):
                continue  # with the first of them alone
            is_wrong_if_drawn = self._must_not_draw(shards) or self._share_draws(shards)
            made = self.compute_loss(step, module, shards, samples)
            if made.is_unexamined:
                raise StartOverError(partial(self.examine_draws, step, module, shards))
            if made.has_drawn and is_wrong_if_drawn:
                raise StartOverError(partial(self.go_one_by_one, step.loss_name))
            if self.functions.draws is None:
                self.functions.draws = made.has_drawn
            if self.shows_new_operations(step, shards, made.loss):
                if self._may_split:
                    raise StartOverError(partial(self._couples_now, step, module, shards))
                # A pass whose layers wait for other workers cannot be made again by one of them alone.
                self._last_looked_new = True
            yield shards, made.loss
            next_shard = shards.stop_shard

    def compute_loss(self, step: StepInput, module: nn.Module, shards: ShardRange, samples: Any) -> ForwardPass:
        """A forward pass over some shards' samples."""
        self.enter(step, shards)
        self.buffers.begin_pass()
        must_not_draw = self._must_not_draw(shards)
        draws = self._draws[step.loss_name]
        shared = draws.shared_pass(shards, step.shard_seed) if self._share_draws(shards) else None
        is_watched = self.functions.draws is None or must_not_draw or shared is not None
        before = self.generator_states(step) if is_watched else None
        loss = self.read(step, module, shards, samples, shared)
        changed = (self.buffers.end_forward(shards) | step.companions.have_changed()) and not self._refusal
        if before is None:
            return ForwardPass(loss)
        has_drawn = before != self.generator_states(step)
        if shared is None:
            is_unexamined = has_drawn and must_not_draw and self._may_share_draws
        else:
            is_unexamined = shared.is_possible and (has_drawn or not draws.knows(shared))
            has_drawn |= not shared.is_possible
        if is_unexamined and not changed:
            return ForwardPass(loss, is_unexamined=True)
        return ForwardPass(loss, has_drawn or changed)

    def samples(self, step: StepInput, shards: ShardRange, *, copies: bool = False) -> Any:
        """The content of the batch for some shards.

        Args:
            copies: whether it has to be a copy. It is one in any case if the loss function may change it in place,
                since it may be needed again in a step that starts over.
        """
        if shards.are_interleaved:
            return step.batch.interleaved(shards.start, shards.stop, len(shards.sizes))
        content = step.batch.cut(shards.start, shards.stop)
        return copied(content) if copies or self.functions.changes_batch.get(step.loss_name, True) else content

    def read(
        self,
        step: StepInput,
        module: nn.Module,
        shards: ShardRange,
        samples: Any,
        within: AbstractContextManager[Any] | None = None,
        *,
        are_copies: bool = False,
    ) -> ShardLoss:
        """Call the loss function with some shards' samples, and see what it returned.

        Args:
            within: a context in which it is called.
            are_copies: whether the samples are copies in any case.
        """
        watch = self.functions.may_be_weighted(step.loss_name)
        before = versions(tensors(samples))
        with (
            self._watch_parameters(is_examination=are_copies, step=step.number),
            step.companions.watched(is_examination=are_copies, step=step.number)
            if step.companions.models
            else nullcontext(),
            watching_outputs(module) if watch else nullcontext() as outputs,
            within or nullcontext(),
        ):
            returned = step.loss_of(module, samples)
        changes = before != versions(tensors(samples))
        self.functions.has_used_samples(step.loss_name, changes=changes, are_copies=are_copies)
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
            seed = step.shard_seed(shards.first_shard)
            seed_generators(seed, self.device)
            step.generators.seed(seed)

    def generator_states(self, step: StepInput) -> tuple[object, ...]:
        """The states of all generators that a forward pass may draw from."""
        return generator_states(self.device), step.generators.states()

    def backward(self, step: StepInput, loss: ShardLoss) -> None:
        """Add the gradient of some shards' loss, times their weight, to `.grad`."""
        with self.norm.backward(), step.companions.backward():
            step.scale(loss.weighted).backward()
        self.norm.end_pass()

    @contextmanager
    def stand_in(self, step: StepInput, module: nn.Module) -> Iterator[Tensor]:
        """The loss of a sample that counts for nothing, a scalar, for a worker that takes part in others' collectives.

        Its backward pass belongs inside.
        """
        self.num_shards_in_pass = 1
        with standing_in(self.model), step.companions.standing_in(), step.kept.unchanged():
            yield step.scale(self.loss_of_nothing(step, module).weighted)

    def loss_of_nothing(self, step: StepInput, module: nn.Module) -> ShardLoss:
        """The loss of the first samples with the weight 0, through which nothing flows back.

        Two of them, if the first shard has so many: a loss that compares samples may need another one.
        """
        num_samples = min(2, *step.assignment.sizes[:1], 1 if step.any_shard else 2)
        self.buffers.counters.begin_pass()
        with watching_outputs(module) as outputs:
            loss = read_loss(step.loss_of(module, copied(step.batch.cut(0, num_samples))), 0.0, 1, self.like)
        ignore_unless(False, outputs)
        return replace(loss, weight=0.0)

    def tells_noise(self, step: StepInput) -> bool:
        """Whether the first of a step's passes may be compared with all of them to measure gradient noise.

        In the first step shards go one by one only to detect whether the model draws random numbers. Most models make
        one pass in the steps that follow, and what one step measured is not to stand for all of them.
        """
        return step.take_norms is not None and self.functions.draws is not None

    # --- a step that starts over ---

    def starting_over(self, step: StepInput, attempt: Callable[[], Result]) -> Result:
        """Run `attempt`, the passes of a step; repeated where it raises `StartOverError`.

        Nothing is left of a failed attempt: no gradients, no norm statistics, no changes of buffers or of what is kept.
        """
        drew_before, kept = self.functions.draws, step.kept.snapshot_of_changing()
        self.buffers.begin_step()
        self.functions.is_batch_spoiled = False
        while True:
            try:
                with self.norm.forgotten_after_error():
                    return attempt()
            except StartOverError as problem:
                prepare = problem.prepare
            if self.functions.is_batch_spoiled:
                raise ModelError(
                    "The loss function began to change its batch in place in a step that has to compute its passes "
                    "again; let it make new tensors (x = x - 0.5 instead of x -= 0.5)."
                )
            self.buffers.start_over()
            self.norm.reset()
            kept.restore()
            for parameter in self.model.parameters():
                parameter.grad = None
            self.functions.draws = drew_before  # the first pass of a run is one shard, in each attempt
            prepare()

    def go_one_by_one(self, loss_name: str) -> None:
        """Have shards that drew random numbers together go one by one from now on."""
        if self._refusal:
            raise ModelError(self._refusal.format(_MODEL_DRAWS))
        self.functions.draws = True
        self.functions.couples[loss_name] = True

    def halve(self, assignment: Assignment) -> None:
        """Have half as many shards go together from now on, because memory ran out."""
        assert self._micro_batch is not None
        free_memory(self.device)
        self._micro_batch.halve(assignment)
