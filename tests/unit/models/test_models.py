"""The reference models: published sizes and shapes, weights drawn by the global seed alone, nothing random but
dropout, and an evaluation in which no sample sees another. A model is built by its name or import path; a mistake
is named."""

from __future__ import annotations

import copy
import math
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.errors import ModelError
from paceline.models import build
from paceline.spec.job import ModelSpec


@dataclass(frozen=True)
class Case:
    """A model at a size that a test can afford, and the shape of one of its inputs."""

    name: str
    input_shape: tuple[int, ...]
    options: dict[str, Any] = field(default_factory=dict)

    def build(self, seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        return build(ModelSpec(self.name, self.options), num_classes=10)

    def batch(self, size: int) -> Tensor:
        generator = torch.Generator().manual_seed(size)
        if self.name == "gpt":
            return torch.randint(0, 256, (size, *self.input_shape), generator=generator)
        return torch.randn(size, *self.input_shape, generator=generator)

    def __str__(self) -> str:
        return f"{self.name}-{'x'.join(map(str, self.input_shape))}"


CASES = [
    Case("mlp", (3, 6, 6), {"in_channels": 3, "image_size": 6, "dropout": 0.2}),
    Case("lenet", (1, 28, 28)),
    Case("lenet", (3, 16, 16), {"in_channels": 3, "image_size": 16}),
    Case("resnet20", (3, 8, 8)),
    Case("resnet18", (3, 16, 16), {"stem": "cifar"}),
    Case("resnet50", (3, 33, 33)),
    Case("efficientnet-b0", (1, 33, 33), {"in_channels": 1}),
    Case("efficientnet-b0", (3, 32, 32), {"stem_stride": 1}),
    Case("gpt", (12,), {"num_layers": 2, "width": 32, "context": 16, "dropout": 0.1}),
]
EVERY_CASE = pytest.mark.parametrize("case", CASES, ids=str)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("lenet", 129_068),
        ("resnet20", 269_722),  # He et al. 2015: 0.27 M
        ("resnet18", 11_689_512),  # these are torchvision's
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
def test_a_model_has_its_published_size(name: str, expected: int) -> None:
    with torch.device("meta"):
        assert sum(parameter.numel() for parameter in build(ModelSpec(name)).parameters()) == expected


def test_gpt2_small_has_its_published_size() -> None:
    options = {"num_layers": 12, "num_heads": 12, "width": 768, "context": 1024}
    with torch.device("meta"):
        model = build(ModelSpec("gpt", options), vocab_size=50_257)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == pytest.approx(124.4e6, rel=2e-3)  # Radford et al. 2019, with and without some biases


@pytest.mark.parametrize("name", ["lenet", "resnet20", "resnet18", "resnet50", "efficientnet-b0", "mlp", "gpt"])
def test_a_tensor_has_one_name_and_a_norm_is_torchs_own(name: str) -> None:
    with torch.device("meta"):
        model = build(ModelSpec(name))
    tensors = list(model.state_dict(keep_vars=True).values())
    assert len({id(tensor) for tensor in tensors}) == len(tensors)
    norms = [type(module) for module in model.modules() if "norm" in type(module).__name__.lower()]
    assert set(norms) <= {nn.BatchNorm2d, nn.LayerNorm}


@EVERY_CASE
@pytest.mark.parametrize("size", [1, 3])
def test_a_step_gives_finite_logits_and_each_parameter_a_gradient(case: Case, size: int) -> None:
    model = case.build()
    logits = model(case.batch(size))
    assert logits.shape == ((size, *case.input_shape, 256) if case.name == "gpt" else (size, 10))
    assert logits.isfinite().all()
    torch.autograd.backward(logits.logsumexp(-1).mean())
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name


@EVERY_CASE
def test_weights_follow_from_the_global_seed_alone(case: Case) -> None:
    first, again, other = (case.build(seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    drawn = [name for name in first if first[name].is_floating_point() and first[name].unique().numel() > 1]
    assert drawn and not any(torch.equal(first[name], other[name]) for name in drawn)


def silence(model: nn.Module) -> None:
    """Leave out what a training pass draws."""
    for module in model.modules():
        if isinstance(module, nn.Dropout) or "Depth" in type(module).__name__:
            module.eval()


@EVERY_CASE
@torch.no_grad()
def test_nothing_but_dropout_draws_and_it_draws_from_the_global_generator(case: Case) -> None:
    model, batch = case.build(), case.batch(3)
    start = copy.deepcopy(model.state_dict())

    def logits(seed: int) -> Tensor:
        model.load_state_dict(start)
        torch.manual_seed(seed)
        found: Tensor = model(batch)
        return found

    first, again, other = logits(1), logits(1), logits(2)
    assert torch.equal(first, again)
    draws = case.options.get("dropout", 0) > 0 or case.name.startswith("efficientnet")
    assert torch.equal(first, other) != draws
    silence(model)
    before = torch.get_rng_state()
    model(batch)
    model.eval()
    model(batch)
    assert torch.equal(torch.get_rng_state(), before)


@EVERY_CASE
@torch.no_grad()
def test_in_evaluation_a_sample_does_not_see_its_batch(case: Case) -> None:
    model, batch = case.build().double().eval(), case.batch(3)
    batch = batch.double() if batch.is_floating_point() else batch
    torch.testing.assert_close(model(batch)[1:2], model(batch[1:2]), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("case", [case for case in CASES if case.name not in ("gpt", "mlp")], ids=str)
def test_channels_last_changes_the_layout_and_nothing_else(case: Case) -> None:
    model, images = case.build().double(), case.batch(2).double()
    silence(model)
    other = copy.deepcopy(model).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    expected, actual = model(images), other(images.contiguous(memory_format=torch.channels_last))
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)
    for one, logits in ((model, expected), (other, actual)):
        torch.autograd.backward(logits.square().mean())
        assert one is model or all(p.grad is not None for p in one.parameters())
    for mine, wanted in zip(other.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, wanted.grad, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("name", "options", "image_size", "sides"),
    [
        ("resnet20", {}, 32, [32, 32, 16, 8]),
        ("resnet18", {}, 224, [56, 56, 28, 14, 7]),
        ("resnet50", {}, 224, [56, 56, 28, 14, 7]),
        ("resnet18", {"stem": "cifar"}, 32, [32, 32, 16, 8, 4]),
        ("efficientnet-b0", {}, 224, [112, 112, 56, 28, 14, 14, 7, 7]),
        ("efficientnet-b0", {"stem_stride": 1}, 32, [32, 32, 16, 8, 4, 4, 2, 2]),
    ],
)
def test_stages_shrink_the_image_as_published(
    name: str, options: dict[str, Any], image_size: int, sides: list[int]
) -> None:
    with torch.device("meta"):
        x, seen = torch.empty(1, 3, image_size, image_size), []
        for part in list(build(ModelSpec(name, options)).children())[:-1]:
            x = part(x)
            seen.append(x.shape[-1])
    assert seen == sides


def test_convolutions_of_a_resnet_begin_as_he_et_al_say() -> None:
    torch.manual_seed(0)
    for module in build("resnet18").modules():
        if isinstance(module, nn.Conv2d):
            fan_out = module.out_channels * module.kernel_size[0] * module.kernel_size[1]
            margin = 5 / math.sqrt(2 * module.weight.numel())  # five standard deviations of a spread of n draws
            assert module.weight.std().item() == pytest.approx(math.sqrt(2 / fan_out), rel=margin)


def test_efficientnets_drop_more_the_deeper_the_block() -> None:
    for name in ("efficientnet-b0", "efficientnet-b3"):
        with torch.device("meta"):
            model = build(name)
        depths: list[Any] = [module for module in model.modules() if "Depth" in type(module).__name__]
        rates = [module.p for module in depths]
        assert rates == sorted(rates) and 0 < rates[0] < rates[-1] < 0.2


@torch.no_grad()
def test_a_gpt_sees_no_token_that_comes_later() -> None:
    case = CASES[-1]
    model, tokens = case.build().eval(), case.batch(2)
    whole = model(tokens)
    changed = tokens.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % 256
    torch.testing.assert_close(model(changed)[:, :7], whole[:, :7])
    assert not torch.allclose(model(changed)[:, 7:], whole[:, 7:])


def test_lenet_takes_every_image_of_16_pixels_and_more() -> None:
    with torch.device("meta"):
        for image_size in range(1, 41):
            if image_size < 16:
                with pytest.raises(ModelError, match="16"):
                    build("lenet", image_size=image_size)
            else:
                model = build("lenet", image_size=image_size)
                assert model(torch.empty(2, 1, image_size, image_size)).shape == (2, 10)


@pytest.mark.parametrize("name", ["mlp", "lenet", "resnet18", "resnet20", "resnet50", "efficientnet-b0"])
def test_a_model_takes_the_facts_of_its_data_and_options_win_over_them(name: str) -> None:
    facts = {"num_classes": 7, "in_channels": 2, "image_size": 64, "vocab_size": 11, "context": 5}
    with torch.device("meta"):
        assert build(name, **facts)(torch.empty(3, 2, 64, 64)).shape == (3, 7)
        chosen = build(ModelSpec(name, {"num_classes": 3}), **facts)
        assert chosen(torch.empty(3, 2, 64, 64)).shape == (3, 3)
        text = build("gpt", **facts)
        assert text(torch.zeros(3, 5, dtype=torch.int64)).shape == (3, 5, 11)


# --- names and mistakes ---

USER_MODULE = """
from torch import nn

class Net(nn.Linear):
    def __init__(self, num_classes, width: "Undefined" = 3, *, depth=()):
        super().__init__(width, num_classes)
        self.depth = depth

def anything(**options):
    model = nn.Identity()
    model.options = options
    return model

def nothing():
    return None

def broken():
    raise RuntimeError("the user's own bug")

number = 3
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "user_nets.py").write_text(USER_MODULE)
    (tmp_path / "user_lacking.py").write_text("import no_such_dependency\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("user_nets", "user_lacking"):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.usefixtures("own")
def test_a_model_of_ones_own_gets_its_options_and_the_facts_it_asks_for() -> None:
    model: Any = build(ModelSpec("user_nets:Net", {"depth": [1, 2]}), num_classes=4, image_size=28)
    assert (model.in_features, model.out_features, model.depth) == (3, 4, [1, 2])
    anything: Any = build(ModelSpec("user_nets:anything", {"a-b": 1}), num_classes=4)
    assert anything.options == {"a-b": 1}


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("resnet81", {}, ["resnet81", "did you mean 'resnet18'"]),
        ("ResNet18", {}, ["did you mean 'resnet18'"]),
        ("efficientnet_b3", {}, ["did you mean 'efficientnet-b3'"]),
        ("zzzz", {}, ["zzzz", "lenet", "gpt", "package.module:build"]),
        ("mlp", {"hiden": 3}, ["mlp", "model.options.hiden", "'hidden'"]),
        ("efficientnet-b0", {"variant": "efficientnet-b1"}, ["model.options.variant"]),
        ("gpt", {"width": "wide"}, ["model.options.width", "'wide'", "whole number"]),
        ("gpt", {"num_layers": 0}, ["model.options.num_layers", "at least 1"]),
        ("gpt", {"num_layers": True}, ["model.options.num_layers", "whole number"]),
        ("gpt", {"width": 130}, ["130", "num_heads"]),
        ("mlp", {"dropout": 1.5}, ["model.options.dropout", "at most 1"]),
        ("efficientnet-b0", {"stem_stride": 3}, ["model.options.stem_stride", "3"]),
        ("resnet18", {"stem": "cifra"}, ["did you mean 'cifar'"]),
        ("user_nets:Net", {"widht": 3, "num_classes": 2}, ["model.options.widht", "'width'"]),
        ("user_nets:Net", {}, ["model.options.num_classes", "missing"]),
        ("no_such_package.nets:build", {}, ["no_such_package"]),
        ("user_nets:missing", {}, ["user_nets", "missing"]),
        ("user_nets:number", {}, ["user_nets:number", "int"]),
        ("user_nets:nothing", {}, ["user_nets:nothing", "NoneType"]),
        (":build", {}, [":build", "import path"]),
        ("../user_nets.py:Net", {}, ["import path"]),
    ],
)
@pytest.mark.usefixtures("own")
def test_a_mistake_is_named_in_one_line_with_what_is_valid(
    name: str, options: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ModelError) as caught:
        build(ModelSpec(name, options))
    assert "\n" not in str(caught.value)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    ("name", "error", "word"),
    [("user_lacking:build", ModuleNotFoundError, "no_such_dependency"), ("user_nets:broken", RuntimeError, "own bug")],
)
def test_a_bug_in_ones_own_module_keeps_its_traceback(name: str, error: type[Exception], word: str) -> None:
    with pytest.raises(error, match=word):
        build(ModelSpec(name))
