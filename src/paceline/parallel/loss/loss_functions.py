"""Facts about the loss functions of a run, found in the first steps of each."""

from __future__ import annotations

from collections import Counter

import torch.distributed as dist

from paceline.errors import ModelError
from paceline.object_collectives import all_gather_objects
from paceline.parallel.kept.counters import Counters
from paceline.parallel.losses import LossLayout

DRAWS = "draws random numbers"
"""A reason without a message for the user: shards that draw random numbers or change buffers run one by one anyway."""


class LossFunctions:
    """Which numbers each loss function returns, and whether its loss couples samples; by the name of the function."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        """
        Args:
            group: the workers that train together; None: this one alone.
        """
        self._group = group
        self._own: dict[str, LossLayout] = {}
        self._agreed: dict[str, LossLayout] = {}
        self.draws: bool | None = None
        """Whether the forward pass draws random numbers; None before the first one. Saved with checkpoints."""
        self.couples: dict[str, bool] = {}
        """Whether shards have to go through the model one by one; saved with checkpoints."""
        self._num_steps = Counter[str]()
        """The steps of each loss function since the start of the program."""
        self.counters: dict[str, Counters] = {}
        """The numbers that each keeps from call to call; saved with checkpoints."""
        self.saved_counts: dict[str, dict[str, float]] = {}
        """The numbers of a checkpoint for each loss function that has not been called since."""
        self.changes_batch: dict[str, bool] = {}
        """Whether each loss function changes tensors of its batch in place, as far as this worker has seen."""
        self.differentiates: set[str] = set()
        """The loss functions that compute gradients themselves, as far as this worker has seen."""
        self.repeatable: set[str] = set()
        """Loss functions whose losses, computed shard by shard on this worker, did not depend on earlier calls."""
        self.is_batch_spoiled = False
        """Whether a loss function changed samples in this step of which there is no other copy."""
        self.found_late = ""
        """A sentence for the user about a loss that was found to couple samples after its first step."""

    def has_returned(self, name: str, layout: LossLayout) -> None:
        """Note what a loss function returned on this worker.

        Raises:
            ModelError: it returned other numbers before.
        """
        before = self._own.setdefault(name, layout)
        if before != layout:
            raise _differ(before, layout)

    def has_used_samples(self, name: str, *, changes: bool, are_copies: bool) -> None:
        """Note whether a loss function changed its samples in place."""
        changed_before = self.changes_batch.get(name)
        self.is_batch_spoiled |= changes and changed_before is False and not are_copies
        self.changes_batch[name] = changes or bool(changed_before)

    def may_be_weighted(self, name: str) -> bool:
        """Whether a loss function may return a `Mean`."""
        return name not in self._own or self._own[name].is_weighted

    def layout(self, name: str) -> LossLayout:
        """The layout of a loss function that has been called on this or another worker; a collective in its first step.

        Raises:
            ModelError: the workers' shards returned different numbers.
        """
        if name not in self._agreed:
            everyone = all_gather_objects(self._own.get(name), self._group, (LossLayout,))
            layouts = [one for one in everyone if one is not None]
            for one in layouts[1:]:
                if one != layouts[0]:
                    raise _differ(layouts[0], one)
            if not layouts:  # every worker ran out of memory first: the step starts over
                return LossLayout()
            self._agreed[name] = layouts[0]
        return self._agreed[name]

    def begin_step(self, name: str) -> bool:
        """Count a step of a loss function. Returns whether to find out in it if its loss couples samples; alike on all
        workers.

        In ever fewer steps it is found out again: a term by which a model differs from what it was in the beginning, as
        from its reference, is 0 in the first step.
        """
        self._num_steps[name] += 1
        return name not in self.couples or self._num_steps[name].bit_count() == 1  # in the steps 1, 2, 4, 8, …

    def is_so_anywhere(self, is_so: bool) -> bool:
        """Whether something is so on any worker; a collective."""
        return any(all_gather_objects(is_so, self._group))

    def agree_on_coupling(self, name: str, reason: str) -> tuple[str, ...]:
        """Let shards go through the model one by one from now on if any worker has a reason to; a collective.

        Args:
            reason: a sentence, `DRAWS`, or nothing.

        Returns:
            The sentence for the user, if there is one.
        """
        reasons = [one for one in all_gather_objects(reason, self._group) if one]
        self.couples[name] = bool(reasons)
        return tuple(one for one in reasons if one != DRAWS)[:1]

    def take_found_late(self) -> tuple[str, ...]:
        """What was found in this step on this worker alone, if anything."""
        sentence, self.found_late = self.found_late, ""
        return (sentence,) if sentence else ()


def _differ(one: LossLayout, other: LossLayout) -> ModelError:
    return ModelError(
        f"The loss function returned {one.describe()} for some samples, and {other.describe()} for others; it should "
        "return the same names in every step, with weight 0 (paceline.Mean) where there is nothing to count."
    )
