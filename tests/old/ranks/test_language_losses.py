"""What people fine-tune: padded language models and mixtures of experts of transformers, by their own `.loss`."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

import paceline
from paceline.env import worker_facts
from paceline.spec import Job, Plan
from tests.kit.workers import run_ranks
from tests.zoo.samples import IGNORED, padded_text

CASES = (("gpt2", "own"), ("gpt2", "tokens"), ("gpt2", "transformers"), ("qwen2_moe", "own"), ("mixtral", "tokens"))
"""A model and its loss."""

Outcome = tuple[list[float], dict[str, NDArray[Any]], list[str]]


def own_loss(model: nn.Module, batch: Any) -> Tensor:
    """As transformers computes it, but not in float32."""
    output = model(**batch)
    if hasattr(output, "aux_loss") and output.aux_loss is not None:
        loss: Tensor = output.loss
        return loss
    return F.cross_entropy(output.logits[:, :-1].transpose(1, 2), batch["labels"][:, 1:], ignore_index=IGNORED)


def token_loss(model: nn.Module, batch: Any) -> paceline.Mean:
    return paceline.Mean(own_loss(model, batch), weight=(batch["labels"][:, 1:] != IGNORED).sum())


def transformers_loss(model: nn.Module, batch: Any) -> paceline.Mean:
    return paceline.Mean(model(**batch).loss, weight=(batch["labels"][:, 1:] != IGNORED).sum())


LOSSES: dict[str, Any] = {"own": own_loss, "tokens": token_loss, "transformers": transformers_loss}


def _build(name: str) -> nn.Module:
    from tests.zoo import of_transformers

    model: nn.Module = getattr(of_transformers, name)()
    for layer in model.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0
        if hasattr(layer, "attention_dropout") and isinstance(layer.attention_dropout, float):
            vars(layer)["attention_dropout"] = 0.0
    config: Any = model.config
    config.output_router_logits = name == "qwen2_moe"
    config.router_aux_loss_coef = 0.001
    return model


def _train(name: str, loss: str) -> Outcome:
    job = Job(global_batch_size=8, virtual_shards=4, precision="float64")
    plan = Plan(world_size=worker_facts().world_size, algorithm="all_reduce", timeout_s=120)
    with paceline.init(job, plan=plan) as run:
        model = _build(name)
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), find_unused_parameters=name != "gpt2")
        losses = [float(run.step(batch, LOSSES[loss])) for batch in run.batches(padded_text())]
        weights = {name: value.detach().numpy().copy() for name, value in run.whole_state().items()}
        return losses, weights, run.notes


def _whole_batches() -> Outcome:
    """GPT-2 in a plain loop over whole batches."""
    job = Job(global_batch_size=8, virtual_shards=4, precision="float64")
    with paceline.init(job, plan=Plan(timeout_s=120)) as run:
        model = _build("gpt2").double()
        own = _build("gpt2").double()
        own.load_state_dict(model.state_dict())
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
        losses = []
        for batch in run.batches(padded_text()):
            run.step(batch, own_loss)
            optimizer.zero_grad()
            loss = own_loss(own, batch)
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
        return losses, {name: value.detach().numpy().copy() for name, value in own.state_dict().items()}, []


def _train_all() -> list[Outcome]:
    return [_train(*case) for case in CASES] + ([_whole_batches()] if worker_facts().world_size == 1 else [])


@cache
def trained(world_size: int) -> list[Outcome]:
    outcomes: list[Outcome] = run_ranks(_train_all, world_size, timeout_s=300)[0]
    return outcomes


def _assert_same(one: Outcome, other: Outcome, tolerance: float = 1e-12) -> None:
    np.testing.assert_allclose(one[0], other[0], rtol=tolerance)
    for name, value in one[1].items():
        np.testing.assert_allclose(other[1][name], value, rtol=tolerance, atol=tolerance, err_msg=name)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("world_size", [2, 3])
def test_the_result_does_not_depend_on_the_number_of_workers(world_size: int) -> None:
    for case, one, many in zip(CASES, trained(1), trained(world_size), strict=False):
        # transformers computes its losses in float32.
        _assert_same(one, many, 1e-6 if "transformers" in case or "qwen2_moe" in case else 1e-12)
        for notes in (one[2], many[2]):
            found = [note for note in notes if "every virtual shard goes" in note or "every shard goes" in note]
            assert len(found) == (case[1] == "own"), (case, notes)
            assert not found or ("aux_loss (output_router_logits)" in found[0]) == (case[0] == "qwen2_moe")


@pytest.mark.timeout(600)
def test_a_loss_with_its_number_of_tokens_is_that_of_the_whole_batch() -> None:
    own, with_tokens, *_, whole = trained(1)
    _assert_same(with_tokens, whole)
    assert abs(own[0][0] - whole[0][0]) > 1e-6
