"""Every schedule is played by NCCL's rules: a communicator is one queue on each worker, and nothing is buffered."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from paceline.parallel.pipeline.calls import Calls, MicroBatch
from paceline.parallel.pipeline.executor import Step
from paceline.parallel.pipeline.message import MessageForm, TensorForm, to_bytes
from paceline.parallel.pipeline.queues import Queue, queue_rounds
from paceline.parallel.pipeline.schedules import Schedule, make_schedule
from paceline.parallel.pipeline.stage import Stage
from paceline.parallel.pipeline.transfers import Destination, StageLinks
from paceline.spec.mesh import ScheduleName

CPU = torch.device("cpu")
SHAPES: tuple[tuple[ScheduleName, int], ...] = (
    ("gpipe", 1),
    ("gpipe", 2),
    ("1f1b", 1),
    ("interleaved", 2),
    ("interleaved", 3),
    ("zero_bubble", 1),
)
CASES = list(itertools.product(SHAPES, (2, 3, 4, 8), (1, 2, 3, 4, 8, 16), (True, False)))
"""(schedule and stages a worker), workers, micro-batches, whether messages are described as in the first step."""

QueueOf = Callable[[int, int], Hashable]


def queue_of(source: int, to: int) -> Queue:
    return source, to


def up_or_down(source: int, to: int) -> Hashable:
    """A queue for all messages up the ranks and one for all down, on communicators of the whole pipeline."""
    return source < to


@dataclass
class Worker:
    """What a worker posts on its queues, and what its compute stream and its program wait for.

    `num_done` counts, for each transfer, the receives that the compute stream has waited for before it was posted:
    NCCL begins with it when the compute stream has come so far.
    """

    posted: list[tuple[str, int, int, int]] = field(default_factory=list)
    """(kind, sender, receiver, number of waits before it)."""
    waits: list[int] = field(default_factory=list)
    """Which of the posted receives the compute stream waits for, in order."""
    program_waits: dict[int, int] = field(default_factory=dict)
    """Before posting transfer k, the program itself waits until the compute stream has passed that many waits."""


class AllKnown(dict[tuple[Destination, Hashable], MessageForm]):
    """The forms of messages after the first step."""

    def get(self, *_: Any) -> MessageForm:
        return MESSAGE


class RecordingLinks(StageLinks):
    """Links that send nothing: what arrives has the right form."""

    def __init__(self, rank: int, num_workers: int, num_stages: int, *, is_first: bool, is_exact: bool) -> None:
        self.rank, self.num_workers, self.num_stages, self.device = rank, num_workers, num_stages, CPU
        self.worker = Worker()
        self._is_exact = is_exact
        self._forms = {} if is_first else AllKnown()

    def send(self, tensors: Sequence[Tensor], _forms: Any, to: int, *_rest: Any) -> None:
        for _ in tensors:
            self._post("send", self.rank, to)

    def receive(self, forms: Sequence[TensorForm], source: int) -> Callable[[], list[Tensor]]:
        text = to_bytes(MESSAGE.to_plain())
        is_read = forms[0].dtype in (torch.int64, torch.uint8)
        known = {torch.int64: torch.tensor([len(text)]), torch.uint8: text}
        tensors = [known[form.dtype] if form.dtype in known else form.packed(CPU) for form in forms]
        numbers = [self._post("receive", source, self.rank) for _ in forms]

        def wait() -> list[Tensor]:
            self.worker.waits += numbers
            if is_read:  # its values: the program waits for the device
                self.worker.program_waits[len(self.worker.posted)] = len(self.worker.waits)
            return tensors

        return wait

    def _post(self, kind: str, source: int, to: int) -> int:
        self.worker.posted.append((kind, source, to, len(self.worker.waits)))
        return len(self.worker.posted) - 1


class OneNumber(nn.Module):
    """A stage that gives on one number."""

    def forward(self, _call: Any, *arriving: Tensor) -> tuple[Tensor]:
        return ((arriving[0] if arriving else torch.zeros(1, requires_grad=True)) * 1,)


MESSAGE = MessageForm([TensorForm((1,), torch.float32, requires_grad=True)])


def record(
    schedule: Schedule, rank: int, num_stages: int, num_micro_batches: int, *, is_first: bool, is_exact: bool = False
) -> Worker:
    """Run one worker's part of a step by itself."""
    num_workers = len(schedule)
    links = RecordingLinks(rank, num_workers, num_stages, is_first=is_first, is_exact=is_exact)
    stages = cast(dict[int, Stage], {stage: OneNumber() for stage in range(rank, num_stages, num_workers)})
    micro_batches = [MicroBatch(loss_of=lambda model: model(torch.zeros(1)).sum())] * num_micro_batches
    draws = [False] * num_stages
    calls = Calls(nn.Identity(), CPU)
    Step(links, calls, stages, draws, schedule, micro_batches, lambda _stage: None, torch.zeros(())).run()
    return links.worker


def ends(workers: Sequence[Worker], queue_of: QueueOf) -> bool:
    """Whether all transfers come to an end; False: some wait for each other for ever."""
    num_posted = [0] * len(workers)
    num_waited = [0] * len(workers)
    queues: list[dict[Hashable, deque[int]]] = [{} for _ in workers]
    arrived: list[set[int]] = [set() for _ in workers]

    def go_on(rank: int) -> Iterator[bool]:
        worker = workers[rank]
        while num_posted[rank] < len(worker.posted) and (
            worker.program_waits.get(num_posted[rank], 0) <= num_waited[rank]
        ):
            _, source, to, _ = worker.posted[num_posted[rank]]
            queues[rank].setdefault(queue_of(source, to), deque()).append(num_posted[rank])
            num_posted[rank] += 1
            yield True
        while num_waited[rank] < len(worker.waits) and worker.waits[num_waited[rank]] in arrived[rank]:
            num_waited[rank] += 1
            yield True
        for queue, mine in queues[rank].items():
            kind, _, to, _ = worker.posted[mine[0]] if mine else ("", 0, 0, 0)
            theirs = queues[to].get(queue) if kind == "send" else None
            if theirs and is_ready(rank, mine[0]) and is_ready(to, theirs[0]):
                back, source, _, _ = workers[to].posted[theirs[0]]
                if back == "receive" and source == rank:
                    mine.popleft()
                    arrived[to].add(theirs.popleft())
                    yield True

    def is_ready(rank: int, number: int) -> bool:
        return workers[rank].posted[number][3] <= num_waited[rank]

    while sum(sum(go_on(rank)) for rank in range(len(workers))):
        pass
    return all(
        num_posted[rank] == len(worker.posted) and num_waited[rank] == len(worker.waits)
        for rank, worker in enumerate(workers)
    ) and not any(any(mine.values()) for mine in queues)


Case = tuple[str, int, int, int, bool]


@pytest.fixture(scope="module")
def steps() -> dict[Case, list[Worker]]:
    """What the workers of every case do in a step."""
    played: dict[Case, list[Worker]] = {}
    for (name, stages_per_worker), num_workers, num_micro_batches, is_first in CASES:
        schedule = make_schedule(name, num_workers, num_micro_batches, stages_per_worker)
        num_stages = num_workers * stages_per_worker
        played[name, stages_per_worker, num_workers, num_micro_batches, is_first] = [
            record(schedule, rank, num_stages, num_micro_batches, is_first=is_first) for rank in range(num_workers)
        ]
    return played


def test_with_a_queue_for_each_pair_and_direction_no_schedule_waits_for_ever(steps: dict[Case, list[Worker]]) -> None:
    assert len(steps) == 288
    assert [case for case, workers in steps.items() if not ends(workers, queue_of)] == []


def test_with_one_queue_up_and_one_down_many_do(steps: dict[Case, list[Worker]]) -> None:
    waiting = [case for case, workers in steps.items() if not ends(workers, up_or_down)]
    assert ("1f1b", 1, 4, 8, False) in waiting
    assert len(waiting) > 100


@pytest.mark.parametrize("shape", SHAPES)
def test_nor_where_gradients_are_described_too(shape: tuple[ScheduleName, int]) -> None:
    """In the first step of bitwise parity."""
    name, stages_per_worker = shape
    for num_workers, num_micro_batches in itertools.product((2, 3, 4), (1, 2, 4, 8)):
        schedule, num_stages = (
            make_schedule(name, num_workers, num_micro_batches, stages_per_worker),
            num_workers * stages_per_worker,
        )
        workers = [
            record(schedule, rank, num_stages, num_micro_batches, is_first=True, is_exact=True)
            for rank in range(num_workers)
        ]
        assert ends(workers, queue_of), (num_workers, num_micro_batches)


@pytest.mark.parametrize("stages_per_worker", [1, 2])
@pytest.mark.parametrize("num_workers", [2, 3, 4, 5, 8])
def test_every_queue_is_opened_once_and_no_worker_has_two_in_a_round(num_workers: int, stages_per_worker: int) -> None:
    rounds = queue_rounds(num_workers, stages_per_worker)
    for some in rounds:
        members = [worker for queue in some for worker in queue]
        assert len(members) == len(set(members))
    used: set[Queue] = set()
    for stage in range(1, num_workers * stages_per_worker):
        before, after = (stage - 1) % num_workers, stage % num_workers
        used |= {queue_of(before, after), queue_of(after, before)}
    assert sorted(queue for some in rounds for queue in some) == sorted(used)
    assert len(rounds) <= 6, "however many workers there are"
