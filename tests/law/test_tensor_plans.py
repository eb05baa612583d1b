"""Declared tensor plans: what they divide learns what the oracle learns, dropout inside included; or one sentence."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.errors import ModelError
from paceline.models.gpt import GPT
from paceline.parallel.tensor_plan import tensor_plan_of
from tests.kit import losses, models
from tests.kit.engines import Engine
from tests.kit.oracle import Task, learn
from tests.kit.train import trained
from tests.law.tasks import texts
from tests.zoo.zoo import LARGEST_DIFFERENCE, largest_difference


class Attending(nn.Module):
    """Two heads whose attention weights are dropped, and dropout between the layers behind them; words tied or not."""

    _tp_plan: Mapping[str, str] = {
        "words": "embedding_rowwise",
        "head": "colwise_rep",
        "*_proj": "colwise",
        "together": "rowwise",
        "up": "colwise",
        "down": "rowwise",
        "of another model": "colwise",
    }
    head_dim = 4

    def __init__(self, *, is_fused: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(models.NUM_TOKENS, 8)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(8, 8, bias=False) for _ in range(3))
        self.together = nn.Linear(8, 8)
        self.up, self.dropout, self.down = nn.Linear(8, 16), nn.Dropout(0.4), nn.Linear(16, 8)
        self.head = nn.Linear(8, models.NUM_TOKENS, bias=False)
        if not is_fused:
            self.head.weight = self.words.weight
        self.is_fused = is_fused

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        q, k, v = (layer(x).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in (self.q_proj, self.k_proj, self.v_proj))
        if self.is_fused:
            heads = F.scaled_dot_product_attention(q, k, v, dropout_p=0.3 * self.training, is_causal=True)
        else:
            heads = F.dropout(torch.softmax(q @ k.transpose(-2, -1) / 2, -1), 0.3, self.training) @ v
        x = x + self.together(heads.transpose(1, 2).flatten(-2))
        logits: Tensor = self.head(x + self.down(self.dropout(self.up(x).relu())))
        return logits


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


ATTENDING = functools.partial(seeded, Attending)
FUSED = functools.partial(seeded, functools.partial(Attending, is_fused=True))
OUR_GPT = functools.partial(seeded, functools.partial(GPT, models.NUM_TOKENS, 4, 2, 2, 8, 0.3))


@pytest.mark.parametrize(
    ("make", "engine"),
    [
        (ATTENDING, Engine(2, {"tp": 2})),
        (FUSED, Engine(2, {"tp": 2})),
        (ATTENDING, Engine(2, {"tp": 2}, {"recompute": True})),
        (OUR_GPT, Engine(2, {"tp": 2})),
        (OUR_GPT, Engine(2, {"tp": 2}, {"recompute": True})),
    ],
    ids=["weights dropped", "inside of torch's function", "recomputed", "our gpt", "our gpt, recomputed"],
)
def test_a_declared_plan_learns_what_one_device_learns(make: Callable[[], nn.Module], engine: Engine) -> None:
    sgd = functools.partial(torch.optim.SGD, lr=0.3)
    task = Task(make, losses.counted_tokens, texts(16), sgd, epochs=1, clip_norm=0.1)
    first, second = trained(engine, task)
    assert largest_difference(first.learned, learn(task)) < LARGEST_DIFFERENCE
    assert first.weights_sha256 == second.weights_sha256


@pytest.mark.parametrize(
    ("plan", "degree", "words"),
    [
        (None, 2, ("tensor_plan=", "Layers declares none")),
        ({"frist": "colwise"}, 2, ("'frist'", "'first'")),
        ({"first": "columns"}, 2, ("no style 'columns'", "'first'", "colwise")),
        ({"norm": "colwise"}, 2, ("'norm' is a Identity", "Linear")),
        ({"first": "colwise", "second": "rowwise"}, 3, ("out_features = 8", "3 workers")),
        ({"": "heads(num_heads)"}, 2, ("num_heads = None",)),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(plan: Mapping[str, str] | None, degree: int, words: list[str]) -> None:
    with pytest.raises(ModelError) as refused:
        tensor_plan_of(models.layers(), plan, degree)
    assert all(word in str(refused.value) for word in words), refused.value


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ModelError, match="'q_proj' has heads = 2, which 4 workers cannot divide"):
        tensor_plan_of(Attending(), {"q_proj": "colwise", "together": "rowwise"}, 4)


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"first": "colwise", "third": "rowwise"}, "'second' has parameters that are whole"),
        ({"first": "colwise", "second": "rowwise", "head": "colwise"}, "no rowwise layer takes"),
    ],
)
def test_a_plan_that_the_forward_pass_does_not_follow_is_refused(plan: Mapping[str, str], words: str) -> None:
    task = Task(models.layers, losses.classes, [(torch.ones(8), torch.tensor(0))] * 8, torch.optim.SGD)  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match=words):
        trained(Engine(2, {"tp": 2}, {"tensor_plan": plan}), task)
