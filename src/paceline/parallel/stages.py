"""The axis pp: a model cut into stages, by torch.distributed.pipelining (Huang et al. 2019, Narayanan et al. 2021).

`model_graph.py` cuts the model. Torch's schedules say which stage computes which micro-batch when, and send what
crosses the cuts. A micro-batch is a virtual shard. Every worker calls the loss function for it, with a stand-in for the
model: where that is called the stage computes, and only on the last stage does the loss function go on from there.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from paceline.dtensor_type import local_shard
from paceline.errors import JobError, ModelError
from paceline.parallel.blocks import blocks_of
from paceline.parallel.model_graph import Arguments, BlockCall, Cut, ModelCall, Skeleton, put_together
from paceline.parallel.stage_modules import Stage, Stages, StandIn, free_other_layers, stages_of
from paceline.partition import best_cut
from paceline.spec import PipelineSpec
from paceline.spec.model_cost import LayerCost

if TYPE_CHECKING:
    from paceline.parallel.micro_batches import MicroBatch


@dataclass(frozen=True)
class _Form:
    """All that decides what stages compute; equal on all workers."""

    arguments: Hashable
    training: bool


@dataclass(frozen=True)
class _Size:
    """All that the shapes and types of what crosses the cuts follow from, for one form."""

    num_samples: int
    autocast: torch.dtype | None


@dataclass(frozen=True)
class _Crossing:
    """A tensor that leaves a stage."""

    shape: torch.Size
    dtype: torch.dtype
    order: Sequence[int]
    """Its dimensions as they lie in memory: it is sent, and arrives, so that dropout draws in that order."""

    @classmethod
    def of(cls, tensor: Tensor) -> Self:
        order = sorted(range(tensor.dim()), key=tensor.stride().__getitem__, reverse=True)
        if not tensor.permute(order).is_contiguous():  # a view with gaps, or expanded: its copy has another order
            order = list(range(tensor.dim()))
        return cls(tensor.shape, tensor.dtype, order)

    @property
    def sent_shape(self) -> list[int]:
        return [self.shape[dim] for dim in self.order]

    @property
    def form(self) -> Tensor:
        """What is sent, on the meta device."""
        form = torch.empty(self.sent_shape, dtype=self.dtype, device="meta")
        return form.requires_grad_(self._has_gradient)

    @property
    def _has_gradient(self) -> bool:
        return self.dtype.is_floating_point or self.dtype.is_complex

    def packed(self, tensor: Tensor) -> Tensor:
        """A tensor of this shape, or a smaller one, as it is sent: torch's stages know one shape."""
        if tensor.dtype != self.dtype:
            raise ModelError(f"A stage gives {tensor.dtype} where {self.dtype} is expected.")
        lying = tensor.permute(*self.order)
        if list(lying.shape) != self.sent_shape:
            padded = tensor.new_zeros(self.sent_shape)
            padded[tuple(map(slice, lying.shape))] = lying
            lying = padded
        # What a frozen stage sends gets a gradient too, so that messages do not depend on what is frozen.
        if self._has_gradient and not lying.requires_grad:
            lying = lying.detach().requires_grad_()
        # A copy: torch detaches what leaves a stage in place, which an operation may have saved or a view not allow.
        return lying.clone(memory_format=torch.contiguous_format)

    def unpacked(self, sent: Tensor, shape: torch.Size) -> Tensor:
        """The tensor of some shape that was sent, as a copy: what arrives may not be changed in place."""
        own = sent[tuple(slice(shape[dim]) for dim in self.order)]
        back = sorted(range(len(self.order)), key=self.order.__getitem__)
        return own.clone(memory_format=torch.contiguous_format).permute(*back)


@dataclass
class _Cuts:
    """The stages for one form of the model's arguments."""

    stages: Sequence[Cut]
    output: Any
    """What is around the model's output."""
    leaving: dict[_Size, list[list[_Crossing]]] = field(default_factory=dict)
    """What leaves each stage."""


class Pipeline:
    """One worker's stages of a model that is spread over the workers of a group."""

    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup,
        spec: PipelineSpec,
        example: ModelCall | None,
        device: torch.device,
        *,
        splits_backward: bool = True,
    ) -> None:
        """
        Args:
            model: the whole model, alike on all workers, on any device, meta too: it is cut where it is. What is not in
                this worker's stages is not kept.
            example: how the loss function calls the model, for a few samples.
            splits_backward: whether the schedule zero_bubble may compute gradients of parameters by themselves.

        Raises:
            ModelError: the model cannot be cut, or not into as many stages.
            JobError: an invalid schedule, or invalid names in `cuts`.
        """
        if spec.stages_per_worker > 1 and spec.schedule in ("gpipe", "1f1b"):
            raise JobError(
                f"pipeline.stages_per_worker = {spec.stages_per_worker} needs pipeline.schedule = 'interleaved' or "
                f"'zero_bubble'; '{spec.schedule}' gives every worker one stage."
            )
        if example is None:
            raise ModelError(
                "A pipeline is cut by an example: call run.prepare(model, optimizer, example=inputs) with what the "
                "loss function calls the model with, for a few samples."
            )
        self._group, self._spec, self._device = group, spec, device
        self._rank, self._num_workers = dist.get_rank(group), dist.get_world_size(group)
        self._splits_backward = splits_backward
        self.num_stages = self._num_workers * spec.stages_per_worker
        self._skeleton = Skeleton(model, device)
        arguments = Arguments.of(example.on(device))
        graph = self._skeleton.trace(arguments)
        self.cuts = _checked_cuts(model, spec.cuts, self.num_stages) or _found_cuts(model, graph.calls, self.num_stages)
        """The blocks that begin a stage, all but the first's; such as `PipelineSpec.cuts` takes."""
        self.notes = (
            f"the model is cut into {self.num_stages} stages on {self._num_workers} workers, before "
            + ", ".join(self.cuts),
        )
        form = _Form(arguments.form, model.training)
        cuts = graph.cut(self.cuts)
        self._forms = {form: _Cuts(cuts, graph.output)}
        everywhere = stages_of(model, [cut.used for cut in cuts])
        self._stages = {number: stage for number, stage in enumerate(everywhere) if self._owner(number) == self._rank}
        for number, stage in self._stages.items():
            stage.add(form, cuts[number])
        holders = _holders(everywhere)
        self.stages_that_share = {
            name: tuple(number for number, _ in holders[parameter])
            for name, parameter in model.named_parameters()
            if len(holders[parameter]) > 1
        }
        """The stages of each parameter that is in several, by its name in the model."""
        self.shared_parameters = self._shared_parameters(model, holders)
        """Parameters shared with other workers, and their ranks in the group; in the order of the model."""
        places = {parameter: place for place, parameter in enumerate(model.parameters())}
        self.num_parameters = len(places)
        """The number of parameters of the whole model."""
        own = list(self._stages.values())
        self.places = {
            name: places[one] for stage in own for name, one in stage.named_parameters(remove_duplicate=False)
        }
        """For each of this worker's parameters, by name, its place among those of the model."""
        here = {module for stage in own for module in stage.modules()}
        self.blocks = {path: block for path, block in blocks_of(model).items() if block in here}
        """This worker's blocks, by path in the model."""
        free_other_layers(model, own)
        self.stages: list[nn.Module] = [*own]
        """This worker's stages, in their order."""
        self.module: nn.Module = Stages(own, self._evaluate, frozenset(dir(model)))
        """This worker's stages as one module; called, it computes the whole model."""
        self._schedules: dict[Hashable, Any] = {}
        self._measured: dict[Hashable, tuple[_Form, _Size]] = {}
        """How the loss function calls the model, for a micro-batch of some form."""
        self._micro_batches: Sequence[MicroBatch] = ()
        """Those of the step under way."""

    def _owner(self, stage: int) -> int:
        """The rank in the group of the worker of a stage."""
        return stage % self._num_workers

    def _shared_parameters(self, model: nn.Module, holders: _Holders) -> dict[str, tuple[int, ...]]:
        found: dict[str, tuple[int, ...]] = {}
        for parameter in model.parameters():
            ranks = {self._owner(number) for number, _ in holders[parameter]}
            own_names = [name for number, name in holders[parameter] if self._owner(number) == self._rank]
            if len(ranks) > 1 and own_names:
                found[own_names[0]] = tuple(sorted(ranks))
        return found

    @property
    def has_last_stage(self) -> bool:
        """Whether this worker computes the loss."""
        return self.num_stages - 1 in self._stages

    @property
    def rank_of_loss(self) -> int:
        """The rank in the group of the worker that computes the loss."""
        return self._owner(self.num_stages - 1)

    # --- a step ---

    def train_step(
        self,
        micro_batches: Sequence[MicroBatch],
        nothing: MicroBatch,
        before_last_backward: Callable[[nn.Module], None],
    ) -> None:
        """Forward and backward of all micro-batches; a collective of all workers, with as many of them on each.

        Gradients are left in `.grad`: sums over micro-batches, and over workers where several have a parameter.

        Args:
            nothing: counts for nothing; goes through as well where torch's schedule wants more micro-batches.
            before_last_backward: called with a stage just before its last backward pass of the step.
        """
        if not micro_batches:
            return
        self.before_last_backward = before_last_backward
        num_passes = self._num_passes(len(micro_batches))
        self._micro_batches = [*micro_batches, *[nothing] * (num_passes - len(micro_batches))]
        calls = [self._measure(one) for one in self._micro_batches]
        form, size = max(calls, key=lambda call: call[1].num_samples)
        if any(one != form for one, _ in calls):
            raise ModelError(
                "The loss function calls the model with inputs of other shapes for some virtual shards of a batch than "
                "for others; a pipeline needs the same ones, but for the number of samples: pad them."
            )
        key = num_passes, form, size
        if key not in self._schedules:
            self._schedules[key] = self._schedule(num_passes, form, size)
        numbers = torch.arange(num_passes)
        try:
            self._schedules[key].step(
                *([numbers] if 0 in self._stages else []),
                target=numbers if self.has_last_stage else None,
                return_outputs=False,
            )
        except RuntimeError as problem:  # torch wraps what a stage raises
            raise problem.__cause__ or problem from None
        self._sum_shared_gradients()

    def _num_passes(self, num_micro_batches: int) -> int:
        """The next number of micro-batches that torch's schedule takes."""
        if self._spec.schedule == "gpipe":
            return num_micro_batches
        if self._spec.schedule == "1f1b":
            return max(num_micro_batches, self.num_stages)
        num_rounds = num_micro_batches // self._num_workers or 1
        while num_micro_batches % num_rounds:
            num_micro_batches += 1
            num_rounds = num_micro_batches // self._num_workers
        return num_micro_batches

    def _measure(self, micro_batch: MicroBatch) -> tuple[_Form, _Size]:
        """How the loss function calls the model; it is called up to there."""

        def stop(args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
            form, arguments = self._arguments(args, kwargs)
            self._measured[key] = form, self._size(arguments)
            self._leaving(form, arguments)
            raise _StoppedError

        key = micro_batch.form, self.module.training
        if key not in self._measured:
            micro_batch.before_forward()
            try:
                with micro_batch.within():
                    micro_batch.loss_of(self._stand_in(stop))
            except _StoppedError:
                return self._measured[key]
            raise _not_called()
        return self._measured[key]

    def _schedule(self, num_passes: int, form: _Form, size: _Size) -> Any:
        leaving = self._forms[form].leaving[size]
        stages = []
        for number, stage in self._stages.items():
            splits = self._splits_backward and (number == 0 or self._forms[form].stages[number].can_split)
            arriving = leaving[number - 1] if number else []
            part = _Part(self, number, stage, form, arriving, leaving[number])
            inputs = [one.form for one in arriving] or [torch.zeros(1, dtype=torch.int64)]
            outputs = [torch.zeros((), requires_grad=True)] if part.is_last else [one.form for one in leaving[number]]
            stages.append(
                _TorchStage(
                    part,
                    number,
                    self.num_stages,
                    self._device,
                    input_args=tuple(inputs),
                    output_args=tuple(outputs),
                    group=self._group,
                    dw_builder=None if splits else lambda: _do_nothing,
                )
            )
        schedule: Any = _SCHEDULES[self._spec.schedule]
        of_stages = stages[0] if self._spec.schedule in ("gpipe", "1f1b") else stages
        return schedule(of_stages, num_passes, loss_fn=lambda loss, _target: loss, scale_grads=False)

    def compute(self, part: _Part, micro_batch: MicroBatch, arrived: Sequence[Tensor]) -> Any:
        """The forward pass of a stage: what leaves it, or the loss of the last."""

        def in_place_of_model(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            form, arguments = self._arguments(args, kwargs)
            if form != part.form:
                raise ModelError(
                    "The loss function calls the model with other arguments than for samples of the same shapes "
                    "before; in a pipeline their shapes have to follow from those of the samples."
                )
            before = self._leaving(form, arguments)[part.number - 1]
            values = [
                full.unpacked(sent, own.shape) for full, sent, own in zip(part.arriving, arrived, before, strict=False)
            ]
            found = part.stage(form, *values, *arguments.leaves)
            if part.is_last:
                return put_together(self._forms[form].output, found)
            raise _StageDoneError(tuple(full.packed(one) for full, one in zip(part.leaving, found, strict=True)))

        micro_batch.before_forward()
        with micro_batch.within():
            try:
                loss = micro_batch.loss_of(self._stand_in(in_place_of_model))
            except _StageDoneError as done:
                return done.values
        if not part.is_last:
            raise _not_called()
        return micro_batch.scale(loss)

    def _stand_in(self, answer: Callable[[tuple[Any, ...], dict[str, Any]], Any]) -> StandIn:
        return StandIn(self._skeleton.model, self.module.training, answer)

    def micro_batch(self, number: int) -> MicroBatch:
        """One of the step under way."""
        return self._micro_batches[number]

    # --- what the stages compute ---

    def _arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[_Form, Arguments]:
        """The arguments of a call of the model; if no call had their form before, what the stages compute then."""
        arguments = Arguments.of(ModelCall(args, kwargs))
        form = _Form(arguments.form, self.module.training)
        if form not in self._forms:
            self._skeleton.set_mode(training=form.training)
            graph = self._skeleton.trace(arguments)
            cuts = graph.cut(self.cuts)
            for number, stage in self._stages.items():
                stage.add(form, cuts[number])
            self._forms[form] = _Cuts(cuts, graph.output)
        return form, arguments

    def _size(self, arguments: Arguments) -> _Size:
        kind = self._device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        return _Size(arguments.num_samples, autocast)

    @torch.no_grad()
    def _leaving(self, form: _Form, arguments: Arguments) -> list[list[_Crossing]]:
        """What leaves each stage: found by a pass through the skeleton."""
        known, size = self._forms[form].leaving, self._size(arguments)
        if size not in known:
            self._skeleton.set_mode(training=form.training)
            values: list[Tensor] = []
            known[size] = found = []
            with torch.random.fork_rng([self._device] if self._device.type == "cuda" else []):
                for stage in self._forms[form].stages:
                    values = stage.function(self._skeleton.model, *values, *arguments.leaves)
                    found.append([_Crossing.of(one) for one in values])
        return known[size]

    @torch.no_grad()
    def _evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """The whole model: stage after stage, and the output for everybody."""
        form, arguments = self._arguments(args, kwargs)
        leaving = self._leaving(form, arguments)
        values: list[Tensor] = []
        for number, stage in self._stages.items():
            if number and self._owner(number - 1) != self._rank:
                values = self._moved(leaving[number - 1], partial(dist.recv, group_src=self._owner(number - 1)))
            values = stage(form, *values, *arguments.leaves)
            if number < self.num_stages - 1 and self._owner(number + 1) != self._rank:
                self._moved(leaving[number], partial(dist.send, group_dst=self._owner(number + 1)), values)
        spread = partial(dist.broadcast, group_src=self.rank_of_loss)
        values = self._moved(leaving[-1], spread, values if self.has_last_stage else None)
        return put_together(self._forms[form].output, values)

    def _moved(
        self, forms: Sequence[_Crossing], move: Callable[..., Any], values: Sequence[Tensor] | None = None
    ) -> list[Tensor]:
        """Tensors of another worker, or this worker's `values`, after a message by `move`."""
        found = []
        for place, form in enumerate(forms):
            sent = torch.empty_like(form.form, device=self._device) if values is None else form.packed(values[place])
            sent = sent.detach()
            move(sent, group=self._group)
            found.append(form.unpacked(sent, form.shape))
        return found

    def _sum_shared_gradients(self) -> None:
        """Add up the gradients of parameters that several workers have, in the order of ranks, so that they are the
        same everywhere. All messages are one batch: sent one by one, workers could wait in a circle."""
        named = dict(self.module.named_parameters(remove_duplicate=False))
        operations: list[dist.P2POp] = []
        sums: list[tuple[Tensor, list[Tensor]]] = []
        for name, ranks in self.shared_parameters.items():
            parameter = named[name]
            if not parameter.requires_grad:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            mine = local_shard(parameter.grad).contiguous()
            parts = [mine if rank == self._rank else torch.empty_like(mine) for rank in ranks]
            sums.append((local_shard(parameter.grad), parts))
            for rank, part in zip(ranks, parts, strict=True):
                if rank != self._rank:
                    operations.append(dist.P2POp(dist.isend, mine, group=self._group, group_peer=rank))
                    operations.append(dist.P2POp(dist.irecv, part, group=self._group, group_peer=rank))
        for work in dist.batch_isend_irecv(operations) if operations else []:
            work.wait()
        for gradient, parts in sums:
            gradient.copy_(torch.stack(parts).sum(0))


class _Part(nn.Module):
    """A stage as torch's schedules call it."""

    def __init__(
        self,
        pipeline: Pipeline,
        number: int,
        stage: Stage,
        form: _Form,
        arriving: Sequence[_Crossing],
        leaving: Sequence[_Crossing],
    ) -> None:
        """
        Args:
            arriving, leaving: for the largest micro-batch.
        """
        super().__init__()
        self.number, self.stage, self.form = number, stage, form
        self.arriving, self.leaving = arriving, leaving
        self.pipeline = pipeline
        self.is_last = number == pipeline.num_stages - 1
        self.micro_batch = 0
        """The number of the micro-batch that passes."""

    def forward(self, *arrived: Tensor) -> Any:
        return self.pipeline.compute(self, self.pipeline.micro_batch(self.micro_batch), arrived)


class _TorchStage(PipelineStage):
    """Torch's stage, with what is to be done before and after its passes."""

    submod: _Part

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.submod.micro_batch = fwd_chunk_id
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        is_whole = full_backward or self.dw_builder is not None
        with self._backward_of(bwd_chunk_id, has_all=is_whole):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        with self._backward_of(bwd_chunk_id, has_all=self.dw_builder is None):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)

    @contextmanager
    def _backward_of(self, number: int, *, has_all: bool) -> Iterator[None]:
        """
        Args:
            number: of the micro-batch; they come in this order.
            has_all: whether the gradients of all parameters are there afterwards.
        """
        pipeline, stage = self.submod.pipeline, self.submod.stage
        micro_batch = pipeline.micro_batch(number)
        if has_all and number + 1 == self.chunks:
            pipeline.before_last_backward(stage)
        micro_batch.before_backward()
        yield
        if has_all:
            micro_batch.after_backward(stage)


_SCHEDULES = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
}


def _do_nothing() -> None:
    """What is left of a backward pass that was not split."""


# --- where to cut ---


def _checked_cuts(model: nn.Module, names: Sequence[str], num_stages: int) -> tuple[str, ...]:
    """The blocks that a plan names."""
    blocks = blocks_of(model)
    unknown = [name for name in names if name not in blocks]
    if unknown:
        raise JobError(
            f"pipeline.cuts names {unknown[0]!r}, which is no block of the model; it has {', '.join(blocks)}."
        )
    if names and len(names) != num_stages - 1:
        raise JobError(f"pipeline.cuts names {len(names)} blocks, and {num_stages} stages need {num_stages - 1}.")
    return tuple(names)


def _found_cuts(model: nn.Module, calls: Sequence[BlockCall], num_stages: int) -> tuple[str, ...]:
    """The blocks that begin stages which compute about equally much; where nothing is counted, by their parameters."""
    blocks = blocks_of(model)
    sizes = [sum(one.numel() for one in blocks[call.path].parameters()) for call in calls]
    work = [call.flops for call in calls] if any(call.flops for call in calls) else sizes
    paths = [call.path for call in calls]
    costs = [
        LayerCost(path, float(one) or 1.0, may_begin=path not in paths[:place])
        for place, (path, one) in enumerate(zip(paths, work, strict=True))
    ]
    return tuple(paths[start] for start in best_cut(costs, num_stages)[1:])


_Holders = Mapping[nn.Parameter, Sequence[tuple[int, str]]]
"""The stages that have each parameter, in their order, and its name there."""


def _holders(stages: Sequence[Stage]) -> _Holders:
    holders: dict[nn.Parameter, list[tuple[int, str]]] = {}
    for number, stage in enumerate(stages):
        for name, parameter in stage.named_parameters():
            holders.setdefault(parameter, []).append((number, name))
    return holders


class _StoppedError(BaseException):
    """The model was called; not an Exception, which a loss function might catch."""


class _StageDoneError(BaseException):
    """A stage that is not the last has computed; not an Exception, which a loss function might catch."""

    def __init__(self, values: tuple[Tensor, ...]) -> None:
        super().__init__()
        self.values = values


def _not_called() -> ModelError:
    return ModelError("The loss function did not call the model it was given; in a pipeline it has to.")
