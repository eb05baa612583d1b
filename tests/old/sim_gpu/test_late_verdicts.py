"""Steps that are not finite, which the device leaves out before the host knows: nothing differs but the moment."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import paceline
from paceline.checkpoint import newest_good, open_storage
from paceline.errors import ModelError
from paceline.train.steps.nonfinite import MOST_IN_A_ROW, NonFiniteGuard
from tests.kit.sim_gpu.workers import run_on_gpus

pytestmark = pytest.mark.sim_gpu

NUM_STEPS = 14
BAD_STEPS = {
    "the first": {0},
    "one": {3},
    "two in a row": {3, 4},
    "the last": {NUM_STEPS - 1},
    "too many": set(range(2, NUM_STEPS)),
}


@pytest.mark.parametrize(
    ("kind", "precision"),
    [(torch.optim.SGD, "float32"), (torch.optim.AdamW, "float32"), (torch.optim.SGD, "float16")],
    ids=["SGD", "AdamW", "float16"],
)
def test_a_step_left_out_by_the_device_leaves_what_the_host_leaves(
    simulated_gpu: Path, kind: Any, precision: str
) -> None:
    (found,) = run_on_gpus(simulated_gpu, _ends, 1, kind, precision)
    for name, (at_once, late) in found.items():
        for aspect in ("model", "optimizer", "said", "error", "saved"):
            assert repr(getattr(late, aspect)) == repr(getattr(at_once, aspect)), (name, aspect)
        assert at_once.num_late == 0
        # All but the first, which makes the optimizer's state, and those after one that is not finite.
        assert late.num_late == {"one": 12, "two in a row": 11, "too many": 2}.get(
            name, NUM_STEPS - 1 - (name == "the first")
        )
    assert found["too many"][1].error is not None
    assert f"Step {2 + MOST_IN_A_ROW}:" in found["too many"][1].error
    assert [text[:7] for text in found["two in a row"][1].said] == ["Step 4:", "Step 5:"]
    assert found["one"][1].saved["progress"] == NUM_STEPS


def _ends(native: Any, kind: Any, precision: str) -> dict[str, tuple[_End, _End]]:
    return {
        name: (_train(precision, kind, bad, is_late=False), _train(precision, kind, bad, is_late=True))
        for name, bad in BAD_STEPS.items()
    }


def test_float16_leaves_steps_out_on_the_device_and_none_before_the_optimizer_has_its_state(
    simulated_gpu: Path,
) -> None:
    run_on_gpus(simulated_gpu, _scaled, 1)


def _scaled(native: Any) -> None:
    from paceline.train.steps import device_skip

    found = []
    for is_on_device in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if not is_on_device:
                patch.setattr(device_skip, "FUSED", ())
            found.append(_train("float16", torch.optim.SGD, set(), is_late=True))
    on_device, on_host = found
    assert repr(on_device.model) == repr(on_host.model)
    assert repr(on_device.optimizer) == repr(on_host.optimizer)


@dataclass(frozen=True)
class _End:
    """All that a step may leave behind."""

    model: dict[str, Any]
    optimizer: dict[str, Any]
    said: list[str]
    error: str | None
    saved: Any
    """The newest checkpoint."""
    num_late: int


def _train(precision: str, optimizer_kind: Any, bad: set[int], *, is_late: bool) -> _End:
    draw = torch.Generator().manual_seed(0)
    samples = [(torch.randn(3, 8, 8, generator=draw), number % 4) for number in range(8 * NUM_STEPS)]
    said: list[str] = []
    error: str | None = None
    num_late = 0
    judged = NonFiniteGuard.judge_on_device

    def counted(self: NonFiniteGuard, *args: Any) -> Tensor:
        nonlocal num_late
        num_late += 1
        return judged(self, *args)

    folder = Path(tempfile.mkdtemp())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NonFiniteGuard, "judge_on_device", counted)
        if not is_late:
            patch.setattr(NonFiniteGuard, "may_be_late", False)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 4))
        momentum = {"momentum": 0.9} if optimizer_kind is torch.optim.SGD else {}
        optimizer = optimizer_kind(model.parameters(), lr=0.01, **momentum)
        try:
            with paceline.init(
                global_batch_size=8,
                virtual_shards=2,
                precision=precision,
                checkpoint={"dir": str(folder), "every_steps": 1, "keep_last": 3},
            ) as run:
                run.say = said.append

                def loss_fn(model: nn.Module, batch: Any) -> Tensor:
                    loss = F.cross_entropy(model(batch[0]), batch[1])
                    return loss * (float("nan") if run.steps in bad else 1.0)

                model, optimizer = run.prepare(model, optimizer)
                for batch in run.batches(samples):
                    run.step(batch, loss_fn)
        except ModelError as problem:
            error = str(problem)
    saved, _ = newest_good(open_storage(str(folder)))
    assert saved is not None
    shared = _on_host(saved.shared)
    # The end of the last step and the end of the epoch are the same place; the newest checkpoint may be of either.
    shared["progress"] = shared["progress"]["steps"]
    return _End(_on_host(model.state_dict()), _on_host(optimizer.state_dict()), said, error, shared, num_late)


def _on_host(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _on_host(value) for key, value in state.items()}
    if isinstance(state, list):
        return [_on_host(value) for value in state]
    return state.detach().cpu().numpy().tolist() if isinstance(state, Tensor) else state
