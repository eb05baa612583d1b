"""Models as sequences of layers: what is found in them, where they may be cut, and what is said when they cannot."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from paceline.errors import JobError, ModelError
from paceline.models import MODELS
from paceline.parallel.pipeline.calls import ModelCall
from paceline.parallel.pipeline.check import check_stages
from paceline.parallel.pipeline.layer_costs import measure_layers
from paceline.parallel.pipeline.recorder import record
from paceline.parallel.pipeline.recording import Recording
from paceline.parallel.pipeline.stage import Stage, Stages, stages_of

CPU = torch.device("cpu")


def names(recording: Recording) -> list[str]:
    return [recording.name(number) for number in range(len(recording.layers))]


def run_in_stages(recording: Recording, starts: list[int], *args: Any, training: bool = True) -> Any:
    """The model's output, stage after stage."""
    call = ModelCall(args)
    values: tuple[Any, ...] = ()
    for start, stop in zip(starts, [*starts[1:], len(recording.layers)], strict=True):
        values = Stage(recording, start, stop).train(training)(call, *values)
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
    recording = record(model, ModelCall.of(example))
    assert all(recording.may_begin())
    with torch.no_grad():
        assert torch.equal(run_in_stages(recording, list(range(len(recording.layers))), example), model(example))
    stages = Stages([Stage(recording, 0, 2), Stage(recording, 2, len(recording.layers))], None, ())
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
    recording = record(model, ModelCall.of((tokens, scale)))
    expected = model(tokens, scale)
    starts = [number for number, allowed in enumerate(recording.may_begin()) if allowed]
    output = run_in_stages(recording, starts, tokens, scale)
    assert torch.equal(output["logits"], expected["logits"])
    assert torch.equal(output["first"], expected["first"])
    # The last stages still need what the first computed.
    assert len(recording.trained.crossing(recording.starts(["blocks.2"], 2)[1])) > 1


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
    recording = record(Refilled(), ModelCall.of(torch.randn(3, 4)))
    assert names(recording) == ["first", "second", "add_", "norm", "last", "norm", "add"]
    assert recording.may_begin() == [True, False, False, True, False, False, True]


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


class ByNumberOfSamples(Blocks):
    """Turns the number of samples into a Python number, and asks of what type a value is."""

    def forward(self, x: Any) -> Any:
        rows = [self.blocks[0](x[number]) for number in range(len(x))] if isinstance(x, Tensor) else []
        return self.head(self.blocks[1](torch.stack(rows).reshape(len(x), 8)))


class ByMode(Blocks):
    """Does more in training than in evaluation."""

    def forward(self, x: Tensor) -> Any:
        x = self.blocks[0](x)
        if self.training:
            x = x + torch.randn_like(x)
        return self.head(self.blocks[1](x))


class WithinBlocks(Blocks):
    """Writes what layers return into a tensor of its own, and into a row of that."""

    def forward(self, x: Tensor) -> Any:
        filled = torch.zeros(3, *x.shape, dtype=x.dtype)
        filled[0] = self.blocks[0](x)
        filled[1] = self.blocks[1](x)
        filled[2] += self.blocks[2](x)
        return self.head(self.blocks[3](filled.sum(0)))


class Checkpointed(Blocks):
    """Computes its blocks again in the backward pass, one way or the other."""

    def forward(self, x: Tensor) -> Any:
        for number, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=number % 2 == 0)
        return self.head(x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.kept = nn.Linear(8, 8), torch.zeros(())
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.linear(x).relu()
        y: Tensor = self.inner(self.kept)
        return y


class WithHooks(nn.Module):
    """A hook collects what a layer inside of each block returns, for the model's last layers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList([Block() for _ in range(3)]), nn.Linear(8, 3)
        self.found: list[Tensor] = []
        for block in self.blocks:
            block.get_submodule("linear").register_forward_hook(lambda _, _args, output: self.found.append(output))

    def forward(self, x: Tensor) -> Any:
        self.found.clear()
        for block in self.blocks:
            x = block(x)
        return self.head(x), torch.stack(self.found).sum(0)


class WithAttributes(WithHooks):
    """Reads what its blocks have left in an attribute."""

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        first: Any = self.blocks[0]
        return self.head(x + first.kept)


class WithPlaces(Blocks):
    """Has parameters of its own, which layers far from each other use."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Any:
        x = x * self.scale
        for block in self.blocks:
            x = block(x)
        return self.head(x * self.scale)


@pytest.mark.parametrize(
    "kind",
    [
        BySize, WithConstants, WithGradientsOfItsOwn, WithAutocast, WithDropout, ByMode, WithinBlocks, Checkpointed,
        WithHooks, WithPlaces,
    ],
)  # fmt: skip
@pytest.mark.parametrize("training", [True, False])
def test_in_stages_a_model_computes_and_learns_the_same(kind: type[nn.Module], training: bool) -> None:
    torch.manual_seed(0)
    model = kind().train(training)
    recording = record(model, ModelCall.of(torch.randn(4, 8)))
    assert [module.training for module in model.modules()] == [training] * len(list(model.modules()))
    starts = [number for number, allowed in enumerate(recording.may_begin()) if allowed]
    batch = torch.randn(6, 8)  # another number of samples

    def outcome(call: Callable[[Tensor], Any]) -> list[Tensor]:
        torch.manual_seed(1)
        model.zero_grad()
        outputs = pytree.tree_leaves(call(batch))
        sum(output.square().sum() for output in outputs).backward()
        return [*outputs, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    whole = outcome(model)
    in_stages = outcome(lambda x: run_in_stages(recording, starts, x, training=training))
    assert len(whole) == len(in_stages) > 1
    assert all(map(torch.equal, whole, in_stages))


class Opaque(nn.Module):
    """What it returns nobody can look into."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        return iter([self.linear(x)])


class WithOpaque(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.opaque = Opaque()

    def forward(self, x: Tensor) -> Any:
        return self.head(next(self.opaque(x)))


class Packed(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8)

    def forward(self, x: Tensor) -> Any:
        packed = nn.utils.rnn.pack_padded_sequence(x.unsqueeze(0), torch.ones(len(x), dtype=torch.long))
        return self.head(self.lstm(packed)[1][0])


class ByValue(Blocks):
    def forward(self, x: Tensor) -> Any:
        x = self.blocks[0](x)
        return self.head(x * 2 if x.sum() > 0 else x)


class ByNumber(Blocks):
    def forward(self, x: Tensor) -> Any:
        x = self.blocks[0](x)
        return self.head(x * float(x.sum()))


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (ByValue(), "cannot be cut into stages.*takes a Python value out of a tensor \\(bool\\)"),
        (ByNumber(), "cannot be cut into stages.*takes a Python value out of a tensor \\(float\\)"),
        (WithOpaque(), "cannot be cut into stages.*'opaque' returns a list_iterator, in which no tensors"),
        (Packed(), "cannot be cut into stages.*'lstm' takes or returns a packed sequence"),
        (WithAttributes(), "cannot be cut into stages.*'blocks.0' passes a tensor to 'add' by another way"),
        (nn.Linear(3, 3), "cannot be called with the example.*shapes"),
    ],
)
def test_a_model_that_cannot_be_cut_gets_a_sentence(model: nn.Module, said: str) -> None:
    with pytest.raises(ModelError, match=f"{type(model).__name__} {said}"):
        record(model, ModelCall.of(torch.ones(2, 8)))


def test_a_batch_for_which_other_layers_are_called_gets_a_sentence() -> None:
    model = ByNumberOfSamples()
    recording = record(model, ModelCall.of(torch.ones(2, 8)))
    with pytest.raises(ModelError, match=r"calls other layers for this batch .*'stack'.*'blocks\.0\.0'"):
        run_in_stages(recording, [0, len(recording.layers) - 1], torch.ones(3, 8))


class IntoViews(Blocks):
    """Writes what a layer returns into a part of a tensor, where nobody sees that the whole has changed."""

    def forward(self, x: Tensor) -> Any:
        filled = torch.zeros(2, *x.shape, dtype=x.dtype)
        filled[0].copy_(self.blocks[0](x))
        return self.head(self.blocks[1](filled.sum(0)))


class MasksItsInput(Blocks):
    """As whisper and wav2vec2 mask spectrograms, before any layer: in place, and by what a module keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.table = KeepsATable()

    def forward(self, x: Tensor) -> Any:
        x = x.clone()
        x[torch.arange(len(x)) % 2 == 1] = 0
        self.table(x)
        x = x.to(x.dtype) * self.table.signs
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class KeepsATable(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        self.signs = torch.arange(x.shape[1]).cos().to(x.dtype)
        return self.signs.abs()


def test_what_comes_before_the_first_layer_may_change_the_input_in_place() -> None:
    model = MasksItsInput()
    example = torch.randn(4, 8)
    recording = record(model, ModelCall.of(example))
    for start in range(1, len(recording.layers)):
        assert torch.equal(run_in_stages(recording, [0, start], example), model(example))


def test_stages_that_compute_something_else_are_noticed() -> None:
    example = ModelCall.of(torch.ones(2, 8))
    recording = record(IntoViews(), example)
    starts = recording.starts(["blocks.1"], 2)
    with pytest.raises(ModelError, match=r"IntoViews cannot be cut before blocks\.1\.0: .* computes something else"):
        check_stages(recording, stages_of(recording, starts), example, CPU)


def test_checking_stages_changes_nothing() -> None:
    model = WithDropout().train()
    example = ModelCall.of(torch.ones(2, 8))
    recording = record(model, example)
    stages = stages_of(recording, recording.starts(["blocks.2"], 2))
    before = torch.get_rng_state()
    check_stages(recording, stages, example, CPU)
    assert all(module.training for root in (model, *stages) for module in root.modules())
    assert torch.equal(before, torch.get_rng_state())


def test_arguments_are_given_as_a_tensor_a_tuple_or_a_mapping() -> None:
    one = torch.ones(2, 8)
    for example in (one, (one,), {"x": one}, UserDict(x=one)):
        assert [layer.name for layer in record(BySize(), ModelCall.of(example)).layers][-1] == "head"


def test_cuts_by_name() -> None:
    recording = record(MODELS["resnet20"](), ModelCall.of(torch.randn(1, 3, 8, 8)))
    starts = recording.starts(["stage1.1", "stage2", "head"], 4)
    assert [recording.name(start) for start in starts[1:]] == ["stage1.1", "stage2.0", "head.pool"]
    with pytest.raises(JobError, match=r"'stage2\.7'.*did you mean .*'stage2\.0'"):
        recording.starts(["stage2.7"], 2)
    with pytest.raises(JobError, match="order"):
        recording.starts(["stage3", "stage2"], 3)
    with pytest.raises(JobError, match="4 stages need 3"):
        recording.starts(["stage3"], 4)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_measuring_changes_nothing_and_finds_the_expensive_layer(device: str) -> None:
    with torch.device(device):
        model = nn.Sequential(
            nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4096), nn.Dropout(0.5), nn.Linear(4096, 8)
        )
    before = torch.get_rng_state()
    recording = record(model, ModelCall.of(torch.ones(16, 8)))
    if device == "cpu":
        assert recording.trained.draws == (False, False, False, True, False)
    costs = measure_layers(recording, torch.device(device))
    assert all(parameter.grad is None for parameter in model.parameters())
    if device == "cpu":
        assert torch.equal(before, torch.get_rng_state())
        norm = model[1]
        assert isinstance(norm, nn.BatchNorm1d) and norm.running_mean is not None and not norm.running_mean.any()
    assert costs[2].time_s > costs[0].time_s
    assert costs[2].parameter_bytes == 4 * (8 * 4096 + 4096)
    assert [cost.output_bytes for cost in costs] == [4 * 16 * 8, 4 * 16 * 8, 4 * 16 * 4096, 4 * 16 * 4096, 0]
