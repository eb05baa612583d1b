"""What is particular to each family."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from paceline.errors import ModelError
from paceline.models.alexnet import alexnet
from paceline.models.efficientnet import VARIANTS, MBConv, StochasticDepth, efficientnet, scaled_channels
from paceline.models.gpt import GPT
from paceline.models.lenet import lenet
from paceline.models.resnet import PaddedShortcut, Residual, resnet18, resnet20, resnet50


def test_lenet_brings_800_features_to_its_first_linear_layer() -> None:
    model = lenet()
    assert isinstance(model.fc1, nn.Linear)
    assert model.fc1.in_features == 800


@given(st.integers(1, 40))
def test_lenet_fits_every_image_or_says_why_not(image_size: int) -> None:
    with torch.device("meta"):
        if image_size < 16:
            with pytest.raises(ModelError, match="at least 16 x 16 pixels"):
                lenet(image_size=image_size)
        else:
            model = lenet(image_size=image_size)
            assert model(torch.empty(2, 1, image_size, image_size)).shape == (2, 10)


@pytest.mark.parametrize(("stem", "smallest"), [("imagenet", 63), ("cifar", 15)])
def test_alexnet_states_the_smallest_image_it_takes(stem: str, smallest: int) -> None:
    with torch.device("meta"):
        model = alexnet(image_size=smallest, stem=stem)  # type: ignore[arg-type]
        assert model(torch.empty(1, 3, smallest, smallest)).shape == (1, 1000)
        with pytest.raises(ModelError, match=f"at least {smallest} x {smallest} pixels"):
            alexnet(image_size=smallest - 1, stem=stem)  # type: ignore[arg-type]


def test_alexnet_takes_channels_last() -> None:
    model = alexnet(num_classes=10, image_size=32, stem="cifar").eval()
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        expected = model(images)
        actual = model(images.contiguous(memory_format=torch.channels_last))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("image_size", [224, 227])
def test_alexnet_pools_nothing_away_at_its_own_sizes(image_size: int) -> None:
    with torch.device("meta"):
        model = alexnet()
        assert model.get_submodule("features")(torch.empty(1, 3, image_size, image_size)).shape == (
            1,
            256,
            6,
            6,
        )


@pytest.mark.parametrize(
    ("make", "image_size", "sides"),
    [
        (resnet20, 32, [32, 32, 16, 8]),
        (resnet18, 224, [56, 56, 28, 14, 7]),
        (resnet50, 224, [56, 56, 28, 14, 7]),
        (lambda: resnet18(stem="cifar"), 32, [32, 32, 16, 8, 4]),
        (lambda: efficientnet("efficientnet-b0"), 224, [112, 112, 56, 28, 14, 14, 7, 7]),
        (lambda: efficientnet("efficientnet-b0", stem_stride=1), 32, [32, 32, 16, 8, 4, 4, 2, 2]),
    ],
)
def test_stages_shrink_the_image_as_published(make: Callable[[], nn.Module], image_size: int, sides: list[int]) -> None:
    with torch.device("meta"):
        x = torch.empty(1, 3, image_size, image_size)
        seen = []
        for name, part in make().named_children():
            x = part(x)
            if name != "head":
                seen.append(x.shape[-1])
    assert seen == sides


def test_a_padded_shortcut_keeps_every_other_pixel_and_adds_zeros() -> None:
    x = torch.randn(2, 3, 5, 5)
    y = PaddedShortcut(3, 7, stride=2)(x)
    assert y.shape == (2, 7, 3, 3)
    assert torch.equal(y[:, :3], x[:, :, ::2, ::2])
    assert not y[:, 3:].any()


def test_convolutions_of_a_resnet_begin_as_kaiming_says() -> None:
    for module in resnet18().modules():
        if isinstance(module, nn.Conv2d):
            fan_out = module.out_channels * module.kernel_size[0] * module.kernel_size[1]
            expected = math.sqrt(2 / fan_out)
            # The spread of n draws is known to one part in sqrt(2n); five of those are a wide margin.
            margin = 5 / math.sqrt(2 * module.weight.numel())
            assert module.weight.std().item() == pytest.approx(expected, rel=margin)


def test_zero_init_makes_every_block_its_shortcut() -> None:
    model = resnet20(zero_init_residual=True)
    x = torch.randn(2, 16, 8, 8)
    for block in model.get_submodule("stage1").children():
        assert isinstance(block, Residual)
        assert torch.equal(block(x), x.relu())
    ordinary = next(resnet20().get_submodule("stage1").children())
    assert not torch.equal(ordinary(x), x.relu())


@given(st.integers(1, 4096), st.floats(0.5, 4.0))
def test_scaled_channels_are_a_multiple_of_eight_near_what_was_asked(channels: int, width: float) -> None:
    scaled = scaled_channels(channels, width)
    assert scaled % 8 == 0
    assert scaled >= 8
    assert scaled >= 0.9 * channels * width
    assert scaled <= max(8, channels * width + 8)


@pytest.mark.parametrize("name", ["efficientnet-b0", "efficientnet-b3"])
def test_efficientnets_drop_more_the_deeper_the_block(name: str) -> None:
    with torch.device("meta"):
        model = efficientnet(name)
    rates = [module.p for module in model.modules() if isinstance(module, StochasticDepth)]
    assert rates == sorted(rates)
    assert 0 < rates[0] < rates[-1] < 0.2
    assert [module.p for module in model.modules() if isinstance(module, nn.Dropout)] == [VARIANTS[name].dropout]


def test_stochastic_depth_drops_whole_samples_and_keeps_the_mean() -> None:
    layer = StochasticDepth(0.25)
    kept = layer(torch.ones(4000, 2, 3, 3))
    each = kept.flatten(1)
    assert torch.equal(each.amin(1), each.amax(1))
    torch.testing.assert_close(each[:, 0].unique(), torch.tensor([0.0, 1 / 0.75]))
    # A standard error is sqrt(p / (1 - p) / n) = 0.009.
    assert kept.mean().item() == pytest.approx(1.0, abs=0.05)
    assert torch.equal(layer.eval()(kept), kept)


def test_a_block_that_changes_the_shape_does_not_add_its_input() -> None:
    assert MBConv(8, 8, 6, 3, stride=1, skip_rate=0.0).adds_input
    assert not MBConv(8, 8, 6, 3, stride=2, skip_rate=0.0).adds_input
    assert not MBConv(8, 16, 6, 3, stride=1, skip_rate=0.0).adds_input


def small_gpt() -> GPT:
    return GPT(vocab_size=50, context=16, num_layers=2, num_heads=2, width=16).eval()


@given(st.integers(1, 11))
def test_a_gpt_sees_no_later_token(changed: int) -> None:
    model = small_gpt().double()
    tokens = torch.arange(12).unsqueeze(0)
    other = tokens.clone()
    other[0, changed] = 49
    with torch.no_grad():
        before, after = model(tokens), model(other)
    torch.testing.assert_close(after[:, :changed], before[:, :changed], rtol=1e-12, atol=1e-12)
    assert (after[:, changed:] - before[:, changed:]).abs().amax(dim=-1).min() > 1e-9


def test_a_gpt_knows_where_a_token_stands() -> None:
    with torch.no_grad():
        logits = small_gpt()(torch.full((1, 4), 7))
    assert not torch.allclose(logits[0, 0], logits[0, 3])


def test_a_gpt_classifies_with_its_embedding() -> None:
    model = small_gpt()
    width, layers = 16, 2
    block = 12 * width**2 + 13 * width  # four projections and two of four times the width; biases and two norms
    expected = 50 * width + 16 * width + layers * block + 2 * width
    assert sum(parameter.numel() for parameter in model.parameters()) == expected
    with torch.no_grad():
        model.tokens.weight[3] = 0
        assert not model(torch.tensor([[1, 2]]))[..., 3].any()


def test_an_untrained_gpt_has_no_opinion() -> None:
    model = GPT().eval()
    tokens = torch.randint(0, 256, (4, 128))
    with torch.no_grad():
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), torch.randint(0, 256, (4 * 128,)))
    assert loss.item() == pytest.approx(math.log(256), rel=0.02)


def test_a_gpt_refuses_more_tokens_than_its_context() -> None:
    with pytest.raises(ModelError, match=r"17 tokens in a row and its context is 16"):
        small_gpt()(torch.zeros(1, 17, dtype=torch.int64))
