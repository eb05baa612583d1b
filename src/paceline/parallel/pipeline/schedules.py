"""Pipeline schedules: the ordered actions of every worker.

Stage s lives on worker s % num_workers. A schedule is found by simulating workers whose
actions take unit times, so it respects all dependencies, for any number of micro-batches.

GPipe: Huang et al. 2019. 1F1B: Narayanan et al. 2019 ("PipeDream"), flushed every step. Interleaved 1F1B: Narayanan
et al. 2021, section 2.2. Zero-bubble: Qi et al. 2023, "Zero Bubble Pipeline Parallelism", ZB-H1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from paceline.partition import forward_order
from paceline.spec.mesh import ScheduleName

ActionKind = Literal["forward", "backward", "input", "weight"]


@dataclass(frozen=True)
class Action:
    """One stage's work on one micro-batch.

    "backward" computes all gradients of the stage; "input" and "weight" are its two halves: only the gradient that the
    stage before waits for, and the rest.
    """

    kind: ActionKind
    stage: int
    micro_batch: int


Schedule = tuple[tuple[Action, ...], ...]
"""The actions of every worker in their order."""


def needs(action: Action, num_stages: int) -> tuple[Action, ...]:
    """The actions that come before this one; a backward pass may be whole or in halves."""
    kind, stage, micro_batch = action.kind, action.stage, action.micro_batch
    if kind == "forward":
        return (Action("forward", stage - 1, micro_batch),) if stage else ()
    if kind == "weight":
        return (Action("input", stage, micro_batch),)
    own = Action("forward", stage, micro_batch)
    return (own,) if stage == num_stages - 1 else (own, Action(kind, stage + 1, micro_batch))


def make_schedule(name: ScheduleName, num_workers: int, num_micro_batches: int, stages_per_worker: int = 1) -> Schedule:
    """The actions of one step.

    "gpipe": all forward passes, then all backward passes: every activation of the step is alive in between.
    "1f1b": a backward pass as soon as there is one: worker r keeps at most num_workers - r micro-batches.
    "interleaved": 1f1b with several stages a worker, which shortens the bubble by their number.
    "zero_bubble": 1f1b whose weight gradients fill the waiting times; no worker keeps more than 1f1b's first does.
    """
    order = forward_order(num_workers, num_micro_batches, stages_per_worker)
    num_forwards = num_micro_batches * stages_per_worker
    limits = [num_forwards] * num_workers
    if name != "gpipe":
        # How far a worker may run ahead of its backward passes (Megatron-LM's number of warm-up passes, and one).
        stride = 1 if stages_per_worker == 1 else 2
        further = (stages_per_worker - 1) * num_workers
        limits = [min(num_forwards, stride * (num_workers - 1 - r) + further + 1) for r in range(num_workers)]
    return _play(order, limits, num_workers * stages_per_worker, name == "gpipe", name == "zero_bubble")


def _play(
    order: list[tuple[int, int]], limits: list[int], num_stages: int, flushes_forwards: bool, splits: bool
) -> Schedule:
    num_workers = len(limits)
    last_place = num_stages // num_workers - 1
    players = []
    for worker, limit in enumerate(limits):
        forwards = [(place * num_workers + worker, micro_batch) for place, micro_batch in order]
        backwards = [((last_place - place) * num_workers + worker, micro_batch) for place, micro_batch in order]
        players.append(_Player(forwards, backwards, limit, max(limits), num_stages, flushes_forwards, splits))
    done_at: dict[Action, int] = {}
    free_at = [0] * num_workers
    now = 0
    while any(not player.is_done for player in players):
        for worker, player in enumerate(players):
            if free_at[worker] <= now:
                action = player.choose(lambda needed, now=now: done_at.get(needed, now + 1) <= now)  # type: ignore[misc]
                if action is not None:
                    free_at[worker] = done_at[action] = now + (2 if action.kind == "backward" else 1)
        coming = [moment for moment in free_at if moment > now]
        if coming:
            now = min(coming)
        else:  # everybody waits for everybody: few micro-batches and many places need to run further ahead
            for player in players:
                player.limit += 1
                player.most_kept += 1
    return tuple(tuple(player.actions) for player in players)


@dataclass
class _Player:
    """One worker in the simulation that finds a schedule: takes the first action that is possible and allowed."""

    forwards: list[tuple[int, int]]
    backwards: list[tuple[int, int]]
    limit: int
    most_kept: int
    num_stages: int
    flushes_forwards: bool
    splits: bool
    actions: list[Action] = field(default_factory=list)
    num_forward: int = 0
    num_backward: int = 0
    num_weight: int = 0

    @property
    def is_done(self) -> bool:
        return self.num_weight == len(self.forwards)

    def choose(self, is_done: Callable[[Action], bool]) -> Action | None:
        def can(action: Action) -> bool:
            return all(is_done(needed) for needed in needs(action, self.num_stages))

        action = None
        num_all = len(self.forwards)
        ahead, kept = self.num_forward - self.num_backward, self.num_forward - self.num_weight
        if self.num_forward < num_all and ahead < self.limit and kept < self.most_kept:
            candidate = Action("forward", *self.forwards[self.num_forward])
            if can(candidate):
                self.num_forward += 1
                action = candidate
        waits = self.flushes_forwards and self.num_forward < num_all
        if action is None and self.num_backward < num_all and not waits:
            candidate = Action("input" if self.splits else "backward", *self.backwards[self.num_backward])
            if can(candidate):
                self.num_backward += 1
                self.num_weight += not self.splits
                action = candidate
        if action is None and self.splits and self.num_weight < self.num_backward:
            action = Action("weight", *self.backwards[self.num_weight])
            self.num_weight += 1
        if action is not None:
            self.actions.append(action)
        return action
