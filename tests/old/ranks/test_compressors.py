"""Compressors between real workers: one result for all, nothing lost, training arrives where exact training does."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from paceline import env
from paceline.comm.compressor import RESIDUAL, Bucket, Compressor, Sum
from paceline.comm.links import Links
from paceline.comm.powersgd import PowerSGD
from paceline.comm.randomk import RandomK
from paceline.comm.ring import ring
from paceline.comm.topk import TopK
from paceline.comm.wire import WIRE_FORMATS
from paceline.spec import Plan
from paceline.train.process.process_group import join, leave
from tests.kit.workers import run_ranks
from tests.old.unit.comm.buckets import alone

pytestmark = pytest.mark.slow

Array = NDArray[Any]
Steps = list[tuple[Array, Array]]
"""For every step a bucket's result and this worker's residuals after it, both flat."""

KINDS = ("powersgd", "topk", "randomk")
SHAPES: dict[str, tuple[int, ...]] = {"dense": (20, 30), "bias": (20,), "conv": (8, 3, 3, 3), "small": (2, 3)}
NODES = {2: ((0, 1),), 3: ((0, 2), (1,))}


def _compressor(kind: str, strength: float, links: Links) -> Compressor:
    """`strength`: the rank of PowerSGD, the density of the others."""
    if kind == "powersgd":
        return PowerSGD(int(strength), seed=0)
    return TopK(strength, links) if kind == "topk" else RandomK(strength, seed=0)


@contextmanager
def _links() -> Iterator[Links]:
    facts = env.worker_facts()
    join(facts, Plan(world_size=facts.world_size, timeout_s=30))
    group = dist.group.WORLD
    assert group is not None
    yield Links(group, NODES[facts.world_size], torch.device("cpu"), timeout_s=30)
    leave()


def _all_reduce(vector: Tensor) -> None:
    dist.all_reduce(vector)


def _gradient(rank: int, step: int, dtype: torch.dtype) -> Tensor:
    """A flat bucket. The matrices have rank one on each worker, so that their sum has at most one for each."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    parts = []
    for shape in SHAPES.values():
        part = torch.randn(shape, generator=generator, dtype=torch.float64)
        if len(shape) > 1:
            part = part.view(len(part), -1)[:, :1] * part.view(len(part), -1)[:1]
        parts.append(part.reshape(-1))
    return torch.cat(parts).to(dtype)


def _bucket(values: Tensor) -> Bucket:
    pieces = values.split([math.prod(shape) for shape in SHAPES.values()])
    return Bucket(
        values, tuple((name, piece.view(shape)) for (name, shape), piece in zip(SHAPES.items(), pieces, strict=True))
    )


def _residuals(compressor: Compressor, like: Tensor) -> Array:
    state, bucket = compressor.state_dict(), _bucket(torch.zeros_like(like))
    for name, part in bucket.parts:
        part.copy_(state.get(RESIDUAL + name, part))
    return bucket.values.numpy()


def _aggregate(compressor: Compressor, total: Sum, gradients: list[Tensor]) -> Steps:
    steps = []
    for values in gradients:
        compressor.aggregate(_bucket(values), total)
        steps.append((values.numpy().copy(), _residuals(compressor, values).copy()))
    return steps


def _many_steps(cases: list[tuple[str, float]], num_steps: int, bad: dict[tuple[int, int], float]) -> list[Steps]:
    """What each case makes of the same gradients; `bad` says what overflows, by rank and step."""
    with _links() as links:
        results = []
        for kind, strength in cases:
            gradients = [_gradient(links.rank, step, torch.float64) for step in range(num_steps)]
            for (rank, step), value in bad.items():
                if rank == links.rank:
                    gradients[step].view(-1)[[3, -2]] = value
            results.append(_aggregate(_compressor(kind, strength, links), _all_reduce, gradients))
        return results


def _true_sum(world_size: int, step: int) -> Array:
    return sum(_gradient(rank, step, torch.float64).numpy() for rank in range(world_size))  # type: ignore[return-value]


@pytest.mark.parametrize("world_size", [2, 3])
def test_all_workers_get_the_same_and_nothing_is_lost(world_size: int) -> None:
    full: list[tuple[str, float]] = [("powersgd", world_size), ("topk", 1.0), ("randomk", 1.0)]
    lossy: list[tuple[str, float]] = [("powersgd", 1), ("topk", 0.05), ("randomk", 0.05)]
    num_steps = 4
    by_rank = run_ranks(_many_steps, world_size, full + lossy, num_steps, {})
    for number, case in enumerate(full + lossy):
        results = [cases[number] for cases in by_rank]
        missing = np.zeros_like(_true_sum(world_size, 0))
        for step in range(num_steps):
            summed = [steps[step][0] for steps in results]
            for theirs in summed[1:]:
                np.testing.assert_array_equal(theirs, summed[0], err_msg=str(case))
            expected = _true_sum(world_size, step)
            if case in full:
                np.testing.assert_allclose(summed[0], expected, atol=1e-6, err_msg=str(case))
            else:
                assert np.abs(summed[0] - expected).max() > 0.1, case
            missing += expected - summed[0]
            residuals = sum(steps[step][1] for steps in results)
            np.testing.assert_allclose(residuals, missing, atol=1e-9, err_msg=str(case))


def test_powersgd_and_randomk_do_not_depend_on_the_number_of_workers() -> None:
    """They are linear: one worker with the sum of the gradients computes what the workers do together."""
    world_size, num_steps = 3, 4
    cases: list[tuple[str, float]] = [("powersgd", 1), ("randomk", 0.05)]
    together = run_ranks(_many_steps, world_size, cases, num_steps, {})[0]
    for case, steps in zip(cases, together, strict=True):
        compressor = PowerSGD(1, seed=0) if case[0] == "powersgd" else RandomK(case[1], seed=0)
        gradients = [torch.from_numpy(_true_sum(world_size, step)) for step in range(num_steps)]
        for (theirs, _), (ours, _) in zip(steps, _aggregate(compressor, alone, gradients), strict=True):
            np.testing.assert_allclose(theirs, ours, atol=1e-9, err_msg=str(case))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_overflow_on_one_worker_is_seen_by_all_and_forgotten(bad: float) -> None:
    cases: list[tuple[str, float]] = [("powersgd", 1), ("topk", 0.01), ("randomk", 0.01)]
    by_rank = run_ranks(_many_steps, 2, cases, 4, {(1, 1): bad})
    for number, case in enumerate(cases):
        for rank, cases_of_rank in enumerate(by_rank):
            results, residuals = zip(*cases_of_rank[number], strict=True)
            assert not np.isfinite(results[1]).any(), (case, rank)
            np.testing.assert_array_equal(residuals[1], residuals[0], err_msg=f"{case} {rank}")
            assert np.isfinite(results[2]).all() and np.isfinite(residuals[3]).all(), (case, rank)
        missing = sum(_true_sum(2, step) - by_rank[0][number][step][0] for step in (0, 2, 3))
        np.testing.assert_allclose(by_rank[0][number][3][1] + by_rank[1][number][3][1], missing, atol=1e-9)


def _top_of_each() -> tuple[Array, Array, int]:
    with _links() as links:
        values = torch.full((12,), 1.0 + links.rank)
        values[[links.rank, 5, 8 + links.rank]] = 100.0 * (1 + links.rank)
        compressor = TopK(0.25, links)
        lengths = []

        def total(vector: Tensor) -> None:
            lengths.append(len(vector))
            dist.all_reduce(vector)

        compressor.aggregate(Bucket(values, (("w", values.view(3, 4)),)), total)
        return values.numpy(), compressor.state_dict()[RESIDUAL + "w"].numpy(), lengths[0]


def test_topk_sums_what_anybody_chose_over_everybody() -> None:
    """Each worker chooses two of its own and one that all choose: 3 x 2 + 1 values are summed, whole."""
    chosen = [0, 1, 2, 5, 8, 9, 10]
    for rank, (summed, residuals, length) in enumerate(run_ranks(_top_of_each, 3)):
        assert length == len(chosen)
        # Chosen by worker w: its hundreds, and the ones of the others.
        ones = [105.0, 204.0, 303.0, 600.0, 105.0, 204.0, 303.0]
        np.testing.assert_array_equal(summed[chosen], ones)
        np.testing.assert_array_equal(np.delete(summed, chosen), 0.0)
        np.testing.assert_array_equal(residuals.reshape(-1)[chosen], 0.0)
        np.testing.assert_array_equal(np.delete(residuals.reshape(-1), chosen), 1.0 + rank)


def _over_the_ring(wires: list[str]) -> dict[tuple[str, str], tuple[Array, Array]]:
    """Each compressor's result on top of each wire format, with an overflow on rank 1 and in the step after it."""
    with _links() as links:
        results = {}
        for wire in wires:

            def total(vector: Tensor, wire: str = wire) -> None:
                ring(vector, replace(links, wire=WIRE_FORMATS[wire]))

            for kind, strength in (("powersgd", 2.0), ("topk", 0.3), ("randomk", 0.3)):
                gradients = [_gradient(links.rank, step, torch.float32) for step in range(3)]
                if links.rank == 1:
                    gradients[1][-1] = math.inf
                _, (overflow, _), (summed, _) = _aggregate(_compressor(kind, strength, links), total, gradients)
                results[wire, kind] = (overflow, summed)
        return results


def test_any_algorithm_in_any_wire_format_may_carry_it() -> None:
    first, *others = run_ranks(_over_the_ring, 3, sorted(WIRE_FORMATS))
    for case, (overflow, summed) in first.items():
        assert np.isfinite(summed).all(), case
        assert summed.any(), case
        assert not np.isfinite(overflow).any(), case
        for theirs in others:
            assert not np.isfinite(theirs[case][0]).any(), case
            np.testing.assert_array_equal(theirs[case][1], summed, err_msg=str(case))


def _train(kinds: list[tuple[str, float]], num_steps: int) -> list[tuple[float, float]]:
    """Least squares by gradient descent, half of the samples a worker: the whole loss before and after."""
    with _links() as links:
        generator = torch.Generator().manual_seed(0)
        samples = torch.randn(128, 30, generator=generator)
        wanted = torch.randn(30, 20, generator=generator)
        targets = samples @ wanted + 0.5 * torch.randn(128, 20, generator=generator) + 1.0
        mine = slice(links.rank, None, links.world_size)
        losses = []
        for kind, strength in kinds:
            compressor = None if kind == "exact" else _compressor(kind, strength, links)
            weights = [torch.zeros(30, 20, requires_grad=True), torch.zeros(20, requires_grad=True)]

            def loss(part: slice, weights: list[Tensor] = weights) -> Tensor:
                return ((samples[part] @ weights[0] + weights[1] - targets[part]) ** 2).sum() / (128 * 20)

            first = float(loss(slice(None)).detach())
            for _ in range(num_steps):
                gradients = torch.autograd.grad(loss(mine), weights)
                values = torch.cat([g.reshape(-1) for g in gradients])
                parts = tuple(
                    (name, piece.view(w.shape))
                    for name, piece, w in zip("wb", values.split([w.numel() for w in weights]), weights, strict=True)
                )
                if compressor is None:
                    dist.all_reduce(values)
                else:
                    compressor.aggregate(Bucket(values, parts), _all_reduce)
                with torch.no_grad():
                    for weight, (_, gradient) in zip(weights, parts, strict=True):
                        weight -= 2.0 * gradient
            losses.append((first, float(loss(slice(None)).detach())))
        return losses


def test_training_arrives_where_exact_training_does() -> None:
    kinds: list[tuple[str, float]] = [("exact", 1), ("powersgd", 2), ("topk", 0.1), ("randomk", 0.2)]
    losses, theirs = run_ranks(_train, 2, kinds, 300)
    assert losses == theirs
    (first, exact), *others = losses
    assert exact < 0.02 * first
    for kind, (_, last) in zip(kinds[1:], others, strict=True):
        assert last < 1.05 * exact, (kind, last, exact)
