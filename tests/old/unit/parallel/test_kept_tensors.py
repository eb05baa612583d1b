"""What follows the tensors that are kept from call to call must not disturb what it looks at."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

from paceline.parallel.kept.kept_tensors import KeptTensors


class Scaled(nn.Module):
    """Keeps what it is given, and computes with it."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner
        self.center: Tensor | None = None

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.inner(inputs)
        return out if self.center is None else out - self.center


class Remembers(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        self.last = 2 * inputs
        return self.last.relu()


def _attend(inputs: Tensor) -> Tensor:
    heads = inputs.view(1, 1, *inputs.shape)
    out: Any = flex_attention(heads, heads, heads)
    first: Tensor = out[0, 0]
    return first


def _loss(model: nn.Module, content: Any) -> Tensor:
    out: Tensor = model(content).sum()
    return out


def _leading(model: Scaled, put_after_step: int) -> list[dict[str, float]]:
    """What the loss of each of three steps follows from, where the script puts a tensor into a place after a step."""
    kept = KeptTensors.of_model(model)
    loss_of, found = kept.around(_loss), []
    for step in range(1, 4):
        kept.begin_step()
        for _ in range(4 if step == 1 else 1):  # the first step has examinations
            loss_of(model, torch.ones(8, 4))
        found.append(kept.leading)
        kept.end_step()
        if step == put_after_step:
            model.center = torch.full((4,), 0.5)
    return found


def test_what_the_script_puts_where_nothing_was_is_seen() -> None:
    found = _leading(Scaled(nn.Identity()), 1)
    assert [list(one) for one in found] == [[], ["center"], []]


def test_a_model_that_is_compiled_whole_is_left_alone() -> None:
    model = Scaled(torch.compile(Remembers(), fullgraph=True, backend="eager"))
    assert "center" in _leading(model, 1)[1]


def test_flex_attention_is_followed() -> None:
    assert "center" in _leading(Scaled(_attend), 1)[1]


class Reads(dict[str, Any]):
    """Counts how often its values are looked at."""

    num_looks = 0

    def __iter__(self) -> Any:
        self.num_looks += 1
        return super().__iter__()


class Configured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config: Any = Reads(width=4)


def test_places_without_tensors_are_soon_left_alone_in_the_first_stage_of_a_pipeline() -> None:
    """Which never returns from the loss function: it leaves where the next stage begins."""

    def leaves(_model: nn.Module, _content: Any) -> Tensor:
        raise BlockingIOError

    model = Configured()
    loss_of = KeptTensors.of_model(model).around(leaves)
    looks = []
    for _ in range(12):
        with contextlib.suppress(BlockingIOError):
            loss_of(model, None)
        looks.append(model.config.num_looks)
    assert looks[0] > 0 and looks[5] == looks[-1]
