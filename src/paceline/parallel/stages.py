"""The axis pp: a model cut into stages, by torch.distributed.pipelining (Huang et al. 2019, Narayanan et al. 2021).

Every stage runs the model's own forward method, in which the blocks of other stages are absent (`stage_modules.py`).
Torch's schedules say which stage computes which micro-batch when, and send what crosses the cuts. A micro-batch is a
virtual shard. Every worker calls the loss function for it: where that calls the model the stage computes, and only on
the last stage does the loss function go on from there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

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

from paceline.containers import local_shard, tensors
from paceline.errors import JobError, ModelError
from paceline.mathematics import even_cut
from paceline.parallel.block_calls import ModelCall, Output, Skeleton, Trace, watch
from paceline.parallel.blocks import blocks_of
from paceline.parallel.buffers import standing_in
from paceline.parallel.engine import Passes, Reducer
from paceline.parallel.layout import Whole
from paceline.parallel.stage_modules import CutTrace, Held, StagePass, Stages, free_others, stage_module
from paceline.parallel.step_input import StepInput
from paceline.spec import PipelineSpec


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
        trace = self._skeleton.trace(example, training=model.training)
        self.cuts = _checked_cuts(model, spec.cuts, self.num_stages) or _found_cuts(model, trace, self.num_stages)
        """The blocks that begin a stage, all but the first's; such as `PipelineSpec.cuts` takes."""
        self.notes = (
            f"the model is cut into {self.num_stages} stages on {self._num_workers} workers, before "
            + ", ".join(self.cuts),
        )
        self._cut_traces: dict[Hashable, CutTrace] = {}
        held = self._held = _held(model, CutTrace.of(trace, self.cuts), self.num_stages)
        own = [number for number in range(self.num_stages) if self._owner(number) == self._rank]
        self._stages = {number: stage_module(model, self._skeleton, held[number]) for number in own}
        self.stages = [*self._stages.values()]
        """This worker's stages, in their order: each is called with a `StagePass` and what arrives."""
        own_paths = {path for number in own for path in held[number].paths}
        self.blocks = {path: block for path, block in blocks_of(model).items() if path in own_paths}
        """This worker's blocks, by path in the model."""
        for path, block in self.blocks.items():
            watch(block, path, self._skeleton.calls)
        stages_of = {one: [n for n, stage in enumerate(held) if one in stage.parameters] for one in model.parameters()}
        self.stages_that_share = {
            name: tuple(stages_of[one]) for name, one in model.named_parameters() if len(stages_of[one]) > 1
        }
        """The stages of each parameter that is in several, by its name in the model."""
        self.num_parameters = len(stages_of)
        """The number of parameters of the whole model."""
        order = {parameter: place for place, parameter in enumerate(stages_of)}
        own_names = [named for stage in self.stages for named in stage.named_parameters(remove_duplicate=False)]
        self.places = {name: order[one] for name, one in own_names}
        """For each of this worker's parameters, by name, its place among those of the model."""
        own_name = {one: name for name, one in reversed(own_names)}
        ranks_of = {one: tuple(sorted({self._owner(n) for n in numbers})) for one, numbers in stages_of.items()}
        self.shared_parameters = {
            own_name[one]: ranks for one, ranks in ranks_of.items() if len(ranks) > 1 and one in own_name
        }
        """This worker's parameters that others have too, and their ranks in the group; in the order of the model."""
        self._groups = {ranks: _part_of(group, ranks) for ranks in dict.fromkeys(self.shared_parameters.values())}
        free_others(model, own_name.keys())
        self.module = Stages(self.stages, self._evaluate, self._skeleton.model)
        """This worker's stages as one module; called, it computes the whole model."""
        self._schedules: dict[Hashable, Any] = {}
        self._measured: dict[Hashable, CutTrace] = {}
        """How the loss function calls the model, for a micro-batch of some form."""
        self._seed_block: Callable[[str], None] = lambda _path: None
        """Called with the path of a block of an earlier stage where that would be called."""

    def _owner(self, stage: int) -> int:
        """The rank in the group of the worker of a stage."""
        return stage % self._num_workers

    @property
    def has_last_stage(self) -> bool:
        """Whether this worker computes the loss."""
        return self.num_stages - 1 in self._stages

    # --- a step ---

    def run(self, step: StepInput, passes: Passes, reducer: Reducer, layout: Whole) -> None:
        """The step's shards forward and backward, and stand-ins where others have more; a collective.

        Gradients are sums over micro-batches, and over workers where several have a parameter.
        """
        step = replace(step, reads_again=True)  # every stage calls the loss function
        passes.first_loss = passes.like + math.nan  # unless the last stage is here
        self._seed_block = passes.seeds.seed_block

        def expect_last(stage: nn.Module) -> None:
            layout.begin_pass(stage, is_last=True)
            reducer.expect_last(stage)

        self.before_last_backward = expect_last
        layout.begin_pass(passes.model, is_last=False)
        num_passes = layout.num_passes(step.assignment)
        if not num_passes:
            return
        num_passes = self._num_passes(num_passes)
        own = range(*step.assignment.own)
        shards = [*own, *[None] * (num_passes - len(own))]
        self.micro_batches = [MicroBatch(passes, step, shard, reducer, len(self.stages)) for shard in shards]
        messages = _messages([self._measure(one) for one in self.micro_batches])
        key = num_passes, self.module.training, *(tuple(one.items()) for one in messages)
        if key not in self._schedules:
            self._schedules[key] = self._schedule(num_passes, messages)
        numbers = torch.arange(num_passes)
        try:
            self._schedules[key].step(
                *([numbers] if 0 in self._stages else []),
                target=numbers if self.has_last_stage else None,
                return_outputs=False,
            )
        except RuntimeError as problem:  # torch wraps what a stage raises
            raise problem.__cause__ or problem from None
        passes.seeds.end()
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

    def _measure(self, micro_batch: MicroBatch) -> CutTrace:
        """What the loss function calls the model for; it is called up to there."""

        def stop(args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
            self._measured[key] = self._cut_trace(ModelCall(args, kwargs))
            raise _StoppedError

        key = micro_batch.form, self.module.training
        if key not in self._measured:
            try:
                with micro_batch.forward(), self.module.answering(stop):
                    micro_batch.loss_of()
            except _StoppedError:
                return self._measured[key]
            raise _not_called()
        return self._measured[key]

    def _schedule(self, num_passes: int, messages: Sequence[Message]) -> Any:
        stages = []
        for number, stage in self._stages.items():
            part = _Part(self, number, stage, messages)
            inputs = _on_meta(part.arriving) or [torch.zeros(1, dtype=torch.int64)]
            outputs = [torch.zeros((), requires_grad=True)] if part.is_last else _on_meta(part.leaving)
            splits = self._splits_backward and self._measure(self.micro_batches[0]).can_split(number)
            stages.append(
                _TorchStage(
                    part,
                    number,
                    self.num_stages,
                    self._device,
                    input_args=tuple(inputs),
                    output_args=tuple(outputs),
                    group=self._group,
                    dw_builder=None if splits else lambda: lambda: None,  # nothing is left of it then
                )
            )
        schedule: Any = _SCHEDULES[self._spec.schedule]
        of_stages = stages[0] if self._spec.schedule in ("gpipe", "1f1b") else stages
        return schedule(of_stages, num_passes, loss_fn=lambda loss, _target: loss, scale_grads=False)

    def compute(self, part: _Part, arrived: Sequence[Tensor]) -> Any:
        """The forward pass of a stage for the part's micro-batch: what leaves it, or the loss of the last."""
        micro_batch = self.micro_batches[part.micro_batch]

        def answer(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            call = ModelCall(args, kwargs)
            cut = self._cut_trace(call)
            if cut is not self._measure(micro_batch):
                raise ModelError(
                    "The loss function calls the model with other arguments than for samples of the same shapes "
                    "before; in a pipeline their shapes have to follow from those of the samples."
                )
            values = [_unpacked(cut.form_of(output), sent) for output, sent in zip(part.arriving, arrived, strict=True)]
            stage_pass = StagePass(
                call,
                cut,
                part.number,
                self._device,
                leave=lambda output, tensor: _packed(cut.form_of(output), tensor, part.leaving[output][1]),
                seed_block=self._seed_block,
            )
            found = part.stage(stage_pass, *values)
            if part.is_last:
                return found
            raise _StageDoneError(found)

        with micro_batch.forward():
            try:
                with self.module.answering(answer):
                    loss = micro_batch.loss_of()
            except _StageDoneError as done:
                return tuple(done.values)
        if not part.is_last:
            raise _not_called()
        return micro_batch.scale(loss)

    def _cut_trace(self, call: ModelCall) -> CutTrace:
        """What a call of the model runs, where it is cut.

        Raises:
            ModelError: another stage has what a stage would need.
        """
        kind = self._device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        key = call.form, self.module.training, autocast
        if key not in self._cut_traces:
            cut = CutTrace.of(self._skeleton.trace(call, training=self.module.training), self.cuts)
            for number, stage in self._stages.items():
                names = {name for name, _ in stage.named_parameters(remove_duplicate=False)}
                if missing := (cut.parameters(number) - names) | (cut.paths(number) - self._held[number].paths):
                    raise ModelError(
                        f"A call of the model uses '{missing.pop()}' in another stage than in training, or in "
                        "evaluation alone; cut the model elsewhere (pipeline.cuts), or choose another strategy."
                    )
            self._cut_traces[key] = cut
        return self._cut_traces[key]

    def _evaluate(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The whole model: stage after stage, and the output for everybody. Nothing flows back through it."""
        call = ModelCall(args, kwargs)
        cut = self._cut_trace(call)
        values: Any = []
        with torch.no_grad():
            for number, stage in self._stages.items():
                if number and self._owner(number - 1) != self._rank:
                    arriving = [cut.form_of(output) for output in cut.crossing[number - 1]]
                    values = self._moved(arriving, partial(dist.recv, group_src=self._owner(number - 1)))
                stage_pass = StagePass(call, cut, number, self._device, _cloned, self._seed_block)
                values = stage(stage_pass, *values)
                if number < self.num_stages - 1 and self._owner(number + 1) != self._rank:
                    leaving = [cut.form_of(output) for output in cut.crossing[number]]
                    self._moved(leaving, partial(dist.send, group_dst=self._owner(number + 1)), values)
            own = [*tensors(values, in_objects=True)] if self.has_last_stage else None
            spread = partial(dist.broadcast, group_src=self._owner(self.num_stages - 1))
            found = self._moved(cut.returned.forms, spread, own)
        for one in found:  # a loss wants to depend on something
            one.requires_grad_(_has_gradient(one.dtype) and torch.is_grad_enabled())
        return cut.returned.filled(found)

    def _moved(
        self, forms: Sequence[Tensor], move: Callable[..., Any], values: Sequence[Tensor] | None = None
    ) -> list[Tensor]:
        """Tensors of another worker, or this worker's `values`, after a message by `move`."""
        found = []
        for place, form in enumerate(forms):
            sent = torch.empty(form.numel(), dtype=form.dtype, device=self._device)
            if values is not None:
                sent = _packed(form, values[place], form.numel()).detach()
            move(sent, group=self._group)
            found.append(_unpacked(form, sent))
        return found

    def _sum_shared_gradients(self) -> None:
        """Add up the gradients of parameters that several workers have."""
        named = dict(self.module.named_parameters(remove_duplicate=False))
        for name, ranks in self.shared_parameters.items():
            parameter = named[name]
            if parameter.requires_grad:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                own = local_shard(parameter.grad)
                total = own.contiguous()
                dist.all_reduce(total, group=self._groups[ranks])
                own.copy_(total)


class MicroBatch:
    """A virtual shard on its way through this worker's stages, or a stand-in that counts for nothing."""

    def __init__(self, passes: Passes, step: StepInput, shard: int | None, reducer: Reducer, num_stages: int) -> None:
        """
        Args:
            shard: None: a stand-in.
            num_stages: of this worker.
        """
        self._passes, self._step, self._shard, self._reducer = passes, step, shard, reducer
        self._num_stages_left = num_stages
        self._sums: list[Tensor] = []
        """Those of the loss, where the last stage is."""
        self._moves = passes.like.new_zeros(passes.buffers.num_sums)
        self._gradients: list[Tensor | None] = []
        content = step.batch.shards[0] if shard is None else step.content(shard)
        shapes = [(one.shape, one.dtype) for one in tensors(content)]
        self.form: Hashable = shard is None, step.loss_name, *shapes
        """The shapes and types of the samples."""

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around the forward pass of every stage: seeds generators, and notes what the pass made of buffers."""
        if self._shard is None:
            with standing_in(self._passes.model):
                yield
            return
        self._passes.enter(self._step, self._shard)
        yield
        self._passes.leave(self._step, self._shard, None)
        moves = self._passes.buffers.take_moves(self._moves)
        self._moves += torch.cat(moves) if moves else 0  # of other stages' layers nothing

    def loss_of(self) -> Tensor:
        """Calls the user's loss function on these samples: their loss, weighted."""
        if self._shard is None:
            return self._passes.loss_of_nothing(self._step).weighted
        loss = self._passes.read(self._step, self._shard)
        self._sums = [loss.sums]
        if self._shard == self._step.assignment.own[0]:
            self._passes.first_loss = loss.mean.detach()
        return loss.weighted

    def scale(self, loss: Tensor) -> Tensor:
        """Applies the loss scale just before backward."""
        return self._step.scale(loss)

    def begin_backward(self) -> None:
        """Before the backward pass of every stage, in which layers may be computed again."""
        if self._shard is not None:
            self._passes.seeds.begin_shard(self._step.shard_seed(self._shard))

    def backward_made(self) -> None:
        """When the gradients of all parameters of one more stage are there."""
        found = self._reducer.take_gradients()
        if self._shard is None:
            return
        before = self._gradients or [None] * len(found)
        self._gradients = [old if new is None else new for old, new in zip(before, found, strict=True)]
        self._num_stages_left -= 1
        if self._num_stages_left == 0:
            self._reducer.forward_made(torch.cat([*self._sums, self._moves]), is_last=False)
            self._reducer.push(self._gradients, self._step.assignment.weight(self._shard))
            self._gradients = []


class _Part(nn.Module):
    """A stage as torch's schedules call it."""

    def __init__(self, pipeline: Pipeline, number: int, stage: nn.Module, messages: Sequence[Message]) -> None:
        super().__init__()
        self.pipeline, self.number, self.stage = pipeline, number, stage
        self.is_last = number == len(messages)
        self.arriving: Message = messages[number - 1] if number else {}
        self.leaving: Message = {} if self.is_last else messages[number]
        self.micro_batch = 0
        """The number of the micro-batch that passes."""

    def forward(self, *arrived: Tensor) -> Any:
        return self.pipeline.compute(self, arrived if self.number else ())


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
        micro_batch = pipeline.micro_batches[number]
        if has_all and number + 1 == self.chunks:
            pipeline.before_last_backward(stage)
        micro_batch.begin_backward()
        yield
        if has_all:
            micro_batch.backward_made()


_SCHEDULES = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
}


def _part_of(group: dist.ProcessGroup, ranks: Sequence[int]) -> dist.ProcessGroup:
    """The group of some ranks of a group; a collective of these, in the same order of groups."""
    if len(ranks) == dist.get_world_size(group):
        return group
    everywhere = [dist.get_global_rank(group, rank) for rank in ranks]
    made: dist.ProcessGroup = dist.new_group(everywhere, use_local_synchronization=True)
    return made


def _cloned(_output: Output, tensor: Tensor) -> Tensor:
    return tensor.clone()


class _StoppedError(BaseException):
    """The model was called; not an Exception, which a loss function might catch."""


class _StageDoneError(BaseException):
    """A stage that is not the last has computed; not an Exception, which a loss function might catch."""

    def __init__(self, values: Sequence[Tensor]) -> None:
        super().__init__()
        self.values = values


def _not_called() -> ModelError:
    return ModelError("The loss function did not call the model it was given; in a pipeline it has to.")


# --- messages ---


Message = dict[Output, tuple[torch.dtype, int]]
"""What leaves a stage, each tensor as a vector: its dtype and length."""


def _messages(cuts: Sequence[CutTrace]) -> list[Message]:
    """What leaves each stage but the last in a step: vectors that are long enough for each of its micro-batches."""
    found: list[Message] = []
    for outputs, *others in zip(*(cut.crossing for cut in cuts), strict=True):
        is_alike = others.count(outputs) == len(others)
        forms = [[cut.form_of(output) for cut in cuts] for output in outputs] if is_alike else []
        if not is_alike or any(len({(form.dtype, form.dim()) for form in of_output}) > 1 for of_output in forms):
            raise ModelError(
                "The loss function calls the model in another way for some virtual shards of a batch than for others; "
                "in a pipeline only the sizes of its inputs may differ."
            )
        lengths = [(of_output[0].dtype, max(form.numel() for form in of_output)) for of_output in forms]
        found.append(dict(zip(outputs, lengths, strict=True)))
    return found


def _has_gradient(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _on_meta(message: Message) -> list[Tensor]:
    """What is sent, on the meta device."""
    return [
        torch.empty(length, dtype=dtype, device="meta", requires_grad=_has_gradient(dtype))
        for dtype, length in message.values()
    ]


def _order(form: Tensor) -> list[int]:
    """The dimensions of a tensor as they lie in memory."""
    return sorted(range(form.dim()), key=form.stride().__getitem__, reverse=True)


def _packed(form: Tensor, tensor: Tensor, length: int) -> Tensor:
    """A tensor of this form as a vector, padded to a length."""
    lying = tensor.permute(_order(form)).reshape(-1)
    # What a frozen stage sends gets a gradient too, so that messages do not depend on what is frozen.
    if _has_gradient(form.dtype) and not lying.requires_grad:
        lying = lying.detach().requires_grad_()
    # A copy: torch detaches what leaves a stage in place, which an operation may have saved or a view not allow.
    return torch.cat([lying, lying.new_zeros(length - form.numel())])


def _unpacked(form: Tensor, sent: Tensor) -> Tensor:
    """The tensor of this form that was sent, as a copy: what arrives may not be changed in place."""
    order = _order(form)
    own = sent[: form.numel()].clone().view([form.shape[dim] for dim in order])
    return own.permute(sorted(range(form.dim()), key=order.__getitem__))


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


def _found_cuts(model: nn.Module, trace: Trace, num_stages: int) -> tuple[str, ...]:
    """The blocks that begin stages which compute about equally much; where nothing is counted, by their parameters."""
    blocks = blocks_of(model)
    sizes = [sum(one.numel() for one in blocks[call.path].parameters()) for call in trace.calls]
    work = [call.flops for call in trace.calls] if any(call.flops for call in trace.calls) else sizes
    paths = [call.path for call in trace.calls]
    starts = even_cut(work, [path not in paths[:place] for place, path in enumerate(paths)], num_stages)
    return tuple(paths[start] for start in starts[1:])


def _held(model: nn.Module, cut: CutTrace, num_stages: int) -> list[Held]:
    """What each stage holds: the blocks that it calls and the other parameters that it uses; the first one has what no
    stage uses, too."""
    blocks = blocks_of(model)
    paths = [cut.paths(stage) for stage in range(num_stages)]
    names = [cut.parameters(stage) for stage in range(num_stages)]
    paths[0] |= {path for path in blocks if not any(path in one for one in paths)}
    found = [Held.of(model, *one) for one in zip(paths, names, strict=True)]
    used = set().union(*(one.parameters for one in found))
    names[0] |= {name for name, one in model.named_parameters() if one not in used}
    return [Held.of(model, paths[0], names[0]), *found[1:]]
