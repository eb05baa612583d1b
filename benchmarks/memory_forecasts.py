"""What the planner forecasts that a worker holds, beside what it does hold, model by model and mesh by mesh.

    python -m benchmarks.memory_forecasts [--models lenet,resnet18] [--strategies "dp,fsdp2 x pp2"] [--workers 4]

Each model trains on CPU workers over Gloo, under each strategy, with and without recomputation. Measured is the most
that living tensors hold at once in any step after the first, on the worker where that is most: parameters, gradients,
the optimizer's state, what autograd keeps, messages, and what lives for a moment only. The forecast comes from a trace
on the meta device with two samples, by the formulas that choose meshes, and the stages of a pipeline are cut as they
say.

Tensors are what takes a GPU's memory (`torch.cuda.max_memory_allocated`), and the count repeats to some kilobytes. Not
in it: scratch memory of kernels, copies inside Gloo, and what a process has beside tensors. The resident set of a
worker grows by 45 to 70 MB more than its tensors in its first job, whatever the model, by libraries that load late, and
hardly in the next ones, which find the memory of the one before: it cannot judge forecasts of 3 to 60 MB. Torch's
profiler cannot either: it misses what other threads free, as Gloo's do with messages, and counts that for ever.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from tests.kit.workers import in_turn, run_ranks
from torch import Tensor, UntypedStorage, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import TensorDataset

from paceline.plan.memory import DeviceMemory, job_memory
from paceline.spec import Job, PipelineSpec, parse_mesh
from paceline.spec.forecast import ModelCost
from paceline.spec.job import ModelSpec
from paceline.tensors import is_dtensor, local_shard, tensors

TRACED_SAMPLES = 2
SHARD, SHARDS, STEPS = 4, 8, 3
JOB = Job().with_values(global_batch_size=SHARD * SHARDS, virtual_shards=SHARDS, epochs=STEPS, measure_noise=False)


@dataclass(frozen=True)
class Case:
    """A model and one sample's shape; of one number: that many tokens."""

    model: str
    options: dict[str, Any] = field(default_factory=dict)
    shape: tuple[int, ...] = (3, 32, 32)


_IMAGES = {"num_classes": 10, "in_channels": 3}
CASES = {
    "lenet": Case("lenet", {**_IMAGES, "image_size": 32}),
    "mlp": Case("mlp", {**_IMAGES, "image_size": 32}),
    "resnet20": Case("resnet20", _IMAGES),
    "resnet18": Case("resnet18", {**_IMAGES, "stem": "cifar"}),
    "efficientnet-b0": Case("efficientnet-b0", _IMAGES),
    "gpt": Case("gpt", {"vocab_size": 256, "context": 64, "num_layers": 4, "num_heads": 4, "width": 128}, (64,)),
}


STRATEGIES = (
    *("dp", "zero1", "zero2", "fsdp", "hsdp", "tp", "pp"),
    *("dp2 x pp2", "fsdp2 x tp2", "fsdp2 x pp2", "tp2 x pp2"),
)
Column = tuple[str, bool]
"""A way to spread a model, and whether blocks are computed again."""
COLUMNS = [(strategy, recompute) for recompute in (False, True) for strategy in STRATEGIES]
COLUMNS.remove(("dp", True))  # plain replicas cannot


@dataclass(frozen=True)
class Held:
    """Bytes on one worker."""

    peak: int
    state: int
    """Parameters, gradients and the optimizer's numbers, after a step."""


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors that operations of this thread have made and that are alive, each piece of memory
    once, after every operation: FSDP frees and takes memory under a living tensor."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._made: WeakValueDictionary[int, UntypedStorage] = WeakValueDictionary()
        self._given: WeakValueDictionary[int, UntypedStorage] = WeakValueDictionary()
        """What no operation has made that was seen here: samples, what a backend has received."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        given = list(tensors((args, kwargs or {})))
        if any(map(is_dtensor, given)):
            return NotImplemented  # the operations on the tensors inside of it come here too
        self._given |= {id(one): one for one in _storages(given) if id(one) not in self._made}
        result = func(*args, **(kwargs or {}))
        self._made |= {id(one): one for one in _storages(tensors(result)) if id(one) not in self._given}
        self.peak = max(self.peak, sum(storage.nbytes() for storage in self._made.values()))
        return result


def _storages(of: Iterable[Tensor]) -> list[UntypedStorage]:
    """Those that are in memory: shapes of DTensors are found on the meta device."""
    return [one.untyped_storage() for one in of if type(one) in (Tensor, nn.Parameter) and not one.is_meta]


def samples(case: Case, num_samples: int) -> TensorDataset:
    draw = torch.Generator().manual_seed(0)  # every worker must hold the same ones
    if len(case.shape) == 1:
        tokens = torch.randint(0, case.options["vocab_size"], (num_samples, *case.shape), generator=draw)
        return TensorDataset(tokens, torch.zeros_like(tokens))
    images = torch.randn(num_samples, *case.shape, generator=draw)
    return TensorDataset(images, torch.zeros(num_samples, dtype=torch.long))


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    inputs, wanted = batch
    return F.cross_entropy(model(inputs).flatten(0, -2), wanted.flatten())


def held(case: Case, column: Column, cuts: tuple[str, ...]) -> Held | str:
    """What this worker holds at most; a sentence where the model cannot be spread so."""

    import paceline
    from paceline import models
    from paceline.env import worker_facts
    from paceline.errors import PacelineError
    from paceline.spec import Plan
    from paceline.train.optim import build_optimizer

    (strategy, recompute), num_workers = column, worker_facts().world_size
    plan = Plan(
        world_size=num_workers,
        mesh=parse_mesh(strategy, num_workers),
        pipeline=PipelineSpec(cuts=cuts),
        recompute=recompute,
        algorithm="all_reduce",
        timeout_s=120,
    )
    data = samples(case, JOB.global_batch_size)
    spec = ModelSpec(case.model, case.options)
    try:
        with LiveBytes() as live, paceline.init(JOB, plan=plan, max_steps=STEPS) as run:
            model = models.build(spec)
            model, optimizer = run.prepare(model, build_optimizer(JOB.optim, model), example=data[:2][0])
            for number, batch in enumerate(run.batches(data)):
                if number == 1:
                    live.peak = 0
                run.step(batch, loss_fn)
            gradients = [parameter.grad for parameter in model.parameters()]
            numbers = [value for values in optimizer.state.values() for value in values.values()]
            kept = [one for one in (*model.parameters(), *gradients, *numbers) if isinstance(one, Tensor)]
            state = sum(local_shard(tensor).nbytes for tensor in kept)
    except PacelineError as problem:
        return str(problem)
    return Held(live.peak, state)


def traced(case: Case) -> ModelCost:
    from paceline.models import build
    from paceline.parallel.layer_costs import trace_model

    return trace_model(partial(build, ModelSpec(case.model, case.options)), samples(case, 1)[0][0], TRACED_SAMPLES)


def table(rows: Sequence[tuple[str, Column, DeviceMemory, Sequence[Held | str]]]) -> list[str]:
    """The lines of the table, and how many forecasts are how close."""
    lines = [
        "| model | spread by | state: forecast / measured, MB | peak: forecast / measured, MB | forecast / measured |",
        "|---|---|---|---|---|",
    ]
    ratios = []
    for name, (strategy, recompute), memory, of_workers in rows:
        column = f"{strategy}, recomputing" if recompute else strategy
        held_bytes = [one for one in of_workers if isinstance(one, Held)]
        if len(held_bytes) < len(of_workers):
            sentence = next(one for one in of_workers if isinstance(one, str))
            lines.append(f"| {name} | {column} | refused: {sentence} | | |")
            continue
        fullest = max(held_bytes, key=lambda one: one.peak)
        ratios.append(memory.total_bytes / fullest.peak)
        lines.append(
            f"| {name} | {column} | {memory.state_bytes / 1e6:.2f} / {fullest.state / 1e6:.2f} "
            f"| {memory.total_bytes / 1e6:.2f} / {fullest.peak / 1e6:.2f} | {ratios[-1]:.2f} |"
        )
    close = sum(0.9 <= ratio <= 1.1 for ratio in ratios)
    return [*lines, "", f"Within 10 %: {close} of {len(ratios)}; {min(ratios):.2f} to {max(ratios):.2f}."]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(CASES))
    parser.add_argument("--strategies", default=",".join(STRATEGIES))
    parser.add_argument("--workers", type=int, default=4)
    asked = parser.parse_args()
    columns = [column for column in COLUMNS if column[0] in asked.strategies.split(",")]
    forecasts, wanted = [], []
    for name in asked.models.split(","):
        cost = traced(CASES[name])
        for strategy, recompute in columns:
            memory = job_memory(JOB, cost, parse_mesh(strategy, asked.workers), recompute)
            forecasts.append((name, (strategy, recompute), memory))
            wanted.append((CASES[name], (strategy, recompute), tuple(stage[0].name for stage in memory.stages[1:])))
    found = run_ranks(in_turn, asked.workers, held, wanted, timeout_s=1800)
    rows = [(*row, of_workers) for row, of_workers in zip(forecasts, zip(*found, strict=True), strict=True)]
    print("\n".join(table(rows)))


if __name__ == "__main__":
    main()
