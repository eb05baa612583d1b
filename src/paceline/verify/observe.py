"""Runs a training script as it is, and records its first steps.

    python -m paceline.verify.observe SCRIPT.py ARGUMENTS …     (with PACELINE_TRACE_DIR and PACELINE_MAX_STEPS)

Everything is seen from outside: torch's global hooks tell of calls of modules and steps of optimizers, a
`TorchFunctionMode` of calls of `backward`, and hooks on parameters of the gradients of this worker's own samples. Batch
norm and dropout differ between workers with good reason, as they couple a worker's samples or draw random numbers: they
are switched off, so that they hide no other difference. The process ends after the steps asked for. A run of
`paceline.init` records its own steps, and ends itself.
"""

from __future__ import annotations

import functools
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
from paceline.measure.recorder import RunRecorder, difference, fingerprint, options_of, record_file, sample_digests
from paceline.measure.step_record import Fingerprints, StepRecord, write_steps
from paceline.tensors import tensors
from paceline.train.run import Run, recorded_by

_BATCH_NORMS = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d
_DROPOUTS = {F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.multi_head_attention_forward}
_ATTENTION_RATE = 4
"""Where the rate of dropout stands among the arguments of scaled_dot_product_attention, which has no signature."""
_RECURRENT = torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu
"""Their only floating argument is the rate of dropout."""
_WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Parts of parameters' names that come from wrappers."""
_LIBRARIES = "accelerate", "lightning", "transformers"
"""Libraries that read data in an order of their own."""
_SMALL = 0.01
"""The square of a gradient, relative to the mean of its tensor, whose update counts half."""
_PATIENCE_S = 3.0
"""How long a worker whose steps are recorded waits for the others before it makes a further step."""


class ScriptRecorder(TorchFunctionMode):
    """Records the steps of this process."""

    def __init__(self, path: Path, num_steps: int, num_workers: int) -> None:
        super().__init__()
        self._path, self._num_steps, self._num_workers = path, num_steps, num_workers
        self._depth = 0
        """How many modules are being called, each by the one before."""
        self._num_synced = 0
        """How many of them are batch norms over the samples of all workers."""
        self._is_in_backward = False
        self._in_backward = ExitStack()
        self._stepping: Optimizer | None = None
        """The optimizer that makes a step; it may wrap others."""
        self._models: list[nn.Module] = []
        """The modules with parameters that the script itself calls."""
        self._watched: dict[int, Tensor] = {}
        """Parameters whose gradients are seen, by id."""
        self._trained: set[int] = set()
        """The ids of the parameters of all optimizers that have made a step."""
        self._before: list[Tensor] = []
        """Copies of the weights, while the optimizer changes them."""
        self._gradients: list[list[float]] = []
        self._drawn_from = 0
        """The state of torch's generators as the first model was called since the last backward."""
        self._initial: Fingerprints = {}
        """Fingerprints of buffers and frozen parameters as their model was first called."""
        self._left: dict[int, list[list[float]]] = {}
        """Fingerprints of the weights as each optimizer left them."""
        self._is_low_precision = False
        self._step = StepRecord()
        self._steps: list[StepRecord] = []
        self._hooks = (
            register_module_forward_pre_hook(self._module_called),
            register_module_forward_hook(self._module_returned, with_kwargs=True, always_call=True),
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        )
        self._is_replaced = False

    def replaced_by_recorder_of(self, run: Run) -> RunRecorder:
        """What records a run of `paceline.init`, in the place of this."""
        self._is_replaced = True
        for hook in self._hooks:
            hook.remove()
        return RunRecorder(run)

    def _module_called(self, module: nn.Module, _arguments: Any) -> None:
        self._depth += 1
        self._num_synced += isinstance(module, nn.SyncBatchNorm)
        if self._depth > 1:
            return
        if self._is_in_backward:  # for what is computed again there, outside of this mode
            self._in_backward.enter_context(self)
            return
        if torch.is_grad_enabled():
            self._drawn_from = self._drawn_from or _generator_state()
            self._step.generator_state = self._step.generator_state or self._drawn_from
        if not any(module is one for one in self._models) and any(True for _ in module.parameters()):
            self._models.append(module)
            self._watch(self._all_tensors())
            if not _is_fsdp_1(module):
                self._initial |= {n: one for n, one in self._fixed_tensors().items() if n not in self._initial}

    def _module_returned(self, module: nn.Module, arguments: Any, *named_and_output: Any) -> None:
        """Torch leaves out the named arguments after an exception, such as the one by which activation checkpointing
        stops computing again."""
        self._depth -= 1
        self._num_synced -= isinstance(module, nn.SyncBatchNorm)
        if self._depth:
            return
        if self._is_in_backward:
            self._in_backward.close()
            return
        is_trained = torch.is_grad_enabled() and any(one.requires_grad for one in module.parameters())
        if not is_trained or len(named_and_output) < 2:
            return
        self._is_low_precision |= torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
        batch = _batch([*tensors((arguments, dict(named_and_output[0])))])
        self._step.samples += sample_digests(batch)
        self._step.columns += sample_digests(one.transpose(0, 1) for one in batch if one.dim() > 1)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if self._is_replaced:
            return func(*args, **named)
        if func in (Tensor.backward, torch.autograd.backward):
            return self._backward(func, args, named)
        if func in _DROPOUTS or func is F.batch_norm:
            bound = inspect.signature(func).bind(*args, **named)
            bound.apply_defaults()
            rate = "dropout_p" if func is F.multi_head_attention_forward else "p"
            if func is F.batch_norm:
                self._use_running_statistics(bound.arguments)
            elif bound.arguments["training"] and bound.arguments[rate]:
                self._switched_off("dropout")
                bound.arguments[rate] = 0.0
            args, named = bound.args, bound.kwargs
        elif func is F.scaled_dot_product_attention:
            rates = args[_ATTENTION_RATE : _ATTENTION_RATE + 1]
            if named.pop("dropout_p", 0.0) or any(rates):
                self._switched_off("dropout")
            args = (*args[:_ATTENTION_RATE], *(0.0 for _ in rates), *args[_ATTENTION_RATE + 1 :])
        elif func in _RECURRENT and any(isinstance(one, float) and one for one in args):
            self._switched_off("dropout")
            args = [0.0 if isinstance(one, float) else one for one in args]
        return func(*args, **named)

    def _use_running_statistics(self, arguments: dict[str, Any]) -> None:
        """Change the arguments of `batch_norm`."""
        if not arguments["training"] or self._num_synced:
            return
        self._switched_off("batch norm")
        arguments["training"] = False
        if arguments["running_mean"] is None:
            size = arguments["input"].shape[1]
            arguments["running_mean"] = arguments["input"].new_zeros(size)
            arguments["running_var"] = arguments["input"].new_ones(size)

    def _switched_off(self, layer: str) -> None:
        if torch.is_grad_enabled() and layer not in self._step.switched_off:
            self._step.switched_off.append(layer)

    def _backward(self, func: Callable[..., Any], args: Any, named: Mapping[str, Any]) -> Any:
        losses = [_full(one.detach()).double().sum() for one in tensors((args[:1], named.get("tensors", ())))]
        self._step.losses.append(float(sum(losses)))
        self._step.draws |= self._drawn_from not in (0, _generator_state())
        self._drawn_from = 0
        self._is_in_backward = True
        try:
            return func(*args, **named)
        finally:
            self._is_in_backward = False

    def _watch(self, parameters: Mapping[str, Tensor]) -> None:
        for name, one in parameters.items():
            if one.requires_grad and one.is_leaf and id(one) not in self._watched and not isinstance(one, DTensor):
                self._watched[id(one)] = one
                one.register_hook(functools.partial(self._add_gradient, name))

    def _add_gradient(self, name: str, gradient: Tensor) -> None:
        if not isinstance(gradient, DTensor):
            found, so_far = fingerprint(gradient), self._step.local_gradients
            added = [a + b for a, b in zip(so_far[name], found, strict=True)] if name in so_far else found
            self._step.local_gradients = {**so_far, name: added}

    def _before_step(self, optimizer: Optimizer, arguments: Any, named: Any) -> None:
        if self._stepping is not None:
            return
        self._stepping = optimizer
        with self._whole(optimizer) as parameters:
            self._before = [one.detach().clone() for one in parameters.values()]
            known = [] if arguments or named else [*parameters.values()]  # a closure computes the gradient later
            self._gradients = [_fingerprint(one.grad) for one in known]
        self._step.options = options_of(optimizer)

    def _after_step(self, optimizer: Optimizer, _arguments: Any, _named: Any) -> None:
        if len(self._steps) >= self._num_steps:
            self._end(0.0)
        if optimizer is not self._stepping:
            return
        self._stepping = None
        step, self._step = self._step, StepRecord()
        with self._whole(optimizer) as parameters:
            self._watch(parameters)
            before = {name: _fingerprint(one) for name, one in zip(parameters, self._before, strict=True)}
            left = self._left.get(id(optimizer))
            if left is None:
                step.initial_weights = before | ({} if self._steps else _in_order(self._initial))
            else:
                step.changes_before = {
                    name: difference(found, kept) for (name, found), kept in zip(before.items(), left, strict=True)
                }
            gradients = self._gradients or [_fingerprint(one.grad) for one in parameters.values()]
            step.gradients = dict(zip(parameters, gradients, strict=True))
            step.weights = {name: _fingerprint(one) for name, one in parameters.items()}
            self._left[id(optimizer)] = [*step.weights.values()]
            updates = map(_update, self._before, parameters.values())
            step.update = dict(zip(parameters, map(fingerprint, updates), strict=True))
            self._before = []
            step.buffers = self._fixed_tensors()
        self._steps.append(step)
        if len(self._steps) == self._num_steps:
            self.write()
            self._end(_PATIENCE_S)

    def _all_tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers of all models, by unique names, but for batch norm's statistics, which stand still."""
        found: dict[str, Tensor] = {}
        seen: set[int] = set()
        for model in self._models:
            seen |= {id(one) for part in model.modules() if isinstance(part, _BATCH_NORMS) for one in part.buffers()}
            for name, one in [*model.named_parameters(), *model.named_buffers()]:
                unique = ".".join(part for part in name.split(".") if part not in _WRAPPERS)
                while unique in found:
                    unique += "'"
                if id(one) not in seen:
                    seen.add(id(one))
                    found[unique] = one
        return found

    def _fixed_tensors(self) -> Fingerprints:
        """Fingerprints of what no optimizer changes: buffers, frozen parameters, models that average another one."""
        every, trained = self._all_tensors(), self._trained
        fixed = {n: t for n, t in every.items() if not t.requires_grad or (trained and id(t) not in trained)}
        return _in_order({name: _fingerprint(one) for name, one in fixed.items()})

    @contextmanager
    def _whole(self, optimizer: Optimizer) -> Iterator[dict[str, Tensor]]:
        """The optimizer's parameters by name, in its order; those of FSDP 1 are gathered, and are all of the model's.
        A collective where workers hold shards."""
        spread = [one for one in self._models if _is_fsdp_1(one)]
        with ExitStack() as stack, torch.no_grad():
            for model in spread:  # gradients are gathered too, where parameters are not flattened for good
                is_flat = any(name.endswith("_flat_param") for name, _ in model.named_parameters())
                stack.enter_context(
                    FullyShardedDataParallel.summon_full_params(model, writeback=False, with_grads=not is_flat)
                )
            names = {id(one): name for name, one in self._all_tensors().items()}
            held = [one for group in optimizer.param_groups for one in group["params"]]
            if spread:
                held = [one for model in self._models for one in model.parameters()]
            self._trained |= {id(one) for one in held}
            yield {names.get(id(one), f"parameter {number}"): one for number, one in enumerate(held)}

    def write(self) -> None:
        if self._is_replaced or self._path.exists():
            return
        dtypes = {one.dtype for model in self._models for one in model.parameters()}
        precision = "float64" if dtypes == {torch.float64} else "float32"
        if self._is_low_precision or dtypes & {torch.bfloat16, torch.float16}:
            precision = "bfloat16"
        partial = self._path.with_suffix(".part")
        libraries = [name for name in _LIBRARIES if name in sys.modules]
        write_steps(partial, {"precision": precision, "is_bitwise": False, "libraries": libraries}, self._steps)
        partial.rename(self._path)

    def all_have_recorded(self) -> bool:
        num_records = len(list(self._path.parent.glob("*.jsonl")))
        return len(self._steps) >= self._num_steps and num_records >= self._num_workers

    def _end(self, patience_s: float) -> None:
        """End this process once all workers have recorded their steps: until then, others may need it to go on with
        them. Returns if that takes longer than `patience_s`."""
        deadline = time.monotonic() + patience_s
        while not self.all_have_recorded():
            if time.monotonic() > deadline:
                return
            time.sleep(0.02)
        os._exit(0)


def _batch(given: list[Tensor]) -> list[Tensor]:
    """The first tensor that a model was called with, without padding: a wrapper may be called with targets too, the
    model that it wraps without. Empty if there is none; what another model has computed does not count."""
    found = [_full(one.detach()) for one in given if one.dim() > 0 and one.grad_fn is None]
    for mask in found[1:]:
        if mask.shape == found[0].shape and not mask.is_floating_point() and mask.min() >= 0 and mask.max() == 1:
            return [found[0] * mask]
    return found[:1]


def _update(before: Tensor, after: Tensor) -> Tensor:
    """The change of a whole parameter, smaller where its gradient is small: Adam makes as much of rounding, such as the
    gradient of an attention's key bias, as of any gradient."""
    change = _full(after.detach() - before)
    if after.grad is None:
        return change
    gradient = _full(after.grad).to_dense().abs().float()
    relative = (gradient / gradient.square().mean().sqrt()).nan_to_num(0.0).square()
    return change * relative / (relative + _SMALL)


def _fingerprint(tensor: Tensor | None) -> list[float]:
    return [] if tensor is None else fingerprint(_full(tensor))


def _in_order(found: Fingerprints) -> Fingerprints:
    """`found` in the order of its values: a library may call a model's parts one by one on one worker, and the whole
    model on several, where names differ."""
    return dict(sorted(found.items(), key=lambda item: item[1]))


def _generator_state() -> int:
    states = [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else ())]
    return zlib.crc32(b"".join(one.numpy().tobytes() for one in states))


def _is_fsdp_1(model: nn.Module) -> bool:
    return any(isinstance(one, FullyShardedDataParallel) for one in model.modules())


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def main() -> None:
    """Run the script that is named on the command line, and leave a record of its first steps."""
    script, *arguments = sys.argv[1:]
    facts = env.worker_facts()
    recorder = ScriptRecorder(record_file(facts.rank), env.value(env.MAX_STEPS, int) or 1, facts.world_size)
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    try:
        with recorder, recorded_by(recorder.replaced_by_recorder_of):
            runpy.run_path(script, run_name="__main__")
    except Exception as problem:
        trace = problem.__traceback__
        while trace and trace.tb_frame.f_code.co_filename != script:  # this module's frames, above those of the script
            trace = trace.tb_next
        if not recorder.all_have_recorded():  # else another worker has ended, while this one made a further step
            sys.excepthook(type(problem), problem.with_traceback(trace), trace)
            sys.exit(1)
    finally:
        recorder.write()


if __name__ == "__main__":
    main()
