"""Pipelines on real workers: what they compute is what one process does."""

from __future__ import annotations

import contextlib
import functools
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.models import MODELS
from paceline.parallel.live_bytes import LiveBytes
from paceline.parallel.pipeline import MicroBatch, ModelCall, Pipeline
from paceline.partition import StageLimits
from paceline.spec import PipelineSpec
from tests.kit.workers import join_world, run_ranks

ROOT = Path(__file__).parents[3]
Batch = tuple[Tensor, Tensor]
SIZES = {"lenet": (3, 3, 2, 2, 1), "gpt": (3, 3, 2, 2, 1), "resnet18": (2, 2, 1), "resnet50": (2, 2, 1)}
"""Ragged, and no multiple of the number of workers."""
NUM_STEPS = {"lenet": 10, "gpt": 10, "resnet18": 4, "resnet50": 3}


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


def build(name: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(1)
    every: dict[str, dict[str, Any]] = {
        "lenet": {"image_size": 16},
        "resnet18": {"stem": "cifar", "num_classes": 10},
        "resnet50": {"stem": "cifar", "num_classes": 10},
        "gpt": {"vocab_size": 17, "context": 8, "num_layers": 6, "num_heads": 2, "width": 8, "dropout": 0.2},
    }
    model: nn.Module = MODELS[name](**every[name])
    return model.to(dtype)


def batches(name: str, dtype: torch.dtype) -> list[Batch]:
    generator = torch.Generator().manual_seed(2)
    num_samples = sum(SIZES[name])
    if name == "gpt":
        tokens = torch.randint(17, (NUM_STEPS[name], num_samples, 9), generator=generator)
        return [(step[:, :-1], step[:, 1:]) for step in tokens]
    shape = (1, 16, 16) if name == "lenet" else (3, 8, 8)
    num_steps = NUM_STEPS[name]
    images = torch.randn(num_steps, num_samples, *shape, generator=generator, dtype=torch.float64).to(dtype)
    return list(zip(images, torch.randint(10, (num_steps, num_samples), generator=generator), strict=True))


def micro_batches(batch: Batch, step: int, sizes: Sequence[int]) -> Iterator[MicroBatch]:
    """As an engine makes them: a shard each, seeded by its number."""
    start = 0
    for shard, size in enumerate(sizes):
        part = (batch[0][start : start + size], batch[1][start : start + size])

        def before_forward(shard: int = shard) -> None:
            torch.default_generator.manual_seed(1000 * step + shard)

        yield MicroBatch(
            loss_of=lambda model, part=part, size=size: loss_fn(model, part) * (size / sum(sizes)),  # type: ignore[misc]
            before_forward=before_forward,
        )
        start += size


def finish(model: nn.Module) -> None:
    """Plain SGD."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(0.05 * parameter.grad)


def alone(name: str, dtype: torch.dtype) -> Iterator[tuple[nn.Module, float]]:
    """What one process does, step by step: the model with its gradients, before it is updated, and the loss.

    Rank 0 computes it and tells the others.
    """
    model = build(name, dtype)
    for step, batch in enumerate(batches(name, dtype)):
        model.zero_grad()
        total = torch.zeros((), dtype=dtype)
        for micro_batch in micro_batches(batch, step, SIZES[name]) if dist.get_rank() == 0 else ():
            micro_batch.before_forward()
            loss = micro_batch.loss_of(model)
            with micro_batch.backward():
                loss.backward()
            total += loss.detach()
        for parameter in model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.broadcast(parameter.grad, 0)
        dist.broadcast(total, 0)
        yield model, float(total)
        finish(model)
        for buffer in model.buffers():
            dist.broadcast(buffer, 0)


@contextlib.contextmanager
def joined() -> Iterator[dist.ProcessGroup]:
    world = join_world(30)
    try:
        yield world
    finally:
        dist.destroy_process_group()


def worst(mine: Tensor, expected: Tensor | None) -> float:
    """Largest difference, relative to the largest value."""
    assert expected is not None
    return float((mine - expected).abs().max() / expected.abs().max().clamp(min=1e-12))


def compare(name: str, dtype: torch.dtype, specs: Sequence[PipelineSpec]) -> list[dict[str, Any]]:
    """In one worker: how far each pipeline's losses, gradients and evaluation are from those of one process."""
    given = batches(name, dtype)
    with joined() as group:
        found = []
        for spec in specs:
            pipeline = Pipeline(build(name, dtype), group, spec, ModelCall((given[0][0][:3],)), torch.device("cpu"))
            far = {"loss": 0.0, "gradient": 0.0, "output": 0.0, "state": 0.0}
            for step, (whole, expected) in enumerate(alone(name, dtype)):
                pipeline.module.zero_grad()
                loss = pipeline.train_step(list(micro_batches(given[step], step, SIZES[name])))
                if dist.get_rank() == dist.get_world_size() - 1:
                    far["loss"] = max(far["loss"], abs(float(loss) / expected - 1))
                else:
                    assert float(loss) == 0
                gradients = {key: parameter.grad for key, parameter in whole.named_parameters()}
                for key, parameter in pipeline.module.named_parameters():
                    assert parameter.grad is not None
                    far["gradient"] = max(far["gradient"], worst(parameter.grad, gradients[key]))
                finish(pipeline.module)
            whole.eval()
            pipeline.module.eval()
            with torch.no_grad():
                far["output"] = worst(pipeline.module(given[0][0]), whole(given[0][0]))
            own, state = pipeline.module.state_dict(), whole.state_dict()
            far["state"] = max((worst(own[key].double(), state[key].double()) for key in own), default=0.0)
            found.append({"far": far, "names": set(own), "shared": pipeline.shared_parameters})
        return found


ALL = (
    PipelineSpec("gpipe"),
    PipelineSpec("1f1b"),
    PipelineSpec("interleaved", stages_per_worker=2),
    PipelineSpec("zero_bubble"),
    PipelineSpec("zero_bubble", stages_per_worker=2),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype", "limit", "specs"),
    [
        ("lenet", torch.float32, 1e-6, ALL[:1]),
        ("gpt", torch.float64, 1e-10, ALL),
        ("resnet18", torch.float64, 1e-10, (PipelineSpec("zero_bubble"),)),
        ("resnet50", torch.float32, 1e-6, (PipelineSpec("1f1b"),)),
    ],
)
def test_a_pipeline_computes_what_one_process_does(
    name: str, dtype: torch.dtype, limit: float, specs: Sequence[PipelineSpec]
) -> None:
    by_rank = run_ranks(compare, 4, name, dtype, specs, timeout_s=110)
    for number, spec in enumerate(specs):
        results = [found[number] for found in by_rank]
        for rank, result in enumerate(results):
            assert all(far < limit for far in result["far"].values()), (spec, rank, result["far"])
        assert set().union(*(result["names"] for result in results)) == set(build(name, dtype).state_dict())
        if name == "gpt":
            assert results[0]["shared"] == results[3]["shared"] == {"tokens.weight": (0, 3)}


class Decoder(nn.Module):
    """Skips over blocks, takes a mask that the last stage needs, ties by two names, gives more than one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.positions = nn.Embedding(5, 4)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)) for _ in range(3)])
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, mask: Tensor) -> tuple[Tensor, int]:
        length = tokens.shape[1]
        first = x = self.embed(tokens) + self.positions(torch.arange(length))
        for block in self.blocks:
            x = x + block(x)
        x = x * mask.unsqueeze(-1)
        logits: Tensor = self.head(x + first)
        return logits, length


def decoder_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    # Drawn before the model is called: every stage has to see the same mask.
    mask = torch.rand(tokens.shape, dtype=torch.float64)
    logits, length = model(tokens, mask=mask)
    loss: Tensor = F.cross_entropy(logits.flatten(0, 1), tokens.flatten()) * length
    return loss


def seed(number: int) -> None:
    torch.default_generator.manual_seed(number)


def train_decoder(spec: PipelineSpec) -> dict[str, Tensor]:
    """In one worker: the gradients of its parameters after a step of two micro-batches of different lengths."""
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randint(7, (2, 5), generator=generator), torch.randint(7, (1, 3), generator=generator)]
    torch.manual_seed(0)
    model = Decoder().double()
    parts_of_batch = [
        MicroBatch(
            loss_of=lambda model, part=part: decoder_loss(model, part) * (len(part) / 3),  # type: ignore[misc]
            before_forward=functools.partial(seed, len(part)),
        )
        for part in parts
    ]
    with joined() as group:
        pipeline = Pipeline(model, group, spec, ModelCall((parts[0], torch.ones(2, 5).double())), torch.device("cpu"))
        for _ in range(2):  # the second time nobody says any more what is sent
            pipeline.module.zero_grad()
            loss = pipeline.train_step(parts_of_batch)
        return {"loss": loss} | {
            name: parameter.grad for name, parameter in pipeline.module.named_parameters() if parameter.grad is not None
        }


def one_decoder() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = Decoder().double()
    total = torch.zeros((), dtype=torch.float64)
    for part in (torch.randint(7, (2, 5), generator=generator), torch.randint(7, (1, 3), generator=generator)):
        torch.default_generator.manual_seed(len(part))
        loss = decoder_loss(model, part) * len(part) / 3
        loss.backward()
        total += loss.detach()
    gradients = {n: p.grad for n, p in model.named_parameters(remove_duplicate=False) if p.grad is not None}
    return {"loss": total} | gradients


@pytest.mark.parametrize(
    "spec",
    [
        PipelineSpec("1f1b", cuts=("blocks.1",)),
        PipelineSpec("zero_bubble", cuts=("positions",)),
        PipelineSpec("zero_bubble", stages_per_worker=2),
    ],
)
def test_skip_connections_ties_and_arguments_cross_any_cut(spec: PipelineSpec) -> None:
    first, last = run_ranks(train_decoder, 2, spec)
    expected = one_decoder()
    assert float(first.pop("loss")) == 0
    assert {"embed.weight"} <= set(first) and {"head.weight"} <= set(last)
    for name, value in {**first, **last}.items():
        assert worst(value, expected[name]) < 1e-12, name
    assert torch.equal(first["embed.weight"], last["head.weight"])


def twice(model: nn.Module, inputs: Tensor) -> Tensor:
    total: Tensor = (model(inputs) + model(inputs)).sum()
    return total


def never(_model: nn.Module, inputs: Tensor) -> Tensor:
    return inputs.sum()


def with_penalty(model: nn.Module, inputs: Tensor) -> Tensor:
    penalty = torch.stack([parameter.square().sum() for parameter in model.parameters()]).sum()
    total: Tensor = model(inputs).sum() + penalty
    return total


def with_slope(model: nn.Module, inputs: Tensor) -> Tensor:
    inputs = inputs.clone().requires_grad_()
    output = model(inputs)
    (slope,) = torch.autograd.grad(output.sum(), inputs, create_graph=True)
    total: Tensor = output.sum() + slope.square().sum()
    return total


def failing(model: nn.Module, inputs: Tensor) -> Tensor:
    output: Tensor = model(inputs)
    raise ZeroDivisionError(f"in the loss of {len(output)} samples")


def what_is_said(loss: str) -> str:
    """In one worker: the error a loss function ends in."""
    functions = {
        "twice": twice,
        "never": never,
        "failing": failing,
        "with penalty": with_penalty,
        "with slope": with_slope,
    }
    with joined() as group:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        pipeline = Pipeline(model, group, PipelineSpec(), ModelCall((torch.ones(1, 2),)), torch.device("cpu"))
        try:
            pipeline.train_step([MicroBatch(lambda model: functions[loss](model, torch.ones(1, 2)))] * 3)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "nothing"


def cut_within(memory_bytes: float) -> tuple[tuple[str, ...], bool]:
    """In one worker: before which layer a model with a large layer in front is cut, and whether that may not fit."""
    with joined() as group:
        model = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 8), *[nn.Linear(8, 8) for _ in range(2)])
        limits = StageLimits(memory_bytes=memory_bytes, copies_of_parameters=4.0, micro_batches_kept=(0.0, 0.0))
        pipeline = Pipeline(
            model, group, PipelineSpec(), ModelCall((torch.ones(2, 8),)), torch.device("cpu"), limits=limits
        )
        return pipeline.cuts, "No cut of this model into 2 stages fits into 0.00 GiB" in " ".join(pipeline.notes)


def test_a_model_is_cut_where_its_stages_fit() -> None:
    """Its two large layers, 2,304 and 2,080 bytes of parameters, are too large for one stage; then one of them is."""
    assert run_ranks(cut_within, 2, 4 * 3000.0) == [(("1",), False)] * 2
    assert [doubts for _, doubts in run_ranks(cut_within, 2, 4 * 2000.0)] == [True] * 2


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        ("twice", "calls the model twice"),
        ("never", "did not call the model"),
        ("with penalty", "uses the model's modules or parameters, of which a worker of a pipeline has a part"),
        ("with slope", "computes gradients by what it gives the model"),
    ],
)
def test_a_loss_function_that_does_not_fit_gets_a_sentence(loss: str, said: str) -> None:
    assert run_ranks(what_is_said, 2, loss)[1].startswith(f"ModelError: The loss function {said}")


def test_an_error_in_one_stage_ends_the_others_too() -> None:
    first, last = run_ranks(what_is_said, 2, "failing", timeout_s=20)
    assert last == "ZeroDivisionError: in the loss of 1 samples"
    assert first.startswith(("RuntimeError", "DistBackendError", "DistNetworkError"))


def peaks(spec: PipelineSpec, numbers: Sequence[int]) -> list[int]:
    """In one worker: the most bytes that are alive in a step of so many micro-batches, with messages of 40 kB."""
    inputs, found = torch.ones(10, 1000), []
    with joined() as group:
        model = nn.Sequential(*[nn.Linear(1000, 1000) for _ in range(4)])
        pipeline = Pipeline(model, group, spec, ModelCall((inputs,)), torch.device("cpu"))
        for number in (numbers[0], *numbers):  # first the forms of messages are exchanged
            with LiveBytes(is_real=True) as live:
                pipeline.train_step([MicroBatch(lambda model: model(inputs).mean()) for _ in range(number)])
            found.append(live.peak_bytes)
    return found[1:]


@pytest.mark.parametrize(
    "spec",
    [PipelineSpec("1f1b"), PipelineSpec("zero_bubble"), PipelineSpec("interleaved", 2)],
    ids=lambda spec: spec.schedule,
)
def test_messages_that_have_arrived_are_not_kept(spec: PipelineSpec) -> None:
    for few, many in run_ranks(peaks, 2, spec, (8, 40)):
        assert many < few + 40_000


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_workers_wait_as_little_as_the_simulation_says() -> None:
    command = [sys.executable, "-m", "benchmarks.pipeline", "--workers", "2", "--micro-batches", "4", "--rounds", "1"]
    ended = subprocess.run(
        [*command, "--wait-ms", "120"], cwd=ROOT, capture_output=True, text=True, timeout=330, check=True
    )
    rows = {row["schedule"]: row for row in map(json.loads, ended.stdout.splitlines())}
    assert rows["gpipe"]["formula"] == rows["gpipe"]["simulated"] == 0.8
    assert rows["interleaved"]["simulated"] > rows["gpipe"]["simulated"]
    for row in rows.values():
        # The waits are long, but a busy machine wakes nobody in time.
        assert 0.7 * row["simulated"] < row["efficiency"] < 1.02 * row["simulated"], row
