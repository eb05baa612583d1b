"""One worker's stages of a pipeline, and the collectives that it and the other workers take part in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.dtensor_type import is_dtensor
from paceline.errors import JobError, ModelError
from paceline.object_collectives import broadcast_object
from paceline.parallel.engine import statistics_dtype
from paceline.parallel.pipeline.calls import (
    Calls,
    MicroBatch,
    ModelCall,
    generator_state,
    place_of,
    set_generator_state,
)
from paceline.parallel.pipeline.check import check_stages
from paceline.parallel.pipeline.cut import find_cut
from paceline.parallel.pipeline.executor import Step
from paceline.parallel.pipeline.recorder import record
from paceline.parallel.pipeline.recording import Recording, record_sequential
from paceline.parallel.pipeline.schedules import Schedule, make_schedule
from paceline.parallel.pipeline.shared import Holders, SharedParameters, holders_of
from paceline.parallel.pipeline.stage import Stage, Stages, free_other_layers, stages_of
from paceline.parallel.pipeline.transfers import Destination, Outbox, StageLinks
from paceline.partition import StageLimits
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
        limits: StageLimits | None = None,
        agreement: dist.ProcessGroup | None = None,
        timeout_s: float = 600.0,
        before_last_backward: Callable[[nn.Module], None] = lambda _stage: None,
        is_exact: bool = False,
    ) -> None:
        """A collective of all workers of the run, each with its own `group`.

        Args:
            model: the whole model, alike on all workers, on any device, meta too: it is cut where it is. What is not in
                this worker's stages is not kept.
            example: how the model is called, for a few samples; None: only for an nn.Sequential, whose layers then
                count by their parameters.
            limits: what a stage should hold, unless the user cuts; where no cut keeps them a note says so.
            agreement: workers that all have to cut alike, such as those of all replicas; None: those of `group`.
            timeout_s: how long NCCL waits for a message; Gloo waits as long as `group` says.
            before_last_backward: called with a stage just before its last backward pass of a step.
            is_exact: whether every micro-batch has the gradients of the whole model, to the last bit.

        Raises:
            ModelError: the model cannot be cut, or not into as many stages; or not exactly.
            JobError: an invalid schedule, or invalid names in `cuts`.
        """
        _check_schedule(spec)
        self._spec = spec
        self._device = device
        self._before_last_backward = before_last_backward
        self._dtype = statistics_dtype(model)
        self._links = links = StageLinks(group, spec.stages_per_worker, device, timeout_s, is_exact=is_exact)
        place = place_of(model)
        example = None if example is None else example.on(place)
        recording = record_sequential(model) if example is None else record(model, example)
        self._calls = Calls(model, device)
        cut = _agreed_cut(recording, spec, limits or StageLimits(), links.num_stages, agreement or group)
        self._draws = cut.draws
        self.cuts = tuple(recording.name(start) for start in cut.starts[1:])
        """The layers that begin a stage, all but the first's; such as `PipelineSpec.cuts` takes."""
        self.notes = (
            f"the model is cut into {links.num_stages} stages on {links.num_workers} workers, before "
            + ", ".join(self.cuts),
            *cut.notes,
        )
        everywhere = stages_of(recording, cut.starts)
        self._stages = {n: stage for n, stage in enumerate(everywhere) if links.owner(n) == links.rank}
        if example is not None and place.type != "meta":
            check_stages(recording, everywhere, example, place)
        holders = holders_of(everywhere)
        self.shared_parameters = _shared_parameters(model, holders, links)
        """Parameters shared with other workers, and their ranks in the group; in the order of the model."""
        self.stages_that_share = {
            name: tuple(number for number, _ in holders[parameter])
            for name, parameter in model.named_parameters()
            if len(holders[parameter]) > 1
        }
        """The stages of each parameter that is in several, by its name in the model."""
        self._shared = SharedParameters(recording, cut.starts, holders) if is_exact else None
        self.places = _places(model, self._stages.values())
        """For each of this worker's parameters, by name, its place among those of the model."""
        self.num_parameters = len([*model.parameters()])
        """The number of parameters of the whole model."""
        own = list(self._stages.values())
        free_other_layers(model, own)
        self.stages: list[nn.Module] = [*own]
        """This worker's stages, in their order."""
        self.module: nn.Module = Stages(own, self._evaluate, frozenset(dir(model)))
        """This worker's stages as one module; called, it computes the whole model."""
        self._schedules: dict[int, Schedule] = {}

    def train_step(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        """Forward and backward of all micro-batches; a collective of all workers, with as many of them on each.

        Gradients are left in `.grad`: sums over micro-batches, and over workers where several have a parameter. In a
        pipeline that is exact, `MicroBatch.after_backward` takes those of each; those of a parameter that several
        stages have come together in the first of them.

        Returns:
            The sum of the weighted losses where the last stage is; 0 elsewhere.
        """
        losses = torch.zeros((), dtype=self._dtype, device=self._device)
        if micro_batches:
            step = Step(
                self._links,
                self._calls,
                self._stages,
                self._draws,
                self._schedule(len(micro_batches)),
                micro_batches,
                self._before_last_backward,
                losses,
                self._shared,
            )
            step.run()
            if self._shared is None:
                self._sum_shared_gradients()
        return losses

    @property
    def has_last_stage(self) -> bool:
        """Whether this worker computes the loss."""
        return self._links.num_stages - 1 in self._stages

    @property
    def rank_of_loss(self) -> int:
        """The rank in the group of the worker that computes the loss."""
        return self._links.owner(self._links.num_stages - 1)

    @property
    def is_elsewhere(self) -> frozenset[str]:
        """The names of this worker's parameters whose gradients come together on another."""
        return frozenset(name for name, ranks in self.shared_parameters.items() if ranks[0] != self._links.rank)

    def copy_from_first(self, gradients: Mapping[str, Tensor]) -> None:
        """Overwrite the gradients of shared parameters, by name, by those of the first worker that has each; a
        collective of all workers of the pipeline, with the same parameters."""
        names = [name for name in self.shared_parameters if name in gradients]
        self._links.copy_from_first([(gradients[name], self.shared_parameters[name]) for name in names])

    def forget_example(self) -> None:
        """Free what the model computed for the example, as soon as the stages are sharded."""
        for stage in self._stages.values():
            stage.forget_example()

    def _schedule(self, num_micro_batches: int) -> Schedule:
        if num_micro_batches not in self._schedules:
            self._schedules[num_micro_batches] = make_schedule(
                self._spec.schedule, self._links.num_workers, num_micro_batches, self._spec.stages_per_worker
            )
        return self._schedules[num_micro_batches]

    def _sum_shared_gradients(self) -> None:
        """Added in the order of ranks, so that they are the same everywhere."""
        named = dict(self.module.named_parameters(remove_duplicate=False))
        shared: list[tuple[Tensor, Sequence[int]]] = []
        for name, ranks in self.shared_parameters.items():
            parameter = named[name]
            if not parameter.requires_grad:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            mine = parameter.grad.to_local() if is_dtensor(parameter.grad) else parameter.grad
            shared.append((mine, ranks))
        self._links.sum_among(shared)

    @torch.no_grad()
    def _evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """The whole model: stage after stage, and the output for everybody."""
        links = self._links
        call = self._calls.call(args, kwargs, self.module.training)
        outbox = Outbox()
        values: Sequence[Any] = ()
        generators = call.generators
        for number, stage in self._stages.items():
            if number and links.num_workers > 1:
                form = links.receive_form(Destination(number), call.signature)
                values = form.filled(links.receive(form.tensors, links.owner(number - 1))())
                *values, generators = values
            set_generator_state(generators, self._device)
            values = stage(call.arguments, *values)
            generators = generator_state(self._device).to(self._device)
            if number < links.num_stages - 1 and links.num_workers > 1:
                links.send_values(Destination(number + 1), call.signature, [*values, generators], outbox)
        outbox.wait()
        return links.broadcast_last(values[0] if links.num_stages - 1 in self._stages else None, call.signature)


def _check_schedule(spec: PipelineSpec) -> None:
    if spec.stages_per_worker > 1 and spec.schedule in ("gpipe", "1f1b"):
        raise JobError(
            f"pipeline.stages_per_worker = {spec.stages_per_worker} needs pipeline.schedule = 'interleaved' or "
            f"'zero_bubble'; '{spec.schedule}' gives every worker one stage."
        )


@dataclass(frozen=True)
class _Cut:
    """The first layers of the stages, equal on all workers of all replicas."""

    starts: tuple[int, ...]
    """The first layer of every stage."""
    draws: tuple[bool, ...]
    """Whether each stage may draw random numbers."""
    notes: tuple[str, ...]


def _agreed_cut(
    recording: Recording, spec: PipelineSpec, limits: StageLimits, num_stages: int, agreement: dist.ProcessGroup
) -> _Cut:
    """The user's cut, or the one that is found by the first worker's times: layers take another time on each."""
    answer: Any = None
    if dist.get_rank(agreement) == 0:
        try:
            answer = _cut(recording, spec, limits, num_stages)
        except (ModelError, JobError) as problem:
            answer = {type(problem).__name__: str(problem)}
    answer = broadcast_object(answer, agreement, [_Cut])
    if isinstance(answer, _Cut):
        return answer
    ((kind, sentence),) = answer.items()
    raise {"ModelError": ModelError, "JobError": JobError}[kind](sentence)


def _cut(recording: Recording, spec: PipelineSpec, limits: StageLimits, num_stages: int) -> _Cut:
    notes: tuple[str, ...] = ()
    if spec.cuts:
        starts = recording.starts(spec.cuts, num_stages)
    else:
        starts, notes = find_cut(recording, num_stages, limits, place_of(recording.model))
    draws = recording.trained.draws or [True] * len(recording.layers)
    stops = [*starts[1:], len(recording.layers)]
    return _Cut(starts, tuple(any(draws[start:stop]) for start, stop in zip(starts, stops, strict=True)), notes)


def _shared_parameters(model: nn.Module, holders: Holders, links: StageLinks) -> dict[str, tuple[int, ...]]:
    """Parameters of this worker that others have too.

    Two names of one parameter, as where an embedding is tied to a classifier, are one parameter.
    """
    found: dict[str, tuple[int, ...]] = {}
    for parameter in model.parameters():
        ranks = {links.owner(number) for number, _ in holders[parameter]}
        own_names = [name for number, name in holders[parameter] if links.owner(number) == links.rank]
        if len(ranks) > 1 and own_names:
            found[own_names[0]] = tuple(sorted(ranks))
    return found


def _places(model: nn.Module, stages: Iterable[Stage]) -> dict[str, int]:
    places = {parameter: place for place, parameter in enumerate(model.parameters())}
    named = (one for stage in stages for one in stage.named_parameters(remove_duplicate=False))
    return {name: places[parameter] for name, parameter in named}
