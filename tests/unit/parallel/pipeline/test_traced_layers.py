"""Models as sequences of layers: what is found in them, where they may be cut, and what is said when they cannot."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from paceline.errors import JobError, ModelError
from paceline.models import MODELS
from paceline.parallel.pipeline.layer_costs import measure_layers
from paceline.parallel.pipeline.stage import Stage, Stages
from paceline.parallel.pipeline.traced_layers import TracedLayers, trace

CPU = torch.device("cpu")


def names(traced: TracedLayers) -> list[str]:
    return [traced.name(number) for number in range(len(traced.layers))]


def run_in_stages(traced: TracedLayers, starts: list[int], *args: Any, training: bool = True) -> Any:
    """The model's output, stage after stage."""
    arguments = inspect.signature(traced.model.forward).bind(*args)
    arguments.apply_defaults()
    values: tuple[Any, ...] = ()
    for start, stop in zip(starts, [*starts[1:], len(traced.layers)], strict=True):
        values = Stage(traced, start, stop).train(training)(arguments.arguments, *values)
    return values[0]


@pytest.mark.parametrize("name", ["lenet", "resnet20", "gpt"])
def test_cut_anywhere_a_model_computes_the_same(name: str) -> None:
    torch.manual_seed(0)
    options: dict[str, dict[str, int]] = {
        "gpt": {"vocab_size": 11, "context": 6, "num_layers": 2, "num_heads": 2, "width": 8}
    }
    model = MODELS[name](**options.get(name, {})).eval()
    shape = (2, 1, 28, 28) if name == "lenet" else (2, 3, 16, 16)
    example = torch.randint(11, (2, 5)) if name == "gpt" else torch.randn(shape)
    traced = trace(model, (example,))
    assert all(traced.may_begin())
    with torch.no_grad():
        assert torch.equal(run_in_stages(traced, list(range(len(traced.layers))), example), model(example))
    stages = Stages([Stage(traced, 0, 2), Stage(traced, 2, len(traced.layers))], None)
    state = stages.state_dict()
    assert set(state) == set(model.state_dict())
    assert {name for name, _ in stages.named_parameters()} == {name for name, _ in model.named_parameters()}
    zeros = {key: torch.zeros_like(value) for key, value in state.items()}
    assert not stages.load_state_dict(zeros).missing_keys
    assert all(not parameter.any() for parameter in model.parameters())


class Decoder(nn.Module):
    """As many write them: asks for sizes, has arguments that may be left out, skips over blocks, ties by two names."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)) for _ in range(3)])
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, scale: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
        rows, length = tokens.size()
        assert length <= 9, "too long"
        first = x = self.embed(tokens) + torch.arange(length).view(1, length, 1)
        for block in self.blocks:
            x = x + block(x)
        if mask is not None:
            x = x * mask
        return {"logits": self.head(x + first * scale).view(rows, length, 7), "first": first}


def test_a_model_that_asks_for_sizes_and_skips_blocks_can_be_cut() -> None:
    model = Decoder()
    tokens, scale = torch.randint(7, (2, 5)), torch.tensor(0.5)
    traced = trace(model, (tokens, scale))
    assert traced.fixed == {"mask": None}
    expected = model(tokens, scale)
    starts = [number for number, allowed in enumerate(traced.may_begin()) if allowed]
    output = run_in_stages(traced, starts, tokens, scale)
    assert torch.equal(output["logits"], expected["logits"])
    assert torch.equal(output["first"], expected["first"])
    # The last stages still need what the first computed.
    assert len(traced.crossing(traced.starts(["blocks.2"], 2)[1])) > 1


class Refilled(nn.Module):
    """Changes in place what it computed earlier, and calls a module with buffers twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        y = self.second(x)
        x.add_(1)
        y = self.norm(self.last(self.norm(y)))
        z: Tensor = x + y
        return z


def test_what_changes_in_place_and_what_has_buffers_stays_together() -> None:
    traced = trace(Refilled(), (torch.randn(3, 4),))
    assert names(traced) == ["first", "second", "add_", "norm", "last", "norm", "add"]
    assert traced.may_begin() == [True, False, False, True, False, False, True]


class Blocks(nn.Module):
    """Four blocks and a head; what lies between them is the business of those below."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(4)])
        self.head = nn.Linear(8, 3)
        self.register_buffer("places", torch.linspace(0, 1, 32).view(4, 8))


class BySize(Blocks):
    """Needs Python's own numbers, none of which is the number of samples."""

    def forward(self, x: Tensor) -> Any:
        half = int(x.shape[1] * 0.5)
        for number in range(x.shape[1] // 2):
            x = torch.cat([self.blocks[number](x)[:, :half], x[:, half:]], 1) * float(x.shape[-1]) ** -0.5
        return self.head(x.view(*x.shape[:-1], 2, -1).flatten(1) / max(x.size(1), 3) + len(x.shape))


class WithConstants(Blocks):
    """Makes tensors, and takes a piece of a buffer."""

    def forward(self, x: Tensor) -> Any:
        x = x.masked_fill(x < 0, torch.finfo(x.dtype).min * 1e-38) + torch.zeros(x.shape[0], 8)
        x = x * torch.tensor(0.5) + self.get_buffer("places")[: x.shape[1] // 4].sum(0)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(_ctx: Any, *gradients: Tensor) -> Tensor:
        return -gradients[0]


class WithGradientsOfItsOwn(Blocks):
    def forward(self, x: Tensor) -> Any:
        first = self.blocks[0](x)
        with torch.no_grad():
            mean = first.mean(1, keepdim=True)
        reverse: Any = Reversed.apply
        return self.head(reverse(self.blocks[1](first - mean)))


class WithAutocast(Blocks):
    def forward(self, x: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            x = self.blocks[0](x)
        return self.head(x.float())


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


class WithDropout(Blocks):
    """Asks whether it is being trained, as functions are told; has a named tuple for its output."""

    def forward(self, x: Tensor) -> Pair:
        for block in self.blocks:
            x = F.dropout(block(x), 0.5, self.training) + torch.rand(x.shape[0], 1)
        return Pair(self.head(x), x)


@pytest.mark.parametrize("kind", [BySize, WithConstants, WithGradientsOfItsOwn, WithAutocast, WithDropout])
@pytest.mark.parametrize("training", [True, False])
def test_in_stages_a_model_computes_and_learns_the_same(kind: type[nn.Module], training: bool) -> None:
    torch.manual_seed(0)
    model = kind().train(training)
    traced = trace(model, (torch.randn(4, 8),))
    assert [module.training for module in model.modules()] == [training] * len(list(model.modules()))
    starts = [number for number, allowed in enumerate(traced.may_begin()) if allowed]
    batch = torch.randn(6, 8)  # another number of samples

    def outcome(call: Callable[[Tensor], Any]) -> list[Tensor]:
        torch.manual_seed(1)
        model.zero_grad()
        outputs = pytree.tree_leaves(call(batch))
        sum(output.square().sum() for output in outputs).backward()
        return [*outputs, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    whole = outcome(model)
    in_stages = outcome(lambda x: run_in_stages(traced, starts, x, training=training))
    assert len(whole) == len(in_stages) > 1
    assert all(map(torch.equal, whole, in_stages))


class ByValue(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.sum() > 0 else x


class ByNumber(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * float(x.sum())


class ByNumberOfSamples(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(len(x), 2) * 2


class ByMode(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x) if self.training else x


class ByType(nn.Module):
    def forward(self, x: Any) -> Any:
        return x * 2 if isinstance(x, Tensor) else x


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (ByValue(), "control flow"),
        (ByNumber(), "of a tensor's values"),
        (ByNumberOfSamples(), "the number of samples"),
        (ByMode(), "training and in evaluation"),
        (ByType(), "computes something else"),
    ],
)
def test_a_model_that_cannot_be_traced_gets_a_sentence(model: nn.Module, said: str) -> None:
    with pytest.raises(ModelError, match=f"{type(model).__name__} cannot be cut into stages.*{said}"):
        trace(model, (torch.ones(2, 2),))


def test_cuts_by_name() -> None:
    traced = trace(MODELS["resnet20"](), (torch.randn(1, 3, 8, 8),))
    starts = traced.starts(["stage1.1", "stage2", "head"], 4)
    assert [traced.name(start) for start in starts[1:]] == ["stage1.1", "stage2.0", "head.pool"]
    with pytest.raises(JobError, match=r"'stage2\.7'.*did you mean .*'stage2\.0'"):
        traced.starts(["stage2.7"], 2)
    with pytest.raises(JobError, match="order"):
        traced.starts(["stage3", "stage2"], 3)
    with pytest.raises(JobError, match="4 stages need 3"):
        traced.starts(["stage3"], 4)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_measuring_changes_nothing_and_finds_the_expensive_layer(device: str) -> None:
    with torch.device(device):
        model = nn.Sequential(
            nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4096), nn.Dropout(0.5), nn.Linear(4096, 8)
        )
    before = torch.get_rng_state()
    traced = trace(model, (torch.randn(16, 8),)) if device == "meta" else trace(model, (torch.ones(16, 8),))
    if device == "cpu":
        assert traced.draws == (False, False, False, True, False)
    costs = measure_layers(traced, torch.device(device))
    assert all(parameter.grad is None for parameter in model.parameters())
    if device == "cpu":
        assert torch.equal(before, torch.get_rng_state())
        norm = model[1]
        assert isinstance(norm, nn.BatchNorm1d) and norm.running_mean is not None and not norm.running_mean.any()
    assert costs[2].time_s > costs[0].time_s
    assert costs[2].parameter_bytes == 4 * (8 * 4096 + 4096)
    assert [cost.output_bytes for cost in costs] == [4 * 16 * 8, 4 * 16 * 8, 4 * 16 * 4096, 4 * 16 * 4096, 0]
