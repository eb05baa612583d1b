"""The stages of a model: each runs the model's own forward method, in which the blocks of other stages are absent."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn

from paceline.containers import tensors
from paceline.errors import ModelError
from paceline.parallel.block_calls import (
    BlockCall,
    BlockCalls,
    Call,
    Draw,
    ModelCall,
    Output,
    Returned,
    Skeleton,
    Source,
    Trace,
)
from paceline.parallel.blocks import blocks_of, copy_of_modules


@dataclass(frozen=True)
class CutTrace:
    """A forward pass of a model that is cut into stages."""

    calls: Sequence[BlockCall]
    returned: Returned
    """What the model returns."""
    stage_of: Sequence[int]
    """The stage of each call."""
    needs: Sequence[tuple[int, frozenset[Source]]]
    """What each call, and at last the model's output, needs; behind the number of its stage."""
    crossing: Sequence[Sequence[Output]]
    """What has to be sent from each stage to the next: outputs of its blocks, and of those before it."""

    @classmethod
    def of(cls, trace: Trace, starts: Sequence[str]) -> Self:
        """
        Args:
            starts: the blocks whose first calls begin the stages, but for the first one.

        Raises:
            ModelError: the model does not call these blocks in this order, or a later stage would draw other numbers.
        """
        stage_of: list[int] = []
        waiting = list(starts)
        for call in trace.calls:
            if waiting and call.path == waiting[0]:
                del waiting[0]
            stage_of.append(len(starts) - len(waiting))
        if waiting:
            raise ModelError(
                f"The model does not call {', '.join(starts)} in this order, so no stages can begin with them; choose "
                "other blocks (pipeline.cuts)."
            )
        needs = [*zip(stage_of, (call.needs for call in trace.calls), strict=True), (len(starts), trace.needs)]
        last_use: dict[Output, int] = {}
        for stage, source in ((stage, source) for stage, sources in needs for source in sources):
            if isinstance(source, Output):
                last_use[source] = max(last_use.get(source, 0), stage)
            elif isinstance(source, Draw) and stage_of[source.call] < stage and trace.calls[source.call].draws:
                raise ModelError(
                    f"The model draws random numbers behind '{trace.calls[source.call].path}', outside of its blocks, "
                    "and uses them in another stage; draw them in a module of their own, such as nn.Dropout, or cut "
                    "elsewhere (pipeline.cuts)."
                )
        crossing = [
            [output for output, last in sorted(last_use.items()) if stage_of[output.call] <= stage < last]
            for stage in range(len(starts))
        ]
        return cls(trace.calls, trace.returned, stage_of, needs, crossing)

    def form_of(self, output: Output) -> Tensor:
        return self.calls[output.call].returned.forms[output.place]

    def paths(self, stage: int) -> set[str]:
        """The blocks that a stage calls."""
        return {call.path for call, own in zip(self.calls, self.stage_of, strict=True) if own == stage}

    def parameters(self, stage: int) -> set[str]:
        """The names of the parameters that a stage uses between blocks."""
        return {source for own, needs in self.needs if own == stage for source in needs if isinstance(source, str)}

    def can_split(self, stage: int) -> bool:
        """Whether all that leaves a stage follows from what arrives: torch finds the gradients of other parameters only
        where it computes those of inputs and of parameters at once."""
        if stage == 0:
            return True
        follows: set[Source] = set(self.crossing[stage - 1])
        for number, (own, needs) in enumerate(self.needs[:-1]):
            if own == stage and not follows.isdisjoint(needs):
                follows |= {Output(number, place) for place in range(len(self.calls[number].returned.forms))}
        leaving = self.crossing[stage] if stage < len(self.crossing) else self.needs[-1][1]
        return follows.issuperset(one for one in leaving if isinstance(one, Output))


class _NextStageError(BaseException):
    """The first block of the next stage is called; not an Exception, which a model might catch."""


@dataclass
class StagePass:
    """A forward pass of one stage: answers the calls of the model's blocks."""

    call: ModelCall
    cut: CutTrace
    stage: int
    device: torch.device
    leave: Callable[[Output, Tensor], Tensor]
    """Called with what leaves the stage as soon as it is there, which is then what it returns."""
    seed_block: Callable[[str], None]
    """Called with the path of a block of an earlier stage where that is called."""

    def run(self, calls: BlockCalls, forward: Callable[..., Any], arrived: Sequence[Tensor]) -> Any:
        """
        Args:
            forward: the model's method.
            arrived: what the stage before has sent.

        Returns:
            What the model returns, from the last stage; from others a list of what leaves.
        """
        self._is_trained = torch.is_grad_enabled()
        crossing = self.cut.crossing
        self._arrived = dict(zip(crossing[self.stage - 1], arrived, strict=True)) if self.stage else {}
        self._leaving = crossing[self.stage] if self.stage < len(crossing) else ()
        self._left = {one: self.leave(one, self._arrived[one]) for one in self._leaving if one in self._arrived}
        self._number = -1
        try:
            with calls.observed_by(self._answer):
                returned = forward(*self.call.args, **self.call.kwargs)
        except _NextStageError:
            return [self._left[output] for output in self._leaving]
        if self.stage < len(crossing) or self._number + 1 < len(self.cut.calls):
            raise self._other_order()
        return returned

    def _answer(self, path: str, block: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._number += 1
        number = self._number
        if number >= len(self.cut.calls) or self.cut.calls[number].path != path:
            raise self._other_order()
        own, returned = self.cut.stage_of[number], self.cut.calls[number].returned
        if own > self.stage:
            raise _NextStageError
        outputs = [Output(number, place) for place in range(len(returned.forms))]
        if own < self.stage:
            self.seed_block(path)
            return returned.filled([self._value(one, form) for one, form in zip(outputs, returned.forms, strict=True)])
        if self._is_trained and self.cut.calls[number].is_trained and not torch.is_grad_enabled():
            raise ModelError(
                f"'{path}' has trained parameters and is called without gradients: freeze them "
                "(requires_grad_(False)), and checkpoint activations by checkpoint(..., use_reentrant=False)."
            )
        value = block(*args, **kwargs)
        for output, form, leaf in zip(outputs, returned.forms, tensors(value, in_objects=True), strict=True):
            if output in self._leaving:
                if leaf.shape != form.shape or leaf.dtype != form.dtype:
                    raise ModelError(
                        f"'{path}' gives the next stage {leaf.dtype} of shape {tuple(leaf.shape)}, and {form.dtype} of "
                        f"shape {tuple(form.shape)} with weights of zeros: cut the model elsewhere (pipeline.cuts), "
                        "where no tensor plan divides what is sent and no shape follows from values."
                    )
                self._left[output] = self.leave(output, leaf)
        return value

    def _value(self, output: Output, form: Tensor) -> Tensor:
        """What an earlier stage has sent, or zeros in place of what nothing in this stage or a later one needs."""
        arrived = self._arrived.get(output)
        return torch.zeros_like(form, device=self.device) if arrived is None else arrived

    def _other_order(self) -> ModelError:
        return ModelError(
            "The model calls its blocks in another order than in a pass before with inputs of the same shapes; in a "
            "pipeline it has to be the same: choose another strategy."
        )


@dataclass(frozen=True)
class Held:
    """What a stage holds of a model."""

    paths: Set[str]
    """Its blocks."""
    between: Mapping[str, nn.Parameter]
    """Parameters that it uses outside of blocks, by name."""
    parameters: Collection[nn.Parameter]
    """These, and those of the blocks."""

    @classmethod
    def of(cls, model: nn.Module, paths: Set[str], names: Collection[str]) -> Self:
        blocks = blocks_of(model)
        between = {name: model.get_parameter(name) for name in names}
        of_blocks = {parameter for path in paths for parameter in blocks[path].parameters()}
        return cls(paths, between, of_blocks | {*between.values()})


def stage_module(model: nn.Module, skeleton: Skeleton, held: Held) -> nn.Module:
    """A stage as a copy of the model with the same blocks and parameters, under their names.

    Blocks of other stages are the skeleton's: they have a block's attributes, such as its configuration, and neither
    parameters nor buffers, but for parameters that the model uses outside of them. Its forward method is called with a
    `StagePass` and what arrives.
    """
    blocks = blocks_of(model)
    absent = {path: block for path, block in blocks_of(skeleton.model).items() if path not in held.paths}
    between = {id(skeleton.model.get_parameter(name)): parameter for name, parameter in held.between.items()}
    replaced: dict[int, Any] = {id(one): one for one in (*model.parameters(), *model.buffers(), skeleton.calls)}
    replaced |= {id(one): between.get(id(one), one) for one in skeleton.model.parameters()}
    replaced |= {id(block): block for block in blocks.values()}
    replaced |= {id(blocks[path]): copy_of_modules(block, replaced) for path, block in absent.items()}
    stage = copy_of_modules(model, replaced)
    for module in set(stage.modules()) - {module for path in held.paths for module in blocks[path].modules()}:
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter not in held.parameters:
                delattr(module, name)
                setattr(module, name, _nothing_like(parameter, skeleton.device))
    for path in absent:
        for module in stage.get_submodule(path).modules():
            for name, buffer in list(module.named_buffers(recurse=False)):
                delattr(module, name)
                setattr(module, name, buffer)
    forward = stage.forward
    stage.forward = lambda stage_pass, *arrived: stage_pass.run(skeleton.calls, forward, arrived)
    return stage


def _nothing_like(parameter: Tensor, device: torch.device) -> Tensor:
    return torch.zeros((), dtype=parameter.dtype, device=device).expand(parameter.shape)


def free_others(model: nn.Module, held: Collection[nn.Parameter]) -> None:
    """Free the parameters of `model` that are in none of this worker's stages."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter not in held:
                setattr(module, name, nn.Parameter(_nothing_like(parameter, parameter.device), requires_grad=False))


# --- what scripts are given in place of the model, of which no worker has all ---


class _InPartsError(ModelError, AttributeError):
    """The whole model has this attribute, its stages do not; an `AttributeError`, so that `hasattr` is False."""


def _in_parts(used: str) -> _InPartsError:
    return _InPartsError(
        f"The script uses {used}, of which a worker of a pipeline has a part. Let a loss function call the model "
        "itself (an L2 penalty is the optimizer's weight_decay); elsewhere reach into it before run.prepare, take "
        "run.whole_state() for its weights, or choose another strategy."
    )


Answer = Callable[[tuple[Any, ...], dict[str, Any]], Any]
"""What a call of the model returns, from its positional and keyword arguments."""


class Stages(nn.Module):
    """The stages of one worker as one module, with the names of the whole model.

    Called, it is the whole model, for evaluation: a collective of all workers of the pipeline, each of which gets the
    output. A loss function that calls it gets an answer of the stage that computes.
    """

    def __init__(self, stages: Sequence[nn.Module], whole: Answer, skeleton: nn.Module) -> None:
        """
        Args:
            whole: computes the whole model.
            skeleton: has the attributes of the model, such as its configuration.
        """
        super().__init__()
        self._own_stages = nn.ModuleList(stages)
        self._whole = whole
        self._skeleton = (skeleton,)
        self._answers: list[Answer] | None = None
        """What is left of them to a loss function; None: none runs."""

    @contextmanager
    def answering(self, answer: Answer) -> Iterator[None]:
        """A context in which a loss function may call the model once, and may not look into it."""
        self._answers = [answer]
        try:
            yield
        finally:
            self._answers = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._answers is None:
            return self._whole(args, kwargs)
        if not self._answers:
            raise ModelError(
                "The loss function calls the model twice; in a pipeline it can do so once: put both halves into one "
                "batch, or choose another strategy."
            )
        return self._answers.pop()(args, kwargs)

    def __getitem__(self, index: Any) -> NoReturn:
        raise _in_parts(f"model[{index!r}]")

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            value = getattr(vars(self)["_skeleton"][0], name)
            if callable(value) or isinstance(value, Tensor):
                raise _in_parts(f"model.{name}") from None
            return value

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        if self._answers is not None:  # a penalty on parameters would be one on a part of them
            raise _in_parts("the model's modules or parameters")
        memo = set() if memo is None else memo
        yield prefix, self
        for stage in self._own_stages:
            yield from stage.named_modules(memo, prefix, remove_duplicate)

    def state_dict(self, *, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        if self._answers is not None:
            raise _in_parts("model.state_dict()")
        for stage in self._own_stages:
            destination = stage.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        return destination

    def load_state_dict(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise _in_parts("model.load_state_dict()")
