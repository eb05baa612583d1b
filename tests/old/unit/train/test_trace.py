"""Fingerprints: they tell how far two tensors are apart without keeping either."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from paceline.env import WorkerFacts
from paceline.spec import Job, Mesh
from paceline.train.process.process_group import World
from paceline.train.steps.trace import NUM_PROJECTIONS, ParityTracer, batch_digest, fingerprints

ALONE = World(WorkerFacts(), torch.device("cpu"), None)


def fingerprint(tensor: Tensor) -> Tensor:
    return torch.tensor(fingerprints([("t", tensor)])["t"], dtype=torch.float64)


def estimate(a: Tensor, b: Tensor) -> float:
    """|a - b| from the two fingerprints, as `paceline verify` estimates it."""
    return float((fingerprint(a) - fingerprint(b))[1:].square().mean().sqrt())


@settings(max_examples=8, deadline=None)
@given(st.integers(1, 300), st.integers(0, 2**31), st.floats(1e-12, 1e6))
def test_the_squared_distance_is_estimated_without_bias(size: int, seed: int, scale: float) -> None:
    """Over many pairs of tensors; one pair alone scatters by sqrt(2 / projections)."""
    generator = torch.Generator().manual_seed(seed)
    ratios = []
    for _ in range(60):
        a = torch.randn(size, generator=generator, dtype=torch.float64)
        b = a + scale * torch.randn(size, generator=generator, dtype=torch.float64)
        ratios.append((estimate(a, b) / float((a - b).norm())) ** 2)
    assert sum(ratios) / len(ratios) == pytest.approx(1, abs=0.5)
    assert 0 < max(ratios) <= size * (1 + 1e-3)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40), st.integers(0, 39), st.floats(1e-3, 1e3))
def test_one_changed_entry_is_measured_exactly(values: list[float], index: int, by: float) -> None:
    a = torch.tensor(values, dtype=torch.float64)
    b = a.clone()
    b[index % len(values)] += by
    changed = float((a - b).norm())
    assert estimate(a, b) == pytest.approx(changed, rel=1e-6, abs=1e-6)


def test_equal_tensors_have_equal_fingerprints_whatever_was_drawn_before() -> None:
    values = torch.randn(50, generator=torch.Generator().manual_seed(3))
    first = fingerprint(values)
    torch.rand(7)
    state = torch.get_rng_state()
    assert torch.equal(fingerprint(values.clone()), first)
    assert torch.equal(torch.get_rng_state(), state)  # and looking changes nothing
    assert len(first) == 1 + NUM_PROJECTIONS
    assert float(first[0]) == pytest.approx(float(values.double().norm()))


def test_order_matters() -> None:
    values = torch.arange(20.0)
    assert estimate(values, values.flip(0)) > 0


@pytest.mark.parametrize("tensor", [torch.zeros(0), torch.tensor(2.5), torch.ones(2, 2, dtype=torch.bfloat16)])
def test_any_tensor_has_one(tensor: Tensor) -> None:
    assert fingerprint(tensor).isfinite().all()


@given(st.permutations(range(8)), st.integers(0, 8))
def test_a_batch_digest_is_the_sum_of_its_parts_in_any_order(order: list[int], cut: int) -> None:
    inputs = torch.arange(8 * 6, dtype=torch.float32).view(8, 2, 3)
    targets = torch.arange(8)
    whole = batch_digest((inputs, targets))
    mine, theirs = order[:cut], order[cut:]
    assert batch_digest((inputs[mine], targets[mine])) + batch_digest((inputs[theirs], targets[theirs])) == whole


def test_a_batch_digest_sees_every_bit_and_which_target_belongs_to_which_input() -> None:
    inputs, targets = torch.arange(12.0).view(4, 3), torch.arange(4)
    whole = batch_digest({"x": inputs, "y": [targets, "text", 3]})
    assert whole == batch_digest({"x": inputs.clone(), "y": [targets, "text", 3]})
    touched = inputs.clone()
    touched.view(torch.uint8)[2, 5] ^= 1
    assert batch_digest({"x": touched, "y": [targets, "text", 3]}) != whole
    assert batch_digest({"x": inputs, "y": [targets.flip(0), "text", 3]}) != whole


def test_a_tracer_writes_a_line_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_TRACE_DIR", str(tmp_path / "trace"))
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    batch = torch.ones(4, 3)
    tracer = ParityTracer.from_environment(ALONE, Job(), None)
    for step in range(2):
        loss = model(batch * (step + torch.arange(4.0)[:, None])).sum()
        model.zero_grad()
        loss.backward()
        tracer.before_update(step, model, dict, loss.detach(), batch, idle=step == 1)
        tracer.after_update(model, dict)
    tracer.close()
    header, first, second = map(json.loads, (tmp_path / "trace" / "rank0.jsonl").read_text().splitlines())
    assert header == {"parity": "numeric", "precision": "float32", "tp": 1}
    assert (first["step"], second["step"]) == (0, 1)
    assert (first["batch_digest"], second["batch_digest"]) == (batch_digest(batch), 0)  # a stand-in counts nothing
    assert set(first["gradients"]) == set(first["parameters"]) == {name for name, _ in model.named_parameters()}
    assert set(first["buffers"]) == {name for name, _ in model.named_buffers()}
    assert first["weights_sha256"] != second["weights_sha256"]  # the running statistics moved


def test_where_nobody_asked_nothing_is_written_or_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PACELINE_TRACE_DIR", raising=False)
    monkeypatch.chdir(tmp_path)
    tracer = ParityTracer.from_environment(ALONE, Job(), Mesh(tp=4))
    model = nn.Linear(1, 1)
    tracer.before_update(0, model, dict, torch.tensor(float("nan")), object(), idle=False)
    tracer.after_update(model, dict)
    tracer.close()
    assert list(tmp_path.iterdir()) == []
