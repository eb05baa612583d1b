"""Workers that train by themselves and are averaged every few steps: local SGD and DiLoCo."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

import paceline
from paceline.comm import Aggregator
from paceline.env import worker_facts
from paceline.errors import JobError
from paceline.parallel.engines.local_sgd import LocalSGD
from paceline.spec import Job, Plan, RunRecord
from paceline.train import Run
from paceline.train.loop import RunOutput
from paceline.train.loop import train as train_job
from paceline.train.records.digest import weights_sha256
from tests.kit.workers import run_ranks
from tests.old.ranks.training import images, loss_fn, measure

pytestmark = pytest.mark.slow

Weights = dict[str, np.ndarray[Any, Any]]

_SGD = partial(torch.optim.SGD, lr=0.1, weight_decay=0.1)


class _Net(nn.Module):
    """With all that has to be averaged, broadcast or left alone in an outer step."""

    mask: Tensor

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(256, 10)
        self.frozen = nn.Parameter(torch.ones(10), requires_grad=False)
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.norm(self.convolution(x)))
        output: Tensor = self.head(self.dropout(hidden.flatten(1))) * self.frozen
        return output + self.mask[0]


def _job(**values: Any) -> Job:
    return Job.from_mapping({"global_batch_size": 6, "virtual_shards": 6, "epochs": 50, **values})


@contextmanager
def _run(job: Job, max_steps: int | None = None, algorithm: Any = "all_reduce", **plan: Any) -> Iterator[Run]:
    spread = Plan(world_size=worker_facts().world_size, algorithm=algorithm, timeout_s=30, **plan)
    with paceline.init(job, plan=spread, max_steps=max_steps) as run:
        yield run


@contextmanager
def _two_nodes() -> Iterator[None]:
    """Ranks 0 and 1 on one node, the others on a second one."""
    node = str(worker_facts().rank // 2)
    with mock.patch("paceline.comm.links.node_identity", return_value=node):
        yield


def _weights(run: Run) -> Weights:
    return {name: value.numpy().copy() for name, value in run.model.state_dict().items()}


def _engine(run: Run) -> LocalSGD:
    engine = run.engine
    assert isinstance(engine, LocalSGD)
    return engine


def _assert_close(theirs: Weights, mine: Weights, tolerance: float) -> None:
    assert theirs.keys() == mine.keys()
    for name, value in mine.items():
        np.testing.assert_allclose(theirs[name], value, rtol=tolerance, atol=tolerance, err_msg=name)


def _train_plainly(job: Job, num_samples: int, dropout: float, two_nodes: bool, **plan: Any) -> tuple[Weights, Any]:
    with _two_nodes() if two_nodes else nullcontext(), _run(job, max_steps=7, **plan) as run:
        net = _Net(dropout)
        run.prepare(net, _SGD(p for p in net.parameters() if p.requires_grad))
        for batch in run.batches(images(num_samples)):
            run.step(batch, loss_fn)
        return _weights(run), run.evaluate(images(5), measure)


@pytest.mark.parametrize(
    ("num_samples", "world_size", "dropout", "two_nodes", "plan"),
    [
        (13, 3, 0.0, False, {}),  # the third batch of each epoch is one sample: two workers idle
        (13, 2, 0.5, False, {}),
        (8, 4, 0.0, True, {}),  # batches of 6 and 2: on the second node a worker idles, then the whole node does
        (8, 3, 0.5, True, {"algorithm": "hierarchical"}),  # the third is alone on its node
    ],
)
def test_an_outer_step_after_every_step_is_synchronous_training(
    num_samples: int, world_size: int, dropout: float, two_nodes: bool, plan: dict[str, Any]
) -> None:
    common: dict[str, Any] = {"precision": "float64"}
    ((expected, metrics),) = run_ranks(_train_plainly, 1, _job(**common), num_samples, dropout, False)
    every_step = {"method": "local_sgd", "sync_every": 1, "sync_inside_nodes": two_nodes}
    job = _job(aggregation=every_step, **common)
    train = partial(_train_plainly, **plan)
    for weights, their_metrics in run_ranks(train, world_size, job, num_samples, dropout, two_nodes):
        _assert_close(weights, expected, 1e-11)
        assert their_metrics == pytest.approx(metrics, rel=1e-9)


def _small_net() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 10))


def _distance_from_torchs_own(job: Job, lr: float, momentum: float) -> float:
    """The largest distance of any weight, after any step, from an outer torch.optim.SGD on gathered weights."""
    worst = 0.0
    with _run(job, max_steps=9) as run:
        run.prepare(net := _small_net(), torch.optim.AdamW(net.parameters(), lr=0.01))
        twin, outer = copy.deepcopy(net), copy.deepcopy(net)
        inner_step = torch.optim.AdamW(twin.parameters(), lr=0.01)
        outer_step = torch.optim.SGD(outer.parameters(), lr=lr, momentum=momentum, nesterov=momentum > 0)
        num_samples = 0.0
        sync_every, overlap_steps = job.aggregation.sync_every, job.aggregation.overlap_steps
        for number, batch in enumerate(run.batches(images(8)), start=1):
            assert run._pending is not None
            own = sum(run._pending.batch.assignment.sizes)
            loss = run.step(batch, loss_fn)
            inner_step.zero_grad()
            if own:
                twin_loss = loss_fn(twin, batch)
                twin_loss.backward()
                assert float(loss) == pytest.approx(float(twin_loss.detach()))
            else:
                assert np.isnan(float(loss))
            inner_step.step()
            num_samples += own
            if number % sync_every == 0:
                total = torch.tensor(num_samples)
                sums = [num_samples * parameter.detach() for parameter in twin.parameters()]
                for tensor in (total, *sums) if run.world_size > 1 else ():
                    dist.all_reduce(tensor)
                for parameter, weighted_sum in zip(outer.parameters(), sums, strict=True):
                    parameter.grad = parameter.detach() - weighted_sum / total
                outer_step.step()
                begun = copy.deepcopy(twin)
                num_samples = 0.0
            if number > overlap_steps and number % sync_every == overlap_steps:
                every = zip(twin.parameters(), begun.parameters(), outer.parameters(), strict=True)
                for parameter, old, new in every:
                    parameter.data.add_(new.detach() - old.detach())
            for theirs, mine in zip(twin.parameters(), net.parameters(), strict=True):
                worst = max(worst, float((theirs - mine).detach().abs().max()))
    return worst


@pytest.mark.parametrize("overlap_steps", [0, 2])
@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize(("method", "lr", "momentum"), [("local_sgd", 1.0, 0.0), ("diloco", 0.7, 0.9)])
def test_outer_steps_are_steps_of_nesterovs_method(
    method: str, lr: float, momentum: float, world_size: int, overlap_steps: int
) -> None:
    # Batches of 6 and 2: every other step a worker of three has no sample.
    aggregation = {"method": method, "sync_every": 3, "overlap_steps": overlap_steps}
    job = _job(precision="float64", aggregation=aggregation)
    for distance in run_ranks(_distance_from_torchs_own, world_size, job, lr, momentum):
        assert distance < 1e-13


def _hashes(job: Job, two_nodes: bool) -> list[tuple[str, str, str]]:
    """After every step: of this worker's weights, of the consensus, and of the weights after that."""
    hashes = []
    with _two_nodes() if two_nodes else nullcontext(), _run(job, max_steps=7) as run:
        net = _Net()
        run.prepare(net, _SGD(p for p in net.parameters() if p.requires_grad))
        for batch in run.batches(images(12)):
            run.step(batch, loss_fn)
            own = run.weights_sha256()
            with run.consensus(), run.consensus():
                agreed = run.weights_sha256()
            hashes.append((own, agreed, run.weights_sha256()))
    return hashes


@pytest.mark.parametrize(
    ("two_nodes", "aggregation"),
    [
        (False, {"method": "diloco", "wire": "bfloat16"}),
        (False, {"method": "local_sgd"}),
        (True, {"method": "diloco"}),
    ],
)
def test_workers_are_equal_after_outer_steps_and_in_consensus(two_nodes: bool, aggregation: dict[str, Any]) -> None:
    job = _job(aggregation={"sync_every": 3, "sync_inside_nodes": two_nodes, **aggregation})
    runs = run_ranks(_hashes, 4 if two_nodes else 3, job, two_nodes)
    for number, of_ranks in enumerate(zip(*runs, strict=True), start=1):
        own, agreed, afterwards = zip(*of_ranks, strict=True)
        assert own == afterwards
        assert len(set(agreed)) == 1
        if number % 3 == 0:
            assert {*own, *agreed} == {own[0]}
        elif two_nodes:
            assert own[0] == own[1] != own[2] == own[3]
        else:
            assert len({*own, agreed[0]}) == 4


def test_without_others_late_averages_change_nothing() -> None:
    common: dict[str, Any] = {"precision": "float64"}
    job = _job(aggregation={"method": "local_sgd", "sync_every": 3, "overlap_steps": 2}, **common)
    ((plain, _),) = run_ranks(_train_plainly, 1, _job(**common), 13, 0.5, False)
    ((late, _),) = run_ranks(_train_plainly, 1, job, 13, 0.5, False)
    _assert_close(late, plain, 1e-12)


def _train_and_look(job: Job, looks: bool) -> Weights:
    with _run(job, max_steps=8) as run:
        net = _Net(dropout=0.5)
        run.prepare(net, torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1, momentum=0.9))
        for batch in run.batches(images(13)):
            run.step(batch, loss_fn)
            if looks:
                run.evaluate(images(3), measure)
        return _weights(run)


@pytest.mark.parametrize("overlap_steps", [0, 2])
def test_an_evaluation_never_changes_what_is_learned(overlap_steps: int) -> None:
    aggregation = {"method": "diloco", "sync_every": 3, "overlap_steps": overlap_steps}
    job = _job(aggregation=aggregation)
    for seen, unseen in zip(
        run_ranks(_train_and_look, 2, job, True), run_ranks(_train_and_look, 2, job, False), strict=True
    ):
        _assert_close(seen, unseen, 0.0)


def _ahead_of_others(overlap_steps: int) -> int:
    """After its outer step has begun, rank 0 makes `overlap_steps` - 1 steps that nobody else has begun."""
    job = _job(aggregation={"method": "diloco", "sync_every": 4, "overlap_steps": overlap_steps})
    with _run(job, max_steps=8) as run:
        run.prepare(net := _small_net(), torch.optim.SGD(net.parameters(), lr=0.1))
        token = torch.zeros(1)
        for batch in run.batches(images(48)):
            if run.steps == 4 and run.rank:
                dist.recv(token, src=0)
            if run.steps == 3 + overlap_steps and not run.rank:
                for other in range(1, run.world_size):
                    dist.send(token, dst=other)
            run.step(batch, loss_fn)
        return run.steps


def test_workers_train_on_while_an_outer_step_is_under_way() -> None:
    assert run_ranks(_ahead_of_others, 3, 3, timeout_s=100) == [8, 8, 8]


def _end_early() -> bool:
    """End right after an outer step has begun over a slow link; whether its sums have arrived."""
    plain = Aggregator._sum_in_float

    def slow(self: Aggregator, values: Tensor) -> None:
        time.sleep(0.5)
        plain(self, values)

    job = _job(aggregation={"method": "diloco", "sync_every": 4, "overlap_steps": 3})
    with mock.patch.object(Aggregator, "_sum_in_float", slow), mock.patch("paceline.comm.scheduler.CLOSE_S", 0.0):
        with _run(job, max_steps=4) as run:
            run.prepare(net := _small_net(), torch.optim.SGD(net.parameters(), lr=0.1))
            for batch in run.batches(images(24)):
                run.step(batch, loss_fn)
            engine = _engine(run)
        assert engine._under_way is not None
        return all(future is not None and future.done() for _, _, future in engine._under_way.moves)


def test_a_run_does_not_end_while_it_sends() -> None:
    """A process that ended then would abort."""
    assert run_ranks(_end_early, 2) == [True, True]


def _one_after_the_other(sync_every: int) -> int:
    """After the first step, nobody goes on before the rank below has made all steps but the one with an outer step.

    At the beginning of an epoch all workers compare the order of samples, and in the first step of a run whether the
    loss couples samples: there they do meet.
    """
    job = _job(aggregation={"method": "diloco", "sync_every": sync_every})
    with _run(job, max_steps=sync_every) as run:
        net = _Net()
        run.prepare(net, _SGD(p for p in net.parameters() if p.requires_grad))
        token = torch.zeros(1)
        for batch in run.batches(images(6 * sync_every)):
            if run.steps == 1 and run.rank:
                dist.recv(token, src=run.rank - 1)
            if run.steps == sync_every - 1 and run.rank + 1 < run.world_size:
                dist.send(token, dst=run.rank + 1)
            run.step(batch, loss_fn)
        return run.steps


def test_between_outer_steps_nobody_waits_for_anybody() -> None:
    assert run_ranks(_one_after_the_other, 3, 5, timeout_s=100) == [5, 5, 5]


def _final_loss(job: Job) -> tuple[float, float, list[str]]:
    with _run(job) as run:
        run.prepare(net := _small_net(), torch.optim.SGD(net.parameters(), lr=0.05))
        before = run.evaluate(images(48, augment=False), measure)["loss"]
        for batch in run.batches(images(48, augment=False)):
            run.step(batch, loss_fn)
        return before, run.evaluate(images(48, augment=False), measure)["loss"], run.notes


def test_diloco_learns_about_as_much_as_synchronous_training() -> None:
    common: dict[str, Any] = {"global_batch_size": 12, "epochs": 30}
    (_, synchronous, _), _ = run_ranks(_final_loss, 2, _job(**common))
    for wire in ("float32", "bfloat16"):
        aggregation = {"method": "diloco", "sync_every": 8, "wire": wire}
        (before, after, notes), other = run_ranks(_final_loss, 2, _job(**common, aggregation=aggregation))
        assert (before, after) == other[:2]
        assert before - after > 0.8 * (before - synchronous)
        assert any("are averaged every 8 steps (diloco, outer lr 0.7, momentum 0.9)" in note for note in notes)
        assert any("rounded to bfloat16" in note for note in notes) == (wire == "bfloat16")


def _three_epochs(job: Job, interrupted: bool) -> Weights:
    """Each epoch is a batch of 6 and one of 3, where the second worker has no sample; an outer step follows step 3."""
    saved: list[Any] = []
    for epochs in ([0, 1], [2]) if interrupted else ([0, 1, 2],):
        with _run(job) as run:
            net = _Net()
            trained = [p for p in net.parameters() if p.requires_grad]
            run.prepare(net, torch.optim.SGD(trained, lr=0.1, momentum=0.9))
            if saved:
                run.model.load_state_dict(saved[0])
                run.optimizer.load_state_dict(saved[1])
                _engine(run).load_state_dict(saved[2])
            for epoch in epochs:
                for batch in run.batches(images(9), epoch):
                    run.step(batch, loss_fn)
            parts = run.model.state_dict(), run.optimizer.state_dict(), _engine(run).state_dict()
            saved = [copy.deepcopy(part) for part in parts]
            weights = _weights(run)
    return weights


def test_a_run_goes_on_from_a_state_between_two_outer_steps() -> None:
    job = _job(precision="float64", aggregation={"method": "diloco", "sync_every": 3})
    resumed, straight = run_ranks(_three_epochs, 2, job, True), run_ranks(_three_epochs, 2, job, False)
    for theirs, mine in zip(resumed, straight, strict=True):
        _assert_close(theirs, mine, 1e-12)


def _loaded_after_prepare() -> tuple[Weights, Weights, Weights]:
    with _run(_job(aggregation={"method": "diloco", "sync_every": 2}), max_steps=2) as run:
        run.prepare(net := _small_net(), torch.optim.SGD(net.parameters(), lr=0.0))
        run.model.load_state_dict({"1.weight": torch.ones(10, 192), "1.bias": torch.ones(10)})
        loaded = _weights(run)
        with run.consensus():
            agreed = _weights(run)
        for batch in run.batches(images(12)):
            run.step(batch, loss_fn)
        return loaded, agreed, _weights(run)


def test_weights_may_be_loaded_after_they_were_prepared() -> None:
    for loaded, agreed, after_an_outer_step in run_ranks(_loaded_after_prepare, 2):
        _assert_close(agreed, loaded, 1e-6)
        _assert_close(after_an_outer_step, loaded, 0.0)


def _in_float16(job: Job) -> tuple[Weights, Weights]:
    with _run(job, max_steps=12) as run:
        run.prepare(net := _small_net(), torch.optim.SGD(net.parameters(), lr=0.1))
        before = _weights(run)
        for batch in run.batches(images(8)):
            run.step(batch, loss_fn)
        return before, _weights(run)


def test_an_idle_worker_has_no_gradient_to_unscale() -> None:
    # Batches of 6 and 2: every other step one worker has no sample.
    aggregation = {"method": "local_sgd", "sync_every": 3}
    job = _job(aggregation=aggregation, precision="float16", optim={"clip_norm": 100.0})
    (before, first), *others = run_ranks(_in_float16, 3, job)
    assert np.isfinite(first["1.weight"]).all()
    assert np.abs(first["1.weight"] - before["1.weight"]).max() > 1e-3
    for _, weights in others:
        _assert_close(weights, first, 0.0)


def _train_digits(job: Job, folder: Path) -> RunRecord:
    spread = Plan(world_size=worker_facts().world_size, algorithm="ring", timeout_s=30)
    return train_job(job, spread, RunOutput(folder, progress=None), max_steps=6)


def test_a_run_by_the_loop_saves_what_all_workers_agree_on(tmp_path: Path) -> None:
    job = Job.from_mapping(
        {
            "global_batch_size": 64,
            "data": {"name": "digits", "train_limit": 256, "test_limit": 64},
            "epochs": 2,
            "aggregation": {"method": "local_sgd", "sync_every": 4},
        }
    )
    records = run_ranks(_train_digits, 2, job, tmp_path)
    assert len({record.weights_sha256 for record in records}) == 1
    assert len({record.accuracy for record in records}) == 1
    assert any("are averaged every 4 steps (local_sgd)" in note for note in records[0].notes)
    # No outer step followed the sixth step, so only a consensus makes workers equal.
    assert records[0].steps == 6
    saved = load_file(tmp_path / "model.safetensors")
    assert all(bool(torch.isfinite(value).all()) for value in saved.values())
    assert weights_sha256(saved) == records[0].weights_sha256


def _mistakes() -> list[str]:
    sentences = []
    for values in ({"aggregation": {"method": "local_sgd"}},):
        with _run(_job(**values)) as run:
            net = _small_net()
            try:
                run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
                batch = next(run.batches(images(12)))
                with run.consensus():
                    run.step(batch, loss_fn)
            except JobError as error:
                sentences.append(str(error))
    return sentences


def test_mistakes_are_one_sentence() -> None:
    for (inside,) in run_ranks(_mistakes, 2):
        assert "inside run.consensus" in inside
