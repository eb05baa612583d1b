"""Sends and receives the messages between the workers of a pipeline: in strict order, with a form the first time.

A message is sent without waiting and received in the order in which its sender's schedule sends, so it needs no
address: all that Gloo promises is that messages between two workers keep their order. NCCL promises less, see
`queues`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.errors import ModelError
from paceline.object_collectives import broadcast_object
from paceline.parallel.pipeline.message import MessageForm, TensorForm, from_bytes, to_bytes, what_can_be_sent
from paceline.parallel.pipeline.queues import open_queues


class Outbox:
    """Tensors sent to one worker that the network may still be reading.

    Gloo tells that a message has arrived only to those who wait for it, so the receiver's own messages have to tell.
    """

    def __init__(self) -> None:
        self._under_way: list[tuple[int, Any, Tensor]] = []
        """The receiver's action that takes a tensor, the work of sending it, and the tensor."""

    def send(
        self,
        tensors: Sequence[Tensor],
        forms: Sequence[TensorForm],
        group: dist.ProcessGroup,
        rank: int,
        taken_by: int = 0,
    ) -> None:
        """Send tensors of the shapes in `forms` to the worker of this rank in the run, without waiting.

        Args:
            taken_by: the number of the receiver's action that takes them.
        """
        for tensor, form in zip(tensors, forms, strict=True):
            sent = form.pack(tensor.detach())
            self._under_way.append((taken_by, dist.isend(sent, dst=rank, group=group), sent))

    def forget_until(self, action: int) -> None:
        """Keep nothing that the receiver's actions up to this one take; they are done."""
        self._finish([one for one in self._under_way if one[0] <= action])
        self._under_way = [one for one in self._under_way if one[0] > action]

    def wait(self) -> None:
        self._finish(self._under_way)
        self._under_way = []

    @staticmethod
    def _finish(sent: Sequence[tuple[int, Any, Tensor]]) -> None:
        for _, work, _ in sent:
            work.wait()


@dataclass(frozen=True)
class Destination:
    """Where a message of the pipeline goes: values for a stage, or gradients for a stage that has sent values."""

    stage: int
    is_gradient: bool = False


class StageLinks:
    """The process groups by which one worker reaches the others, and the known forms of what they send."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        stages_per_worker: int,
        device: torch.device,
        timeout_s: float,
        *,
        is_exact: bool,
    ) -> None:
        """A collective of all workers of the run, each with its own `group`.

        Args:
            is_exact: whether gradients, too, lie in memory where they arrive as they did; else as what they are of.
        """
        self.rank, self.num_workers = dist.get_rank(group), dist.get_world_size(group)
        self.num_stages = self.num_workers * stages_per_worker
        self.device = device
        self.group = group
        self._ranks = dist.get_process_group_ranks(group)
        self._queues = open_queues(group, stages_per_worker, timeout_s)
        self._is_exact = is_exact
        self._forms: dict[tuple[Destination, Hashable], MessageForm] = {}

    def owner(self, stage: int) -> int:
        """The rank of a stage's worker in the group."""
        return stage % self.num_workers

    def known_form(self, to: Destination, signature: Hashable) -> MessageForm | None:
        """What arrives there when the model is called as `signature` says, if that has happened before."""
        if to.is_gradient and not self._is_exact:
            values = self._forms.get((Destination(to.stage + 1), signature))
            return None if values is None else MessageForm([*values.gradients])
        return self._forms.get((to, signature))

    def send(
        self, tensors: Sequence[Tensor], forms: Sequence[TensorForm], to: int, outbox: Outbox, taken_by: int = 0
    ) -> None:
        outbox.send(tensors, forms, self._queue(self.rank, to), self._ranks[to], taken_by)

    def receive(self, forms: Sequence[TensorForm], source: int) -> Callable[[], list[Tensor]]:
        """Begin to receive tensors of these shapes and dtypes; the returned function waits until they are there."""
        packed = [form.packed(self.device) for form in forms]
        queue = self._queue(source, self.rank)
        works = [dist.irecv(tensor, src=self._ranks[source], group=queue) for tensor in packed]

        def wait() -> list[Tensor]:
            for work in works:
                assert work is not None
                work.wait()
            return [form.unpack(tensor) for form, tensor in zip(forms, packed, strict=True)]

        return wait

    def _queue(self, source: int, to: int) -> dist.ProcessGroup:
        return self._queues.get((source, to), self.group)

    def sum_among(self, shared: Sequence[tuple[Tensor, Sequence[int]]]) -> None:
        """Add up tensors of any shape in place, each over the workers that have it, in the order of their ranks.

        A collective of these workers. All messages are one batch. On a backend with queues its parts do not wait for
        each other; sent one by one, workers that share three tensors in pairs would wait in a circle.

        Args:
            shared: this worker's tensors, with the ranks in the group of all workers that have each; in the same order
                on all of these workers.
        """
        operations: list[dist.P2POp] = []
        parts: list[list[Tensor]] = []
        for mine, ranks in shared:
            form = TensorForm.of(mine)
            sent = form.pack(mine)
            received = [sent if rank == self.rank else form.packed(self.device) for rank in ranks]
            parts.append(received)
            for rank, tensor in zip(ranks, received, strict=True):
                if rank != self.rank:
                    operations.append(dist.P2POp(dist.isend, sent, self._ranks[rank], self.group))
                    operations.append(dist.P2POp(dist.irecv, tensor, self._ranks[rank], self.group))
        works = dist.batch_isend_irecv(operations) if operations else []
        for work in works:
            work.wait()
        for (mine, _), received in zip(shared, parts, strict=True):
            mine.copy_(TensorForm.of(mine).unpack(torch.stack(received).sum(0)))

    def copy_from_first(self, shared: Sequence[tuple[Tensor, Sequence[int]]]) -> None:
        """Give all workers that have a tensor the value of the first of them; a collective of these.

        Args:
            shared: as of `sum_among`; contiguous tensors.
        """
        operations: list[dist.P2POp] = []
        for mine, (first, *others) in shared:
            if first == self.rank:
                operations += [dist.P2POp(dist.isend, mine, self._ranks[rank], self.group) for rank in others]
            else:
                operations.append(dist.P2POp(dist.irecv, mine, self._ranks[first], self.group))
        for work in dist.batch_isend_irecv(operations) if operations else []:
            work.wait()

    def send_values(
        self, to: Destination, signature: Hashable, values: Sequence[Any], outbox: Outbox, taken_by: int = 0
    ) -> None:
        """Send values, and before the first of their kind their form.

        Args:
            outbox: the outbox to the worker that has the stage `to`.
            taken_by: the number of that worker's action that takes them.

        Raises:
            ModelError: they have another form than those before them.
        """
        form, tensors = MessageForm.of(values)
        rank = self.owner(to.stage)
        known = self.known_form(to, signature)
        if known is None:
            known = self._forms[to, signature] = form
            if rank != self.rank:
                text = to_bytes(form.to_plain()).to(self.device)
                described = [torch.tensor([len(text)], device=self.device), text]
                self.send(described, [TensorForm.of(part) for part in described], rank, outbox, taken_by)
        elif rank != self.rank and known != form and not self._is_alike(to, known, form, tensors):
            raise ModelError(
                f"What is sent to stage {to.stage} of the pipeline differs from call to call though the model's inputs "
                "have the same shapes; cut the model where shapes do not depend on values."
            )
        if rank != self.rank:
            self.send(tensors, known.tensors, rank, outbox, taken_by)

    def _is_alike(self, to: Destination, known: MessageForm, form: MessageForm, tensors: Sequence[Tensor]) -> bool:
        """Whether gradients can be sent in the known form, in which they may lie in another order: where that makes no
        difference, as of gradients that are 0."""
        if not to.is_gradient or [(one.shape, one.dtype) for one in known.tensors] != [
            (one.shape, one.dtype) for one in form.tensors
        ]:
            return False
        triples = zip(known.tensors, form.tensors, tensors, strict=True)
        return not self._is_exact or not any(
            bool(tensor.any()) for was, now, tensor in triples if not was.lies_like(now)
        )

    def receive_form(self, to: Destination, signature: Hashable) -> MessageForm:
        """The form of what arrives there; received from the sender before the first message of its kind."""
        form = self.known_form(to, signature)
        if form is None:
            source = self.owner(to.stage + (1 if to.is_gradient else -1))
            length = self.receive([TensorForm((1,), torch.int64)], source)()[0]
            text = self.receive([TensorForm((int(length),), torch.uint8)], source)()[0]
            form = self._forms[to, signature] = MessageForm.from_plain(from_bytes(text))
        assert form is not None
        return form

    def broadcast_last(self, value: Any, signature: Hashable) -> Any:
        """The last stage's `value` for all workers; a collective."""
        source = self.owner(self.num_stages - 1)
        key = (Destination(self.num_stages), signature)
        form, tensors = MessageForm.of([what_can_be_sent(value)])
        if key not in self._forms:
            plain = broadcast_object(form.to_plain() if self.rank == source else None, self.group, source=source)
            self._forms[key] = form if self.rank == source else MessageForm.from_plain(plain)
        if self.rank != source:
            form = self._forms[key]
            packed = [described.packed(self.device) for described in form.tensors]
        elif form != self._forms[key]:
            raise ModelError(
                "The shape of the model's output differs from call to call though its inputs have the same shapes; a "
                "pipeline cannot share it among its workers."
            )
        else:
            packed = [described.pack(tensor.detach()) for tensor, described in zip(tensors, form.tensors, strict=True)]
        for one in packed:
            dist.broadcast(one, group_src=source, group=self.group)
        if self.rank != source:
            tensors = [described.unpack(one) for one, described in zip(packed, form.tensors, strict=True)]
        return form.filled(tensors)[0]
