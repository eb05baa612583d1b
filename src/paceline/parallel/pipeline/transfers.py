"""Sends and receives the messages between the workers of a pipeline: in strict order, with a form the first time.

A message is sent without waiting and received in the order in which its sender's schedule sends, so it needs no
address: all that Gloo promises is that messages between two workers keep their order. NCCL promises less, see
`queues`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.errors import ModelError
from paceline.object_collectives import broadcast_object
from paceline.parallel.pipeline.message import MessageForm, TensorForm, from_bytes, to_bytes, what_can_be_sent
from paceline.parallel.pipeline.queues import open_queues


class Outbox:
    """Sent tensors that the network may still be reading."""

    def __init__(self) -> None:
        self._under_way: list[tuple[Any, Tensor]] = []

    def send(self, tensors: Sequence[Tensor], forms: Sequence[TensorForm], group: dist.ProcessGroup, rank: int) -> None:
        """Send without waiting to the worker of this rank in the run."""
        self._under_way = [(work, kept) for work, kept in self._under_way if not work.is_completed()]
        for tensor, form in zip(tensors, forms, strict=True):
            sent = form.in_memory_order(tensor.detach())
            self._under_way.append((dist.isend(sent, dst=rank, group=group), sent))

    def wait(self) -> None:
        for work, _ in self._under_way:
            work.wait()
        self._under_way = []


class Arrival:
    """Tensors in flight to this worker."""

    def __init__(self, tensors: Sequence[Tensor], work: Sequence[dist.Work | None]) -> None:
        self._tensors = tensors
        self._work = work

    @classmethod
    def begin(cls, forms: Sequence[TensorForm], device: torch.device, group: dist.ProcessGroup, rank: int) -> Arrival:
        """Receive from the worker of this rank in the run."""
        tensors = [form.empty(device) for form in forms]
        pairs = zip(tensors, forms, strict=True)
        work = [dist.irecv(form.in_memory_order(tensor), src=rank, group=group) for tensor, form in pairs]
        return cls(tensors, work)

    def wait(self) -> list[Tensor]:
        for work in self._work:
            assert work is not None
            work.wait()
        return list(self._tensors)


class StageLinks:
    """The process groups by which one worker reaches the others, and the known forms of what they send."""

    def __init__(
        self, group: dist.ProcessGroup, stages_per_worker: int, device: torch.device, timeout_s: float
    ) -> None:
        """A collective of all workers of the run, each with its own `group`."""
        self.rank, self.num_workers = dist.get_rank(group), dist.get_world_size(group)
        self.num_stages = self.num_workers * stages_per_worker
        self.device = device
        self.group = group
        self._ranks = dist.get_process_group_ranks(group)
        self._queues = open_queues(group, stages_per_worker, timeout_s)
        self._forms: dict[tuple[int, Hashable], MessageForm] = {}

    def owner(self, stage: int) -> int:
        """The rank of a stage's worker in the group."""
        return stage % self.num_workers

    def known_form(self, stage: int, signature: Hashable) -> MessageForm | None:
        """What arrives at a stage when the model is called as `signature` says, if that has happened before."""
        return self._forms.get((stage, signature))

    def forget_forms(self) -> None:
        """Forget the forms of messages, which change from now on; on all workers at the same point."""
        self._forms.clear()

    def send(self, tensors: Sequence[Tensor], forms: Sequence[TensorForm], to: int, outbox: Outbox) -> None:
        outbox.send(tensors, forms, self._queue(self.rank, to), self._ranks[to])

    def receive(self, forms: Sequence[TensorForm], source: int) -> Arrival:
        return Arrival.begin(forms, self.device, self._queue(source, self.rank), self._ranks[source])

    def _queue(self, source: int, to: int) -> dist.ProcessGroup:
        return self._queues.get((source, to), self.group)

    def sum_among(self, shared: Sequence[tuple[Tensor, Sequence[int]]]) -> None:
        """Add up tensors, each over the workers that have it, in the order of their ranks; a collective of these.

        All messages are one batch. On a backend with queues its parts do not wait for each other; sent one by one,
        workers that share three tensors in pairs would wait in a circle.

        Args:
            shared: this worker's tensors, with the ranks in the group of all workers that have each; in the same order
                on all of these workers.
        """
        operations: list[dist.P2POp] = []
        parts: list[list[Tensor]] = []
        for mine, ranks in shared:
            form = TensorForm.of(mine)
            sent = form.in_memory_order(mine)
            received = [mine if rank == self.rank else form.empty(self.device) for rank in ranks]
            parts.append(received)
            for rank, tensor in zip(ranks, received, strict=True):
                if rank != self.rank:
                    operations.append(dist.P2POp(dist.isend, sent, self._ranks[rank], self.group))
                    into = form.in_memory_order(tensor)
                    operations.append(dist.P2POp(dist.irecv, into, self._ranks[rank], self.group))
        works = dist.batch_isend_irecv(operations) if operations else []
        for work in works:
            work.wait()
        for (mine, _), received in zip(shared, parts, strict=True):
            mine.copy_(torch.stack(received).sum(0))

    def send_values(self, stage: int, signature: Hashable, values: Sequence[Any], outbox: Outbox) -> MessageForm:
        """Send values to a stage, and before the first of their kind their form."""
        form, tensors = MessageForm.of(values)
        known = self._forms.setdefault((stage, signature), form)
        to = self.owner(stage)
        if to == self.rank:
            return form
        if known is form:
            text = to_bytes(form.to_plain()).to(self.device)
            described = [torch.tensor([len(text)], device=self.device), text]
            self.send(described, [TensorForm.of(part) for part in described], to, outbox)
        elif known != form:
            raise ModelError(
                f"What is sent to stage {stage} of the pipeline differs from call to call though the model's inputs "
                "have the same shapes; cut the model where shapes do not depend on values."
            )
        self.send(tensors, form.tensors, to, outbox)
        return form

    def receive_form(self, stage: int, signature: Hashable) -> MessageForm:
        """The form of what a stage is sent; received from the sender before the first message of its kind."""
        form = self.known_form(stage, signature)
        if form is None:
            source = self.owner(stage - 1)
            length = self.receive([TensorForm((1,), torch.int64)], source).wait()[0]
            text = self.receive([TensorForm((int(length),), torch.uint8)], source).wait()[0]
            form = self._forms[stage, signature] = MessageForm.from_plain(from_bytes(text))
        assert form is not None
        return form

    def broadcast_last(self, value: Any, signature: Hashable) -> Any:
        """The last stage's `value` for all workers; a collective."""
        source = self.owner(self.num_stages - 1)
        key = (self.num_stages, signature)
        form, tensors = MessageForm.of([what_can_be_sent(value)])
        if key not in self._forms:
            plain = broadcast_object(form.to_plain() if self.rank == source else None, self.group, source=source)
            self._forms[key] = form if self.rank == source else MessageForm.from_plain(plain)
        if self.rank != source:
            form = self._forms[key]
            tensors = [described.empty(self.device) for described in form.tensors]
        elif form != self._forms[key]:
            raise ModelError(
                "The shape of the model's output differs from call to call though its inputs have the same shapes; a "
                "pipeline cannot share it among its workers."
            )
        for tensor, described in zip(tensors, form.tensors, strict=True):
            dist.broadcast(described.in_memory_order(tensor.detach()), group_src=source, group=self.group)
        return form.filled(tensors)[0]
