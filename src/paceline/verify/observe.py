"""Runs a training script as it is, and records its first steps.

    python -m paceline.verify.observe SCRIPT.py ARGUMENTS …      (by the launcher, with what `request` returns)

Everything is seen from outside, by torch's global hooks: calls of modules, steps of optimizers, and, by a
`TorchFunctionMode`, calls of `backward` and of dropout. Nothing of the script is changed. The process ends after the
steps asked for. A run of `paceline.init` records its own steps, and ends itself.
"""

from __future__ import annotations

import atexit
import inspect
import os
import runpy
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from paceline import env
from paceline.containers import tensors
from paceline.fingerprints import fingerprints, options_of, sample_digests
from paceline.step_records import BATCH_NORM, DROPOUT, Fingerprints, StepRecord, write

_BATCH_NORMS = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d
_DROPOUTS: Mapping[Callable[..., Any], str] = {
    F.dropout: "p",
    F.dropout1d: "p",
    F.dropout2d: "p",
    F.dropout3d: "p",
    F.alpha_dropout: "p",
    F.multi_head_attention_forward: "dropout_p",
}
"""The parameter of each that is the rate."""
_ATTENTION_RATE = 4
"""Where the rate of dropout stands among the arguments of scaled_dot_product_attention, which has no signature."""
_WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module"})
"""Parts of parameters' names that come from wrappers."""
_PATIENCE_S = 30.0
"""How long a worker whose steps are recorded waits for the others."""


class Observer(TorchFunctionMode):
    """Records the steps of this process."""

    def __init__(self, path: Path, num_steps: int, num_workers: int, *, without_expected: bool = False) -> None:
        """
        Args:
            without_expected: whether batch norm and dropout, which differ between workers with good reason, are off.
        """
        super().__init__()
        self._path, self._num_steps, self._num_workers = path, num_steps, num_workers
        self._without_expected = without_expected
        self._depth = 0
        """How many modules are being called, each by the one before."""
        self._is_in_backward = False
        self._is_in_step = False
        self._models: list[nn.Module] = []
        """Those with parameters that the script itself calls."""
        self._is_low_precision = False
        self._step = StepRecord()
        self._steps: list[StepRecord] = []

    def begin(self) -> None:
        register_module_forward_pre_hook(self._module_called)
        register_module_forward_hook(self._module_returned, with_kwargs=True, always_call=True)
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        atexit.register(self._write)

    # --- what torch tells ---

    def _module_called(self, module: nn.Module, _arguments: Any) -> None:
        self._depth += 1
        if isinstance(module, _BATCH_NORMS) and module.training:
            self._saw(BATCH_NORM)
            if self._without_expected:
                module.eval()

    def _module_returned(self, module: nn.Module, arguments: Any, named: Mapping[str, Any], _output: Any) -> None:
        self._depth -= 1
        is_outermost = self._depth == 0 and not self._is_in_backward and torch.is_grad_enabled()
        if not is_outermost or not any(one.requires_grad for one in module.parameters()):
            return
        if not any(module is one for one in self._models):
            self._models.append(module)
        self._is_low_precision |= torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
        # The first tensor alone: a wrapper may be called with targets too, where the model it wraps is not.
        given = [one for one in tensors((arguments, dict(named))) if one.dim() > 0]
        self._step.samples += sample_digests(given[:1])
        self._step.drew_from = self._step.drew_from or zlib.crc32(torch.get_rng_state().numpy().tobytes())

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if func is Tensor.backward:
            self._step.losses.append(float(args[0].detach().double().sum()))
            self._is_in_backward = True
            try:
                return func(*args, **named)
            finally:
                self._is_in_backward = False
        if func in _DROPOUTS:
            bound = inspect.signature(func).bind(*args, **named)
            bound.apply_defaults()
            args, named = bound.args, bound.kwargs
            rate = _DROPOUTS[func]
            if bound.arguments["training"] and bound.arguments[rate]:
                self._saw(DROPOUT)
                bound.arguments[rate] = 0.0 if self._without_expected else bound.arguments[rate]
                args, named = bound.args, bound.kwargs
        elif func is F.scaled_dot_product_attention and (named.get("dropout_p") or args[_ATTENTION_RATE:]):
            args, named = self._attend(list(args), named)
        return func(*args, **named)

    def _attend(self, arguments: list[Any], named: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        rate = arguments[_ATTENTION_RATE] if len(arguments) > _ATTENTION_RATE else named["dropout_p"]
        if rate:
            self._saw(DROPOUT)
        if rate and self._without_expected:
            del arguments[_ATTENTION_RATE:]
            named["dropout_p"] = 0.0
        return arguments, named

    def _saw(self, layer: str) -> None:
        if torch.is_grad_enabled() and layer not in self._step.layers:
            self._step.layers.append(layer)

    # --- a step ---

    def _before_step(self, optimizer: Optimizer, arguments: Any, named: Any) -> None:
        if self._is_in_step or self._path.exists():  # of an optimizer that wraps another; of a paceline.init run
            return
        self._is_in_step = True
        with self._whole(optimizer) as parameters:
            self._step.weights_before = _fingerprints_of(parameters, lambda one: one)
            if not (arguments or named):  # else a closure computes the gradient
                self._step.gradients = _fingerprints_of(parameters, lambda one: one.grad)
        self._step.options = options_of(optimizer)

    def _after_step(self, optimizer: Optimizer, arguments: Any, named: Any) -> None:
        if not self._is_in_step:
            return
        self._is_in_step = False
        with self._whole(optimizer) as parameters:
            if arguments or named:
                self._step.gradients = _fingerprints_of(parameters, lambda one: one.grad)
            self._step.weights = _fingerprints_of(parameters, lambda one: one)
            buffers = {_clean(name): one for model in self._models for name, one in model.named_buffers()}
        self._step.buffers = fingerprints((name, _full(one)) for name, one in buffers.items())
        self._steps.append(self._step)
        self._step = StepRecord()
        if len(self._steps) == self._num_steps:
            self._end()

    @contextmanager
    def _whole(self, optimizer: Optimizer) -> Iterator[dict[str, Tensor]]:
        """The optimizer's parameters by name, in its order; those of FSDP 1 are gathered, and are all of the model's.
        A collective where workers hold shards."""
        spread = [one for one in self._models if any(isinstance(m, FullyShardedDataParallel) for m in one.modules())]
        with ExitStack() as stack, torch.no_grad():
            for model in spread:  # gradients are gathered too, where parameters are not flattened for good
                is_flat = any(name.endswith("_flat_param") for name, _ in model.named_parameters())
                stack.enter_context(
                    FullyShardedDataParallel.summon_full_params(model, writeback=False, with_grads=not is_flat)
                )
            names = {id(one): _clean(name) for model in self._models for name, one in model.named_parameters()}
            held = [one for group in optimizer.param_groups for one in group["params"]]
            if spread:
                held = [one for model in self._models for one in model.parameters()]
            yield {names.get(id(one), f"parameter {number}"): one for number, one in enumerate(held)}

    # --- the end ---

    def _write(self) -> None:
        if self._path.exists():
            return
        dtypes = {one.dtype for model in self._models for one in model.parameters()}
        precision = "float64" if dtypes == {torch.float64} else "float32"
        if self._is_low_precision or dtypes & {torch.bfloat16, torch.float16}:
            precision = "bfloat16"
        partial = self._path.with_suffix(".part")
        write(partial, {"precision": precision, "is_bitwise": False, "tp": 1}, self._steps)
        partial.rename(self._path)

    def _end(self) -> None:
        """End this process once all others have recorded their steps: they may wait for this one."""
        self._write()
        deadline = time.monotonic() + _PATIENCE_S
        while time.monotonic() < deadline and len(list(self._path.parent.glob("*.jsonl"))) < self._num_workers:
            time.sleep(0.05)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _fingerprints_of(parameters: Mapping[str, Tensor], read: Callable[[Tensor], Tensor | None]) -> Fingerprints:
    """Of what `read` finds of each; empty where it finds nothing."""
    found = {name: read(one) for name, one in parameters.items()}
    return {name: [] if one is None else fingerprints([(name, _full(one))])[name] for name, one in found.items()}


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _clean(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def main() -> None:
    script, *arguments = sys.argv[1:]
    folder = env.value(env.TRACE_DIR, Path)
    assert folder is not None
    facts = env.worker_facts()
    observer = Observer(
        folder / f"rank{facts.rank}.jsonl",
        env.value(env.MAX_STEPS, int) or 1,
        facts.world_size,
        without_expected=bool(env.text(env.WITHOUT_EXPECTED)),
    )
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    observer.begin()
    with observer:
        runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
