"""Models whose samples decide which layers are used, on workers that hold shards of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline
from paceline.env import worker_facts
from paceline.spec import Job, Plan, parse_mesh
from tests.kit.workers import run_ranks


class Branches(nn.Module):
    """Two blocks of one size, and two heads; samples decide, or `block` and `head` do."""

    def __init__(self, block: int | None = None, head: int | None = None) -> None:
        super().__init__()
        self.block, self.head = block, head
        self.first = nn.Linear(4, 6)
        # Larger than what is gathered together with others.
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 30_000), nn.Linear(30_000, 6)) for _ in range(2))
        self.heads = nn.ParameterList(torch.randn(6, 3) for _ in range(2))

    def forward(self, inputs: Tensor) -> Tensor:
        own = int(inputs[0, 0] > 0)
        hidden = torch.tanh(self.first(inputs))
        hidden = hidden + self.blocks[own if self.block is None else self.block](hidden)
        output: Tensor = hidden @ self.heads[own if self.head is None else self.head]
        return output


def _learn(
    strategy: str, block: int | None, head: int | None, find_unused_parameters: bool = False, parity: str = "numeric"
) -> dict[str, Any]:
    num_workers = worker_facts().world_size
    mesh = parse_mesh(strategy, num_workers) if num_workers > 1 else None
    job = Job().with_values(
        global_batch_size=4, virtual_shards=4, precision="float64", parity=parity, shard_by_shard=True
    )
    algorithm: Any = "tree_exact" if parity == "bitwise" else "all_reduce"
    plan = Plan(world_size=num_workers, mesh=mesh, algorithm=algorithm, timeout_s=60)
    draws = torch.Generator().manual_seed(0)
    inputs = torch.randn(24, 4, generator=draws)
    with paceline.init(job, plan=plan) as run:
        model = Branches(block, head)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
        example = inputs[:2].double()
        run.prepare(model, optimizer, find_unused_parameters=find_unused_parameters, example=example)
        for batch in run.batches(TensorDataset(inputs, torch.arange(24) % 3)):
            run.step(batch, lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]))
        return {name: value.detach().numpy().copy() for name, value in run.whole_state().items()}


OTHER_HEAD = (
    r"ModelError: .* depends on the samples.* 'heads\.[01]' got a gradient on some workers only; .*find_unused_"
)
OTHER_LAYERS = r"ModelError: The forward pass of Branches calls other layers for this batch than for the example"
OTHER_BLOCK = (
    r"ModelError: .* depends on the samples.* gathers 'blocks\.[01].0', and another .*; .*find_unused_parameters"
)


@pytest.mark.parametrize(
    ("strategy", "sentence", "block", "head", "parity"),
    [
        ("fsdp", OTHER_HEAD, 0, None, "numeric"),
        ("fsdp", OTHER_BLOCK, None, 0, "numeric"),
        ("zero1", OTHER_HEAD, 0, None, "numeric"),
        ("zero2", OTHER_BLOCK, None, 0, "numeric"),
        ("dp2 x fsdp2", OTHER_HEAD, 0, None, "numeric"),
        ("fsdp", OTHER_BLOCK, None, 0, "bitwise"),
        ("pp", OTHER_LAYERS, 0, None, "numeric"),
        ("pp", OTHER_LAYERS, None, 0, "numeric"),
    ],
)
def test_samples_that_decide_what_is_used_get_a_sentence(
    strategy: str, sentence: str, block: int | None, head: int | None, parity: str
) -> None:
    with pytest.raises(AssertionError, match=sentence):
        run_ranks(_learn, 4 if "x" in strategy else 2, strategy, block, head, False, parity)


@pytest.mark.parametrize(
    ("strategy", "block", "head", "find_unused_parameters"),
    [("fsdp", None, None, True), ("zero1", None, None, True), ("fsdp", 1, 1, False), ("zero2", 0, 1, False)],
)
def test_where_workers_go_alike_or_may_skip_they_learn_the_same(
    strategy: str, block: int | None, head: int | None, find_unused_parameters: bool
) -> None:
    (alone,) = run_ranks(_learn, 1, "dp", block, head)
    spread = run_ranks(_learn, 2, strategy, block, head, find_unused_parameters)[0]
    for name, value in alone.items():
        np.testing.assert_allclose(spread[name], value, rtol=1e-8, atol=1e-11, err_msg=name)


def test_a_parameter_that_only_the_last_pass_leaves_out_gets_a_sentence_in_dp() -> None:
    with pytest.raises(
        AssertionError, match=r"ModelError: (The|Some) parameter .*got no gradient.*find_unused_parameters"
    ):
        run_ranks(_learn, 3, "dp", None, 0)
