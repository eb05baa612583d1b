"""The axis pp: a model cut into stages, by torch.distributed.pipelining (Huang et al. 2019, Narayanan et al. 2021).

Every stage runs the model's own forward method, in which the blocks of other stages are absent (`stage_modules.py`).
Torch's schedules say which stage computes which micro-batch when, and send what crosses the cuts. A micro-batch is a
virtual shard. Every worker calls the loss function for it: where that calls the model the stage computes, and only on
the last stage does the loss function go on from there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
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

from paceline.comm.links import open_group
from paceline.errors import JobError, ModelError
from paceline.mathematics import even_cut
from paceline.parallel.block_calls import BlockCall, ModelCall, Skeleton, expanded_zeros, watch
from paceline.parallel.blocks import blocks_of
from paceline.parallel.engine import Passes, Reducer
from paceline.parallel.layout import Layout
from paceline.parallel.losses import ShardLoss
from paceline.parallel.pass_state import frozen_batch_norms
from paceline.parallel.stage_modules import (
    Answer,
    CutTrace,
    Message,
    StagePass,
    Stages,
    message_of,
    stage_module,
    unpacked,
)
from paceline.parallel.step_input import StepInput
from paceline.spec import PipelineSpec
from paceline.tensors import local_shard, tensors

_MOST_TRACES = 200
"""So many are kept."""


class Pipeline:
    """One worker's stages of a model that is spread over the workers of a group."""

    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup,
        spec: PipelineSpec,
        example: Any,
        device: torch.device,
        timeout_s: float,
        *,
        splits_backward: bool = True,
    ) -> None:
        """
        Args:
            model: the whole model, alike on all workers, on any device, meta too: it is cut where it is. What is not in
                this worker's stages is not kept.
            example: how the loss function calls the model, for a few samples, as `ModelCall.of` takes it; None: it is
                not known.
            timeout_s: how long a sum of gradients waits for a silent worker.
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
        self._group, self._spec, self.device, self._timeout_s = group, spec, device, timeout_s
        self._num_workers = dist.get_world_size(group)
        self._splits_backward = splits_backward and spec.schedule == "zero_bubble"
        self.num_stages = self._num_workers * spec.stages_per_worker
        self._owners = [stage % self._num_workers for stage in range(self.num_stages)]
        """The rank in the group of the worker of each stage."""
        self._skeleton = Skeleton(model, device)
        calls = self._skeleton.trace(ModelCall.of(example), training=model.training)
        self._cuts = _cuts(model, spec.cuts, calls, self.num_stages)
        """The blocks that begin a stage, all but the first's."""
        self.notes = (
            f"the model is cut into {self.num_stages} stages on {self._num_workers} workers, before "
            + ", ".join(self._cuts),
        )
        self._hold(model, CutTrace.of(calls, self._cuts))
        self.module = Stages(self.stages, self._evaluate, self._skeleton.model)
        """This worker's stages as one module; called, it computes the whole model."""
        self._traces: dict[Hashable, tuple[Hashable, CutTrace]] = {}
        """What calls of the model run, behind their forms: by these, and by the form of the samples for which the loss
        function makes them."""
        self._messages: Sequence[Message] = [{}] * self.num_stages
        """The longest that stages have sent each other."""
        self._schedule: tuple[Any, Any] = None, None
        """Torch's schedule of the last step, behind what it depends on."""
        self.seed_block: Callable[[str], None] = lambda _path: None
        """Called with the path of a block of an earlier stage where that would be called."""

    def _hold(self, model: nn.Module, cut: CutTrace) -> None:
        """Make this worker's stages, which hold the blocks that they call and the other parameters that they use, and
        free what is in none of them. The first stage also has what no stage uses."""
        blocks, every = blocks_of(model), range(self.num_stages)
        self._paths = [cut.paths(stage) for stage in every]
        self._paths[0] |= blocks.keys() - set().union(*self._paths)
        held = [
            {one for path in self._paths[stage] for one in blocks[path].parameters()}
            | {model.get_parameter(name) for name in cut.parameters(stage)}
            for stage in every
        ]
        held[0] |= set(model.parameters()) - set().union(*held)
        watch(blocks)
        self._stages = {
            stage: stage_module(model, self._skeleton, self._paths[stage], held[stage])
            for stage in every
            if self._owners[stage] == dist.get_rank(self._group)
        }
        self.stages = [*self._stages.values()]
        """This worker's stages, in their order: each is called with a `StagePass` and what arrives."""
        self.has_last_stage = self.num_stages - 1 in self._stages
        """Whether this worker computes the loss."""
        self.blocks = {path: blocks[path] for stage in self._stages for path in self._paths[stage]}
        """This worker's blocks, by path in the model."""
        self.stages_of = {name: [n for n in every if one in held[n]] for name, one in model.named_parameters()}
        """The stages of each parameter of the model, by name."""
        self.shared_parameters: dict[str, tuple[int, ...]] = {}
        """This worker's parameters that others have too, and their ranks in the group; in the order of the model."""
        self._groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        rank = dist.get_rank(self._group)
        for name, parameter in model.named_parameters():
            ranks = tuple(sorted({self._owners[stage] for stage in self.stages_of[name]}))
            if rank not in ranks:
                parameter.data = expanded_zeros(parameter, parameter.device)
            elif len(ranks) > 1:
                self.shared_parameters[name] = ranks
            if len(ranks) > 1 and ranks not in self._groups:  # all workers of the run open groups together
                mine = [dist.get_global_rank(self._group, one) for one in (ranks if rank in ranks else (rank,))]
                is_part = len(ranks) < self._num_workers
                self._groups[ranks] = open_group(mine, self._timeout_s) if is_part else self._group

    # --- a step ---

    def run(self, step: StepInput, passes: Passes, reducer: Reducer, layout: Layout) -> None:
        """The step's shards forward and backward, and stand-ins where others have more; a collective.

        Gradients are sums over micro-batches, and over workers where several have a parameter.
        """
        step = replace(step, reads_again=True)  # every stage calls the loss function
        passes.first_loss = passes.like + math.nan  # unless the last stage is here
        self.seed_block = passes.seeds.seed_block
        layout.begin_pass(passes.model, is_last=False)
        num_passes = layout.num_passes(step.assignment)
        if not num_passes:
            return
        if len(self._traces) > _MOST_TRACES:
            self._traces.clear()
        if self._spec.schedule == "1f1b":
            num_passes = max(num_passes, self.num_stages)
        elif self._spec.schedule != "gpipe":  # as many as torch's schedule takes
            while num_passes % (num_passes // self._num_workers or 1):
                num_passes += 1
        own = range(*step.assignment.own)
        shards = [*own, *[None] * (num_passes - len(own))]
        self.micro_batches = [MicroBatch(passes, step, reducer, layout, shard, len(self.stages)) for shard in shards]
        self.micro_batches[-1].is_last = True
        schedule = self._schedule_for([self.measure(one)[1] for one in self.micro_batches])
        numbers = torch.arange(num_passes)
        try:
            schedule.step(number=numbers, target=numbers, return_outputs=False)
        except RuntimeError as problem:  # torch wraps what a stage raises
            raise problem.__cause__ or problem from None
        passes.seeds.end()
        self._sum_shared_gradients()

    def measure(self, micro_batch: MicroBatch) -> tuple[Hashable, CutTrace]:
        """How the loss function calls the model for a micro-batch: the call's form, and what it runs. The loss function
        is called up to there."""

        def stop(call: ModelCall) -> NoReturn:
            raise _AnsweredError(self._trace(call))

        step, shard = micro_batch.step, micro_batch.shard
        samples = step.batch.shards[0 if shard is None else shard - step.assignment.own[0]]
        form = [(one.shape, one.dtype) for one in tensors(samples)]
        key = shard is None, step.loss_name, self.module.training, *form
        if key not in self._traces:
            self._traces[key] = micro_batch.forward(stop)
        return self._traces[key]

    def _schedule_for(self, cuts: Sequence[CutTrace]) -> Any:
        """Torch's schedule for micro-batches that run so."""
        kinds = [[[(one, form.dtype) for one, form in crossing.items()] for crossing in cut.crossing] for cut in cuts]
        if kinds.count(kinds[0]) < len(kinds):
            raise ModelError(
                "The loss function calls the model in another way for some virtual shards of a batch than for others; "
                "in a pipeline only the sizes of its inputs may differ."
            )
        # Messages become longer and not shorter, or each length of padded samples would have a schedule of its own.
        crossings = zip(*(cut.crossing for cut in cuts), strict=True)
        self._messages = [message_of(some, before) for some, before in zip(crossings, self._messages, strict=True)]
        form = [[(one, vector.dtype, len(vector)) for one, vector in message.items()] for message in self._messages]
        split = {number for number in self._stages if self._splits_backward and cuts[0].can_split(number)}
        key = len(cuts), form, split
        if key != self._schedule[0]:
            stages = [self._torch_stage(number, splits=number in split) for number in self._stages]
            schedule: Any = _SCHEDULES[self._spec.schedule]
            of_stages = stages[0] if self._spec.schedule in ("gpipe", "1f1b") else stages
            self._schedule = key, schedule(of_stages, len(cuts), loss_fn=lambda loss, _: loss, scale_grads=False)
        return self._schedule[1]

    def _torch_stage(self, number: int, *, splits: bool) -> _TorchStage:
        is_last = number == self.num_stages - 1
        loss = torch.zeros((), requires_grad=True)
        return _TorchStage(
            _Part(self, number, self._stages[number], {} if is_last else self._messages[number]),
            number,
            self.num_stages,
            self.device,
            input_args=tuple(self._messages[number - 1].values()) if number else (),
            output_args=loss if is_last else tuple(self._messages[number].values()),
            group=self._group,
            dw_builder=None if splits else lambda: lambda: None,  # nothing is left of it then
        )

    def form_of(self, call: ModelCall) -> Hashable:
        """All that a trace depends on."""
        kind = self.device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        return call.form, self.module.training, autocast

    def _trace(self, call: ModelCall) -> tuple[Hashable, CutTrace]:
        """The form of a call of the model, and what it runs, where it is cut. Raises `ModelError` where another stage
        has what a stage would need."""
        form = self.form_of(call)
        if form not in self._traces:
            cut = CutTrace.of(self._skeleton.trace(call, training=self.module.training), self._cuts)
            for number, stage in self._stages.items():
                names = {name for name, _ in stage.named_parameters(remove_duplicate=False)}
                if missing := (cut.parameters(number) - names) | (cut.paths(number) - self._paths[number]):
                    raise ModelError(
                        f"A call of the model uses '{missing.pop()}' in another stage than in training, or in "
                        "evaluation alone; cut the model elsewhere (pipeline.cuts), or choose another strategy."
                    )
            self._traces[form] = form, cut
        return self._traces[form]

    def _evaluate(self, call: ModelCall) -> Any:
        """The whole model: stage after stage, and what each gives for everybody. Nothing flows back through it."""
        _, cut = self._trace(call)
        vectors: Sequence[Tensor] = ()
        with torch.no_grad():
            for number, leaving in enumerate(cut.crossing):
                message = message_of([leaving])
                if number in self._stages:
                    stage_pass = StagePass(call, cut, number, self.device, message, self.seed_block)
                    vectors = self._stages[number](stage_pass, *vectors)
                else:
                    vectors = [torch.empty_like(one, device=self.device) for one in message.values()]
                for vector in vectors:
                    dist.broadcast(vector, group=self._group, group_src=self._owners[number])
        outputs = [unpacked(form, vector) for form, vector in zip(leaving.values(), vectors, strict=True)]
        for one, like in zip(outputs, message.values(), strict=True):  # a loss wants to depend on something
            one.requires_grad_(like.requires_grad and torch.is_grad_enabled())
        return cut.calls[-1].returned(outputs)

    def _sum_shared_gradients(self) -> None:
        """Add up the gradients of parameters that several workers have."""
        named = dict(self.module.named_parameters())
        for name, ranks in self.shared_parameters.items():
            parameter = named[name]
            if parameter.requires_grad:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                own = local_shard(parameter.grad)
                total = own.contiguous()
                dist.all_reduce(total, group=self._groups[ranks])
                own.copy_(total)


@dataclass
class MicroBatch:
    """A virtual shard on its way through this worker's stages, or a stand-in that counts for nothing."""

    passes: Passes
    step: StepInput
    reducer: Reducer
    layout: Layout
    shard: int | None
    """None: a stand-in."""
    num_stages_left: int
    """How many of this worker's stages it has to go backward through."""
    is_last: bool = False
    """Whether it is the step's last one."""

    def __post_init__(self) -> None:
        self._sums: list[Tensor] = []
        """The sums of the loss, on workers of the last stage."""
        self._changes = self.passes.like.new_zeros(self.passes.buffers.num_sums)
        self._gradients: list[Tensor | None] = []

    def forward(self, answer: Answer) -> Any:
        """Call the loss function, for which `answer` stands in place of the model.

        Returns:
            Its loss, weighted and scaled; or what `answer` has raised as an `_AnsweredError`.
        """
        passes, step, shard = self.passes, self.step, self.shard
        assert isinstance(passes.model, Stages)
        loss: ShardLoss | None = None
        answered = None
        stand_ins = [passes.model] if shard is None else []
        if shard is not None:
            passes.enter(step, shard)
        try:
            with frozen_batch_norms(*stand_ins), passes.model.answering(answer):
                loss = passes.zero_weight_loss(step) if shard is None else passes.read(step, shard)
        except _AnsweredError as raised:
            answered = raised.value
        if shard is not None:
            changes = passes.buffers.changes(shard, step.assignment.weight(shard), self._changes)
            self._changes += torch.cat(changes) if changes else 0  # of other stages' layers nothing
        if loss is None:
            return answered
        if shard == step.assignment.own[0]:
            passes.first_loss = loss.mean.detach()
        self._sums = [loss.sums]
        return step.scale(loss.weighted)

    @contextmanager
    def backward(self, stage: nn.Module, *, has_all: bool) -> Iterator[None]:
        """Around a backward pass through a stage, in which layers may be computed again; `has_all`: afterwards the
        gradients of all parameters are there."""
        if has_all and self.is_last:
            self.layout.begin_pass(stage, is_last=True)
            self.reducer.expect_last(stage)
        if self.shard is not None:
            self.passes.seeds.begin_shard(self.step.shard_seed(self.shard))
        yield
        if not has_all:
            return
        found = self.reducer.take_gradients()
        if self.shard is None:
            return
        before = self._gradients or [None] * len(found)
        self._gradients = [old if new is None else new for old, new in zip(before, found, strict=True)]
        self.num_stages_left -= 1
        if self.num_stages_left == 0:
            self.reducer.forward_made(torch.cat([*self._sums, self._changes]), is_last=False)
            self.reducer.push(self._gradients, self.step.assignment.weight(self.shard))
            self._gradients = []


class _Part(nn.Module):
    """A stage as torch's schedules call it."""

    def __init__(self, pipeline: Pipeline, number: int, stage: nn.Module, leaving: Message) -> None:
        super().__init__()
        self.pipeline, self.number, self.stage, self._leaving = pipeline, number, stage, leaving

    def forward(self, *arrived: Tensor, number: Tensor) -> Any:
        """What leaves the stage, or the loss of the last one.

        Args:
            arrived: what the stage before has sent.
            number: of the micro-batch, a scalar.
        """
        pipeline = self.pipeline
        micro_batch = pipeline.micro_batches[int(number)]
        form, cut = pipeline.measure(micro_batch)

        def answer(call: ModelCall) -> Any:
            if pipeline.form_of(call) != form:
                raise ModelError(
                    "The loss function calls the model with other arguments than for samples of the same shapes "
                    "before; in a pipeline their shapes have to follow from those of the samples."
                )
            stage_pass = StagePass(call, cut, self.number, pipeline.device, self._leaving, pipeline.seed_block)
            found = self.stage(stage_pass, *arrived)
            if self.number == pipeline.num_stages - 1:
                return found
            raise _AnsweredError(tuple(found))

        return micro_batch.forward(answer)


class _TorchStage(PipelineStage):
    """Torch's stage, with what is to be done before and after its backward passes."""

    submod: _Part

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        with self._backward_of(bwd_chunk_id, has_all=full_backward or self.dw_builder is not None):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        with self._backward_of(bwd_chunk_id, has_all=self.dw_builder is None):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)

    def _backward_of(self, number: int, *, has_all: bool) -> AbstractContextManager[None]:
        return self.submod.pipeline.micro_batches[number].backward(self.submod.stage, has_all=has_all)


_SCHEDULES = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
}


class _AnsweredError(BaseException):
    """The model was called; not an Exception, which a loss function might catch."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


# --- where to cut ---


def _cuts(model: nn.Module, names: Sequence[str], calls: Sequence[BlockCall], num_stages: int) -> tuple[str, ...]:
    """The blocks that begin a stage, all but the first's: those that a plan names; else such that stages compute about
    equally much, or where no arithmetic is counted have about equally many parameters."""
    blocks = blocks_of(model)
    unknown = [name for name in names if name not in blocks]
    if unknown:
        raise JobError(
            f"pipeline.cuts names {unknown[0]!r}, which is no block of the model; it has {', '.join(blocks)}."
        )
    if names and len(names) != num_stages - 1:
        raise JobError(f"pipeline.cuts names {len(names)} blocks, and {num_stages} stages need {num_stages - 1}.")
    if names:
        return tuple(names)
    paths = [call.path for call in calls[:-1]]
    work = [call.flops + sum(one.numel() for one in blocks[call.path].parameters()) for call in calls[:-1]]
    starts = even_cut(work, [path not in paths[:place] for place, path in enumerate(paths)], num_stages)
    return tuple(paths[start] for start in starts[1:])
