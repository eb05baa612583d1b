"""What holds for every reference model: published size, shapes, gradients, layouts, places of randomness."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from paceline.errors import ModelError
from paceline.models import MODELS, build
from paceline.models.efficientnet import VARIANTS, StochasticDepth
from paceline.spec import ModelSpec


@dataclass(frozen=True)
class Case:
    """A model at a size that a test can afford, and the shape of one of its inputs."""

    name: str
    input_shape: tuple[int, ...]
    options: dict[str, Any] = field(default_factory=dict)

    def build(self) -> nn.Module:
        return build(ModelSpec(self.name, self.options), num_classes=10)

    def batch(self, size: int) -> Tensor:
        if self.name == "gpt":
            return torch.randint(0, 256, (size, *self.input_shape))
        return torch.randn(size, *self.input_shape)


CASES = [
    Case("mlp", (1, 28, 28)),
    Case("mlp", (3, 5, 7), {"in_features": 105}),
    Case("lenet", (1, 28, 28)),
    Case("lenet", (3, 32, 32), {"in_channels": 3, "image_size": 32}),
    Case("alexnet", (3, 15, 15), {"stem": "cifar", "image_size": 15}),
    Case("cifarnet", (3, 17, 17)),
    Case("resnet20", (3, 8, 8)),
    Case("resnet18", (3, 16, 16), {"stem": "cifar"}),
    Case("resnet18", (3, 33, 33)),
    Case("efficientnet-b0", (1, 33, 33), {"in_channels": 1}),
    Case("gpt", (12,), {"num_layers": 2, "width": 32, "context": 16, "dropout": 0.1}),
]


def case_id(case: Case) -> str:
    return f"{case.name}-{'x'.join(map(str, case.input_shape))}"


every_case = pytest.mark.parametrize("case", CASES, ids=case_id)
# The large linear layers of AlexNet take seconds in float64; it has a smaller test of its own.
image_case = pytest.mark.parametrize(
    "case", [case for case in CASES if case.name not in ("gpt", "alexnet")], ids=case_id
)


def num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def dropouts(model: nn.Module) -> list[nn.Dropout | StochasticDepth]:
    return [module for module in model.modules() if isinstance(module, nn.Dropout | StochasticDepth)]


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("lenet", 129_068),
        ("alexnet", 61_100_840),
        ("resnet20", 269_722),
        ("resnet18", 11_689_512),
        ("resnet50", 25_557_032),
        ("efficientnet-b0", 5_288_548),
        ("efficientnet-b1", 7_794_184),
        ("efficientnet-b2", 9_109_994),
        ("efficientnet-b3", 12_233_232),
        ("efficientnet-b4", 19_341_616),
        ("efficientnet-b5", 30_389_784),
        ("efficientnet-b6", 43_040_704),
        ("efficientnet-b7", 66_347_960),
    ],
)
def test_models_have_their_published_size(name: str, expected: int) -> None:
    with torch.device("meta"):
        assert num_parameters(build(ModelSpec(name))) == expected


@pytest.mark.parametrize("name", [name for name in MODELS if name not in VARIANTS or name == "efficientnet-b0"])
def test_tensors_have_one_name_each_and_norms_are_ordinary(name: str) -> None:
    with torch.device("meta"):
        model = build(ModelSpec(name))
    tensors = list(model.state_dict(keep_vars=True).values())
    assert len({id(tensor) for tensor in tensors}) == len(tensors)
    for module in model.modules():
        if isinstance(module, _NormBase):
            assert type(module) is nn.BatchNorm2d
            assert module.affine
            assert module.track_running_stats


@pytest.mark.parametrize(
    "case",
    [
        *CASES,
        Case("resnet50", (3, 16, 16), {"stem": "cifar", "zero_init_residual": True}),
        Case("efficientnet-b0", (3, 32, 32), {"stem_stride": 1}),
    ],
    ids=case_id,
)
@pytest.mark.parametrize("size", [1, 3])
def test_a_step_gives_finite_logits_and_every_parameter_a_gradient(case: Case, size: int) -> None:
    model = case.build()
    logits = model(case.batch(size))
    outputs = (size, *case.input_shape, 256) if case.name == "gpt" else (size, 10)
    assert logits.shape == outputs
    assert logits.isfinite().all()
    torch.autograd.backward(logits.logsumexp(-1).mean())
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, name
            assert parameter.grad.isfinite().all(), name


def test_cifarnet_sees_images_and_their_mirror_images_alike_once_trained() -> None:
    case = Case("cifarnet", (3, 17, 17))
    model, batch = case.build(), case.batch(4)
    assert not torch.allclose(model(batch), model(batch.flip(-1)))
    model.eval()
    torch.testing.assert_close(model(batch), model(batch.flip(-1)))
    with pytest.raises(ModelError, match="3 channels, not of 1"):
        build(ModelSpec("cifarnet"), in_channels=1)


def test_cifarnet_has_its_fixed_and_identical_filters_when_its_layers_draw_again() -> None:
    """As those of a sharded model do that was built on the meta device."""
    model = build(ModelSpec("cifarnet"))
    again = copy.deepcopy(model)
    for layer in again.modules():
        reset = getattr(layer, "reset_parameters", None)
        if reset is not None:
            reset()
    assert isinstance(model.whiten, nn.Conv2d) and isinstance(again.whiten, nn.Conv2d)
    torch.testing.assert_close(again.whiten.state_dict(), model.whiten.state_dict())
    identity = again.get_submodule("stage2.conv1").weight
    assert isinstance(identity, Tensor)
    assert torch.equal(identity[:64], nn.init.dirac_(torch.empty(64, 64, 3, 3)))


@image_case
def test_channels_last_changes_nothing_but_the_layout(case: Case) -> None:
    model = case.build().double()
    for dropout in dropouts(model):
        dropout.p = 0.0
    images = case.batch(2).double()
    expected = model(images)
    torch.autograd.backward(expected.square().mean())

    other = copy.deepcopy(model)
    other.zero_grad()
    other = other.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    actual = other(images.contiguous(memory_format=torch.channels_last))
    torch.autograd.backward(actual.square().mean())

    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(gradients(other), gradients(model), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("case", [c for c in CASES if c.name.startswith(("res", "eff"))], ids=case_id)
def test_channels_last_survives_to_the_last_convolution(case: Case) -> None:
    model = case.build().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    layouts: dict[str, bool] = {}

    def note(name: str, image: Tensor) -> None:
        layouts[name] = image.is_contiguous(memory_format=torch.channels_last)

    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_pre_hook(lambda _module, inputs, name=name: note(name, inputs[0]))
    with torch.no_grad():
        model(case.batch(2).contiguous(memory_format=torch.channels_last))
    assert layouts
    assert [name for name, kept in layouts.items() if not kept] == []


@every_case
def test_training_draws_from_the_global_generator(case: Case) -> None:
    model = case.build()
    batch = case.batch(3)

    def logits(seed: int) -> Tensor:
        torch.manual_seed(seed)
        result: Tensor = model(batch)
        return result

    with torch.no_grad():
        first, again, other = logits(1), logits(1), logits(2)
    assert torch.equal(first, again)
    draws = any(dropout.p > 0 for dropout in dropouts(model))
    assert torch.equal(first, other) != draws


@every_case
@torch.no_grad()
def test_nothing_but_dropout_layers_draws(case: Case) -> None:
    model = case.build()
    batch = case.batch(2)
    before = torch.get_rng_state()
    model.eval()
    model(batch)
    assert torch.equal(torch.get_rng_state(), before)
    model.train()
    for dropout in dropouts(model):
        dropout.eval()
    model(batch)
    assert torch.equal(torch.get_rng_state(), before)


@every_case
def test_in_evaluation_a_sample_does_not_see_its_batch(case: Case) -> None:
    model = case.build().double().eval()
    batch = case.batch(3)
    batch = batch.double() if batch.is_floating_point() else batch
    with torch.no_grad():
        torch.testing.assert_close(model(batch)[1:2], model(batch[1:2]), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.name in ("mlp", "lenet", "resnet20", "gpt")], ids=case_id
)
def test_a_model_learns_a_handful_of_samples_by_heart(case: Case) -> None:
    model = case.build()
    for dropout in dropouts(model):
        dropout.p = 0.0
    batch = case.batch(4)
    classes = batch if case.name == "gpt" else torch.arange(4)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch).flatten(0, -2), classes.flatten())
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
