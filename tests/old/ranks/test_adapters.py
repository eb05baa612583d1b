"""Adapters of peft on a frozen model: trained, saved and gone on from under every strategy."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import paceline
from paceline.env import worker_facts
from paceline.errors import ModelError
from paceline.spec import Job, Plan, parse_mesh
from tests.kit.workers import run_ranks
from tests.zoo.zoo import ZOO, loss_of

STEPS, STOP = 5, 2
STRATEGIES = ("bitwise", "dp", "fsdp", "pp")


@dataclass(frozen=True)
class _Result:
    losses: list[float]
    sha: str
    weights: dict[str, NDArray[Any]]
    """Of rank 0 alone."""
    changed: set[str]


def _train(strategy: str, folder: Path, max_steps: int) -> _Result:
    entry, facts = ZOO["llama-lora"], worker_facts()
    is_bitwise = strategy == "bitwise"
    mesh = parse_mesh("dp" if is_bitwise else strategy, facts.world_size, 1) if facts.world_size > 1 else None
    algorithm: Any = "tree_exact" if is_bitwise else "all_reduce"
    plan = Plan(world_size=facts.world_size, algorithm=algorithm, timeout_s=120, mesh=mesh)
    job = Job.from_mapping(
        {
            "global_batch_size": 8,
            "virtual_shards": 4,
            "epochs": 9,
            "parity": "bitwise" if is_bitwise else "numeric",
            "precision": "float32" if is_bitwise else "float64",
        }
    )
    with paceline.init(job, plan=plan, max_steps=max_steps, checkpoint_dir=str(folder)) as run:
        run.say = lambda _sentence: None
        model = entry.make()
        initial = {name: value.detach().clone() for name, value in model.state_dict().items()}
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, 0.1)
        run.prepare(model, optimizer, example=entry.example() if run.mesh.pp > 1 else None)
        losses = [float(run.step(batch, partial(loss_of, entry))) for batch in run.batches(entry.read())]
        state, sha = run.whole_state(), run.weights_sha256()
    weights = {} if facts.rank else {name: value.detach().numpy().copy() for name, value in state.items()}
    changed = {
        name for name, value in weights.items() if not np.array_equal(initial[name].to(state[name].dtype), value)
    }
    return _Result(losses, sha, weights, changed)


def _train_all(strategies: tuple[str, ...], root: Path, max_steps: int) -> list[_Result]:
    torch.set_num_threads(1)
    return [_train(strategy, root / strategy, max_steps) for strategy in strategies]


def _stop_and_go_on(root: Path) -> list[_Result]:
    _train_all(STRATEGIES, root, STOP)
    if worker_facts().rank == 0:
        for strategy in ("bitwise", "dp", "fsdp"):
            shutil.copytree(root / strategy, root / "elsewhere" / strategy)
    return _train_all(STRATEGIES, root, STEPS)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_adapters_are_trained_alone_and_resumed_on_any_number_of_workers(tmp_path: Path) -> None:
    bitwise, numeric = run_ranks(_train_all, 1, ("bitwise", "dp"), tmp_path / "alone", STEPS, timeout_s=250)[0]
    assert len(numeric.changed) == 8
    assert all("lora_" in name for name in bitwise.changed | numeric.changed)
    on_two = run_ranks(_stop_and_go_on, 2, tmp_path / "two", timeout_s=250)[0]
    others = ("bitwise", "dp", "fsdp")
    on_three = run_ranks(_train_all, 3, others, tmp_path / "two" / "elsewhere", STEPS, timeout_s=250)[0]
    for strategy, result in [*zip(STRATEGIES, on_two, strict=True), *zip(others, on_three, strict=True)]:
        if strategy == "bitwise":
            assert (result.sha, result.losses) == (bitwise.sha, bitwise.losses[STOP:])
            continue
        assert result.changed == numeric.changed, strategy
        np.testing.assert_allclose(result.losses, numeric.losses[STOP:], rtol=1e-12, err_msg=strategy)
        for name, value in result.weights.items():
            np.testing.assert_allclose(value, numeric.weights[name], rtol=1e-11, atol=1e-12, err_msg=name)


def _write() -> tuple[list[list[int]], str]:
    """The tokens that a model with adapters writes before its first step, and how the call of a part of it ends."""
    entry, facts = ZOO["llama-lora"], worker_facts()
    with paceline.init(global_batch_size=8, strategy="fsdp", progress=False) as run:
        model: Any = entry.make()
        run.prepare(model, torch.optim.SGD([one for one in model.parameters() if one.requires_grad], 0.1))
        words = torch.arange(1, 7).view(2, 3)
        written = model.generate(input_ids=words, max_new_tokens=4, do_sample=False, pad_token_id=0).tolist()
    try:
        with paceline.init(global_batch_size=8, strategy="fsdp", progress=False) as run:
            model = entry.make()
            run.prepare(model, torch.optim.SGD([one for one in model.parameters() if one.requires_grad], 0.1))
            model.get_base_model()(input_ids=words)
    except ModelError as refused:
        return written, str(refused)
    assert facts.world_size == 1, "a part of a sharded model was called"
    return written, ""


def test_a_sharded_model_with_adapters_writes_and_a_part_of_it_that_is_called_is_refused_in_a_sentence() -> None:
    ((alone, _),), workers = run_ranks(_write, 1), run_ranks(_write, 2)
    assert len(alone[0]) > 3
    for written, refusal in workers:
        assert written == alone
        assert "calls a part or a method of the model" in refusal
