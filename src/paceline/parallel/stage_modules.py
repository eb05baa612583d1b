"""The stages of a model: each runs the model's own forward method, in which the blocks of other stages are absent."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn

from paceline.comm.buckets import views
from paceline.errors import ModelError
from paceline.parallel.block_calls import (
    BlockCall,
    Draw,
    ModelCall,
    Output,
    Skeleton,
    observed_by,
)
from paceline.parallel.blocks import blocks_of, copy_of_modules
from paceline.tensors import tensors


@dataclass(frozen=True)
class CutTrace:
    """A forward pass of a model that is cut into stages."""

    calls: Sequence[BlockCall]
    """The last one stands for what the model returns."""
    stage_of: Sequence[int]
    """The stage of each call."""
    crossing: Sequence[Mapping[Output, Tensor]]
    """What has to be sent from each stage to the next, and what it is like: outputs of its blocks, and of those before
    it. Of the last stage it is what the model returns."""

    @classmethod
    def of(cls, calls: Sequence[BlockCall], starts: Sequence[str]) -> Self:
        """
        Args:
            starts: the blocks whose first calls begin the stages, but for the first one.

        Raises:
            ModelError: the model does not call these blocks in this order, or a later stage would draw other numbers.
        """
        stage_of: list[int] = []
        waiting = list(starts)
        for call in calls:
            if waiting and call.path == waiting[0]:
                del waiting[0]
            stage_of.append(len(starts) - len(waiting))
        if waiting:
            raise ModelError(
                f"The model does not call {', '.join(starts)} in this order, so no stages can begin with them; choose "
                "other blocks (pipeline.cuts)."
            )
        last_use: dict[Output, int] = {}
        for stage, source in ((stage, one) for stage, call in zip(stage_of, calls, strict=True) for one in call.needs):
            if isinstance(source, Output):
                last_use[source] = stage
            elif isinstance(source, Draw) and stage_of[source.call] < stage and calls[source.call].draws:
                raise ModelError(
                    f"The model draws random numbers behind '{calls[source.call].path}', outside of its blocks, "
                    "and uses them in another stage; draw them in a module of their own, such as nn.Dropout, or cut "
                    "elsewhere (pipeline.cuts)."
                )
        forms = {one: calls[one.call].forms[one.place] for one in sorted(last_use)}
        crossing = [
            {one: form for one, form in forms.items() if stage_of[one.call] <= stage < last_use[one]}
            for stage in range(len(starts))
        ]
        returned = {Output(len(calls) - 1, place): form for place, form in enumerate(calls[-1].forms)}
        return cls(calls, stage_of, [*crossing, returned])

    def paths(self, stage: int) -> set[str]:
        """The blocks that a stage calls."""
        return {call.path for call in self._calls_of(stage)} - {""}

    def parameters(self, stage: int) -> set[str]:
        """The names of the parameters that a stage uses between blocks."""
        return {source for call in self._calls_of(stage) for source in call.needs if isinstance(source, str)}

    def can_split(self, stage: int) -> bool:
        """Whether all blocks of a stage follow from what arrives: torch finds the gradients of other parameters only
        where it computes those of inputs and of parameters at once."""
        own = self._calls_of(stage)
        return stage == 0 or all(any(isinstance(one, Output) for one in call.needs) for call in own)

    def _calls_of(self, stage: int) -> list[BlockCall]:
        return [call for call, own in zip(self.calls, self.stage_of, strict=True) if own == stage]


_OTHER_ORDER = (
    "The model calls its blocks in another order than in a pass before with inputs of the same shapes; in a pipeline "
    "it has to be the same: choose another strategy."
)


class _NextStageError(BaseException):
    """The first block of the next stage is called; not an Exception, which a model might catch."""


# --- what crosses a cut ---


Message = Mapping[Output, Tensor]
"""What a stage sends: of each tensor a vector, here without values on the meta device."""


def message_of(crossings: Sequence[Mapping[Output, Tensor]], before: Message | None = None) -> Message:
    """What a stage sends in a step, as long as its longest pass and the messages of the steps before need. `crossings`:
    what crosses the cut behind the stage in each of the step's passes: the same tensors, of any sizes."""
    found = {}
    for output, form in crossings[0].items():
        lengths = [len(before[output])] if before and output in before else []
        lengths += [crossing[output].numel() for crossing in crossings]
        has_gradient = form.is_floating_point() or form.is_complex()
        found[output] = torch.empty(max(lengths), dtype=form.dtype, device="meta", requires_grad=has_gradient)
    return found


def unpacked(form: Tensor, vector: Tensor) -> Tensor:
    """The tensor of this form that was sent, as a copy: what arrives may not be changed in place."""
    return views(vector[: form.numel()], [form])[0].clone()


# --- stages ---


@dataclass
class StagePass:
    """A forward pass of one stage: answers the calls of the model's blocks."""

    call: ModelCall
    cut: CutTrace
    stage: int
    device: torch.device
    leaving: Message
    """Empty: what the model returns is returned as it is, not in vectors."""
    seed_block: Callable[[str], None]
    """Called with the path of a block of an earlier stage where that is called."""

    def run(self, forward: Callable[..., Any], arrived: Sequence[Tensor]) -> Any:
        """
        Args:
            forward: the model's method.
            arrived: the vectors that the stage before has sent.

        Returns:
            The vectors that leave; without any, what the model returns.
        """
        self._is_trained = torch.is_grad_enabled()
        arriving = self.cut.crossing[self.stage - 1] if self.stage else {}
        vectors = zip(arriving.items(), arrived, strict=True)
        self._arrived = {output: unpacked(form, vector) for (output, form), vector in vectors}
        self._left = {one: self._packed(one, self._arrived[one]) for one in self.leaving if one in self._arrived}
        self._number = -1
        try:
            with observed_by(self._answer):
                returned = forward(*self.call.args, **self.call.kwargs)
        except _NextStageError:
            return [self._left[output] for output in self.leaving]
        if self.stage + 1 < len(self.cut.crossing) or self._number + 2 < len(self.cut.calls):
            raise ModelError(_OTHER_ORDER)
        if not self.leaving:
            return returned
        return [self._packed(*pair) for pair in zip(self.leaving, tensors(returned, in_objects=True), strict=True)]

    def _answer(self, path: str, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._number += 1
        made, own = self.cut.calls[self._number], self.cut.stage_of[self._number]
        if made.path != path:
            raise ModelError(_OTHER_ORDER)
        if own > self.stage:
            raise _NextStageError
        outputs = {Output(self._number, place): form for place, form in enumerate(made.forms)}
        if own < self.stage:
            self.seed_block(path)
            # What nothing in this stage or a later one needs is zeros.
            return made.returned(
                self._arrived[one] if one in self._arrived else torch.zeros_like(form, device=self.device)
                for one, form in outputs.items()
            )
        if self._is_trained and not torch.is_grad_enabled() and any(one.requires_grad for one in block.parameters()):
            raise ModelError(
                f"'{path}' has trained parameters and is called without gradients: freeze them "
                "(requires_grad_(False)), and checkpoint activations by checkpoint(..., use_reentrant=False)."
            )
        value = block(*args, **kwargs)
        for (output, form), leaf in zip(outputs.items(), tensors(value, in_objects=True), strict=True):
            if output in self.leaving:
                if leaf.shape != form.shape or leaf.dtype != form.dtype:
                    raise ModelError(
                        f"'{path}' gives the next stage {leaf.dtype} of shape {tuple(leaf.shape)}, and {form.dtype} of "
                        f"shape {tuple(form.shape)} with weights of zeros: cut the model elsewhere (pipeline.cuts), "
                        "where no tensor plan divides what is sent and no shape follows from values."
                    )
                self._left[output] = self._packed(output, leaf)
        return value

    def _packed(self, output: Output, tensor: Tensor) -> Tensor:
        """A tensor that leaves as a vector in the order of memory, padded."""
        strides, vector = self.cut.crossing[self.stage][output].stride(), self.leaving[output]
        values = tensor.permute(sorted(range(tensor.dim()), key=strides.__getitem__, reverse=True)).reshape(-1)
        # What a frozen stage sends gets a gradient too, so that messages do not depend on what is frozen.
        if vector.requires_grad and not values.requires_grad:
            values = values.detach().requires_grad_()
        # A copy: torch detaches what leaves a stage in place, which an operation may have saved or a view not allow.
        return torch.cat([values, values.new_zeros(len(vector) - len(values))])


def stage_module(
    model: nn.Module, skeleton: Skeleton, paths: Collection[str], held: Collection[nn.Parameter]
) -> nn.Module:
    """A stage as a copy of the model with the same blocks and parameters, under their names.

    Blocks of other stages are the skeleton's: they have a block's attributes, such as its configuration, and neither
    buffers nor parameters, but for those that the stage holds. Its forward method is called with a `StagePass` and the
    vectors that arrive.

    Args:
        paths: of the stage's blocks.
        held: the stage's parameters, those of its blocks among them.
    """
    blocks, absent = blocks_of(model), blocks_of(skeleton.model)
    replaced: dict[int, Any] = {id(absent.pop(path)): blocks[path] for path in paths}
    for zeros, parameter in zip(skeleton.model.parameters(), model.parameters(), strict=True):
        replaced[id(zeros)] = parameter if parameter in held else zeros
    in_absent = {buffer for block in absent.values() for buffer in block.buffers()}
    for copied, buffer in zip(skeleton.model.buffers(), model.buffers(), strict=True):
        replaced[id(copied)] = copied if copied in in_absent else buffer
    stage = copy_of_modules(skeleton.model, replaced)
    emptied = {module for path in absent for module in stage.get_submodule(path).modules()}
    for module in stage.modules():
        others = [named for named in module.named_parameters(recurse=False) if named[1] not in held]
        for name, value in [*others, *(module.named_buffers(recurse=False) if module in emptied else ())]:
            delattr(module, name)
            setattr(module, name, value.detach())
    forward = stage.forward
    stage.forward = lambda stage_pass, *arrived: stage_pass.run(forward, arrived)
    return stage


# --- what scripts are given in place of the model, of which no worker has all ---


class _InPartsError(ModelError, AttributeError):
    """The whole model has this attribute, its stages do not; an `AttributeError`, so that `hasattr` is False."""

    def __init__(self, used: str) -> None:
        super().__init__(
            f"The script uses {used}, of which a worker of a pipeline has a part. Let a loss function call the model "
            "itself (an L2 penalty is the optimizer's weight_decay); elsewhere reach into it before run.prepare, take "
            "run.whole_state() for its weights, or choose another strategy."
        )


Answer = Callable[[ModelCall], Any]
"""What a call of the model returns."""


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
        """A context in which a loss function has to call the model once, and may not look into it."""
        self._answers = [answer]
        try:
            yield
            if self._answers:
                raise ModelError("The loss function did not call the model it was given; in a pipeline it has to.")
        finally:
            self._answers = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._answers is None:
            return self._whole(ModelCall(args, kwargs))
        if not self._answers:
            raise ModelError(
                "The loss function calls the model twice; in a pipeline it can do so once: put both halves into one "
                "batch, or choose another strategy."
            )
        return self._answers.pop()(ModelCall(args, kwargs))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            value = getattr(vars(self)["_skeleton"][0], name)
            if callable(value) or isinstance(value, Tensor):
                raise _InPartsError(f"model.{name}") from None
            return value

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        if self._answers is not None:  # a penalty on parameters would be one on a part of them
            raise _InPartsError("the model's modules or parameters")
        memo = set() if memo is None else memo
        yield prefix, self
        for stage in self._own_stages:
            yield from stage.named_modules(memo, prefix, remove_duplicate)

    def state_dict(self, *, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        for stage in self._own_stages:
            destination = stage.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        return destination

    def load_state_dict(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise _InPartsError("model.load_state_dict()")
