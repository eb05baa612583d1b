"""Losses that are no mean over samples: in every engine what one device computes on the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline
from paceline.env import worker_facts
from paceline.errors import PacelineError
from paceline.spec import Job, Plan, parse_mesh
from tests.kit.workers import in_turn, run_ranks

IGNORED = -100
VOCABULARY = 17
NUM_SAMPLES = 19  # batches of 8, 8 and 3: four shards, of which the last are empty
GLOBAL_BATCH = 8


@dataclass(frozen=True)
class Case:
    """One way to train."""

    strategy: str = "dp"
    parity: str = "numeric"
    loss: str = "tokens"
    dropout: float = 0.0
    values: dict[str, Any] = field(default_factory=dict, hash=False)
    """More of the job."""
    devices: int = 1


@dataclass(frozen=True)
class Result:
    losses: list[float]
    values: list[dict[str, float]]
    weights: dict[str, NDArray[Any]]
    sha: str
    notes: list[str]
    norms: tuple[float, float] | None
    """|G|^2 and tr(Sigma) that gradient noise was measured by."""


def corpus() -> TensorDataset:
    """Token ids and labels of very uneven length: half of the samples are padding alone."""
    draw = np.random.default_rng(5)
    tokens = draw.integers(0, VOCABULARY, (NUM_SAMPLES, 6))
    labels = np.roll(tokens, -1, 1)
    for row, length in enumerate(draw.choice([0, 0, 0, 1, 2, 6], NUM_SAMPLES)):
        labels[row, length:] = IGNORED
    return TensorDataset(torch.from_numpy(tokens), torch.from_numpy(labels))


def token_model(dropout: float = 0.0) -> nn.Sequential:
    return nn.Sequential(
        nn.Embedding(VOCABULARY, 8), nn.Linear(8, 16), nn.GELU(), nn.Dropout(dropout), nn.Linear(16, VOCABULARY)
    )


def token_loss(model: nn.Module, batch: Any) -> Any:
    """The mean over valid tokens, NaN without any; divided by hand, so that its gradient is NaN too."""
    tokens, labels = batch
    logits = model(tokens)
    counted = labels != IGNORED
    num_tokens = counted.sum()
    losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none", ignore_index=IGNORED)
    mean = (losses * counted).sum() / num_tokens
    hits = ((logits.argmax(-1) == labels) * counted).double().sum() / num_tokens
    return paceline.Mean(mean, num_tokens), {
        "accuracy": paceline.Mean(hits, num_tokens),
        "first": tokens[:, 0].double().mean(),
        "two": 2.0,
    }


def plain_mean(model: nn.Module, batch: Any) -> Tensor:
    """What users write: a mean over valid tokens that is returned as if it were one over samples."""
    tokens, labels = batch
    losses = F.cross_entropy(model(tokens).transpose(1, 2), labels, reduction="none", ignore_index=IGNORED)
    mean: Tensor = losses.sum() / (labels != IGNORED).sum().clamp(min=1)
    return mean


def contrastive(model: nn.Module, batch: Any) -> Tensor:
    """Each sample against all others of the batch."""
    vectors = F.normalize(model(batch[0]).mean(1), dim=1)
    scores = vectors @ vectors.T / 0.1
    return F.cross_entropy(scores, torch.arange(len(scores)))


def squares(model: nn.Module, batch: Any) -> Tensor:
    """A plain mean over samples."""
    mean: Tensor = model(batch[0]).square().mean()
    return mean


def squares_and_values(model: nn.Module, batch: Any) -> Any:
    """A plain loss with further values."""
    output = model(batch[0])
    return output.square().mean(), {
        "largest": output.abs().amax((1, 2)).mean(),
        "tokens": paceline.Mean(1.5, weight=len(output)),
    }


LOSSES: dict[str, Callable[..., Any]] = {
    "tokens": token_loss,
    "plain mean": plain_mean,
    "contrastive": contrastive,
    "squares": squares,
    "squares and values": squares_and_values,
}


def run_of(case: Case, world_size: int) -> tuple[Job, Plan]:
    job = Job.from_mapping(
        {
            "global_batch_size": GLOBAL_BATCH,
            "virtual_shards": 4,
            "epochs": 2,
            "parity": case.parity,
            "precision": "float64",
            "optim": {"clip_norm": 0.5},
        }
        | case.values
    )
    mesh = parse_mesh(case.strategy, world_size, 1) if world_size > 1 else None
    algorithm: Any = "tree_exact" if case.parity == "bitwise" else "all_reduce"
    return job, Plan(
        world_size=world_size,
        algorithm=algorithm,
        timeout_s=120,
        mesh=mesh,
        devices_in_process=case.devices,
    )


def train(case: Case) -> Result:
    job, plan = run_of(case, worker_facts().world_size)
    with paceline.init(job, plan=plan) as run:
        model = token_model(case.dropout)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        run.prepare(model, optimizer, example=torch.zeros(2, 6, dtype=torch.long) if run.mesh.pp > 1 else None)
        losses: list[float] = []
        values: list[dict[str, float]] = []
        for batch in run.batches(corpus()):
            losses.append(float(run.step(batch, LOSSES[case.loss])))
            values.append({name: float(value) for name, value in run.values.items()})
        weights = {name: value.detach().numpy().copy() for name, value in run.whole_state().items()}
        noise = run.noise.mean
        norms = None if noise is None else (noise.grad_sqr, noise.grad_var)
        return Result(losses, values, weights, run.weights_sha256(), run.notes, norms)


def plain_loop(loss: str) -> Result:
    """The same training without Paceline, but for the order of samples: whole batches on one device."""
    job, plan = run_of(Case(), 1)
    with paceline.init(job, plan=plan) as run:
        model = token_model().double()
        own = token_model().double()
        own.load_state_dict(model.state_dict())
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
        optimizer = torch.optim.SGD(own.parameters(), lr=0.5)
        losses: list[float] = []
        values: list[dict[str, float]] = []
        for batch in run.batches(corpus()):
            run.step(batch, squares)  # moves on to the next batch
            returned: Any = LOSSES[loss](own, batch)
            first, named = returned if isinstance(returned, tuple) else (returned, {})
            mean: Any = first.value if isinstance(first, paceline.Mean) else first
            optimizer.zero_grad()
            mean.backward()
            nn.utils.clip_grad_norm_(own.parameters(), 0.5)
            optimizer.step()
            losses.append(float(mean))
            plain = {name: one.value if isinstance(one, paceline.Mean) else one for name, one in named.items()}
            values.append({name: float(value) for name, value in plain.items()})
        weights = {name: value.detach().numpy().copy() for name, value in own.state_dict().items()}
    return Result(losses, values, weights, "", [], None)


def train_all(cases: tuple[Case, ...]) -> list[Result]:
    return in_turn(train, [(case,) for case in cases])


BITWISE = (
    Case(parity="bitwise"),
    Case(parity="bitwise", dropout=0.3),
    Case(parity="bitwise", loss="squares and values"),
    Case(parity="bitwise", loss="plain mean"),
)
"""Compared bit for bit between the numbers of workers, and the first with the plain loop."""
COUPLED = (Case(loss="plain mean"), Case(loss="contrastive"))
"""Compared between the numbers of workers."""
EXACT = (Case(), Case(loss="squares and values"))
"""Compared with the plain loop."""
TWO_PARTS = tuple(Case(parity=parity, values={"virtual_shards": 2}) for parity in ("numeric", "bitwise"))
"""On two workers, gradient noise is measured between the same two parts of the batch."""
SERVERS = {"aggregation": {"method": "parameter_server_async", "staleness": 0}, "optim": {"clip_norm": None}}
OF_WORLD: dict[int, tuple[Case, ...]] = {
    1: (*EXACT, Case(devices=2), Case(devices=3, loss="squares and values")),
    2: (
        *EXACT,
        *TWO_PARTS,
        *(Case(mesh, loss=loss) for mesh in ("fsdp", "pp") for loss in ("tokens", "squares and values")),
    ),
    3: EXACT,
    4: tuple(Case(mesh) for mesh in ("dp2 x fsdp2", "dp2 x pp2", "fsdp2 x pp2")),
}


@cache
def trained(world_size: int) -> dict[Case, Result]:
    """All cases of a number of workers, in one launch; the same on all workers."""
    cases = OF_WORLD[world_size] if world_size == 4 else (*OF_WORLD[world_size], *BITWISE, *COUPLED)
    of_ranks = run_ranks(train_all, world_size, cases, timeout_s=600)
    for one in of_ranks[1:]:
        for mine, theirs in zip(of_ranks[0], one, strict=True):
            assert mine.losses == theirs.losses
            assert mine.values == theirs.values
            assert mine.sha == theirs.sha
    return dict(zip(cases, of_ranks[0], strict=True))


@cache
def alone(loss: str) -> Result:
    result: Result = run_ranks(plain_loop, 1, loss)[0]
    return result


def assert_close(mine: Result, theirs: Result, tolerance: float = 1e-12) -> None:
    np.testing.assert_allclose(mine.losses, theirs.losses, rtol=tolerance)
    assert [sorted(values) for values in mine.values] == [sorted(values) for values in theirs.values]
    for one, other in zip(mine.values, theirs.values, strict=True):
        for name, value in one.items():
            assert value == pytest.approx(other[name], rel=tolerance), name
    for name, weights in mine.weights.items():
        np.testing.assert_allclose(weights, theirs.weights[name], rtol=tolerance, atol=tolerance, err_msg=name)


def test_the_corpus_is_as_hard_as_it_should_be() -> None:
    assert np.isfinite(alone("tokens").losses).all()
    lengths = (corpus().tensors[1] != IGNORED).sum(1)
    assert (lengths == 0).sum() > NUM_SAMPLES / 3
    assert trained(1)[BITWISE[3]].losses[1] != pytest.approx(alone("tokens").losses[1], rel=1e-3)


@pytest.mark.parametrize("world_size", OF_WORLD)
def test_every_engine_computes_what_one_device_does_on_the_whole_batch(world_size: int) -> None:
    for case, result in trained(world_size).items():
        if case in OF_WORLD[world_size] or case in (BITWISE[0], BITWISE[2]):
            assert_close(result, alone(case.loss))
            assert not any("virtual shards together" in note for note in result.notes)


@pytest.mark.parametrize("world_size", [2, 3])
def test_bitwise_parity_holds_for_weighted_losses(world_size: int) -> None:
    for case in BITWISE:
        mine, theirs = trained(world_size)[case], trained(1)[case]
        assert mine.sha == theirs.sha
        np.testing.assert_array_equal(mine.losses, theirs.losses)
        np.testing.assert_equal(mine.values, theirs.values)
        assert mine.norms == theirs.norms


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("case", COUPLED, ids=lambda case: f"{case.loss} {case.values}")
def test_a_loss_that_couples_samples_does_not_depend_on_the_workers(case: Case, world_size: int) -> None:
    assert_close(trained(world_size)[case], trained(1)[case])


def test_the_gradient_noise_of_a_weighted_loss_is_that_of_its_gradient() -> None:
    numeric, bitwise = (trained(2)[case].norms for case in TWO_PARTS)
    assert numeric is not None
    assert bitwise is not None
    assert numeric == pytest.approx(bitwise, rel=1e-9)
    results = trained(4)
    expected = trained(1)[BITWISE[0]].norms
    assert expected is not None
    for case in (Case("dp2 x fsdp2"), Case("dp2 x pp2")):
        norms = results[case].norms
        assert norms is not None
        # Estimates from other parts of the batch, of the norm of one gradient.
        assert norms[0] + norms[1] / GLOBAL_BATCH == pytest.approx(expected[0] + expected[1] / GLOBAL_BATCH, rel=1e-9)


def serve() -> Result:
    return train(Case(values=SERVERS))


def test_servers_divide_by_the_weight_of_the_whole_batch() -> None:
    (expected,) = run_ranks(train, 1, Case(parity="bitwise", values={"optim": {"clip_norm": None}}))
    for result in run_ranks(serve, 2, timeout_s=120):
        assert_close(result, expected)


# --- refusals ---


def _refusal_of(loss: Callable[..., Any], **values: Any) -> str:
    job, plan = run_of(Case(values=values), worker_facts().world_size)
    with paceline.init(job, plan=plan) as run:
        model = token_model()
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
        for batch in run.batches(corpus()):
            run.step(batch, loss)
    return ""


def _refusals() -> list[str]:
    def of(returned: Callable[[Tensor, Any], Any]) -> str:
        try:
            return _refusal_of(lambda model, batch: returned(model(batch[0]).mean(), batch))
        except PacelineError as problem:
            return str(problem)

    return [
        of(lambda loss, _: paceline.Mean(loss, -1)),
        of(lambda loss, _: paceline.Mean(loss, loss)),
        of(lambda loss, _: paceline.Mean(loss, torch.ones(2))),
        of(lambda loss, _: paceline.Mean(loss, None)),  # type: ignore[arg-type]
        of(lambda loss, _: (loss, {"words": "many"})),
        of(lambda loss, _: (loss, {"words": torch.ones(3)})),
        of(lambda loss, _: (loss, loss, loss)),
        of(lambda loss, batch: (loss, {"a": 1.0} if int(batch[0][0, 0]) % 2 else {"b": 1.0})),
    ]


def test_what_cannot_be_added_is_refused_in_a_sentence() -> None:
    (refusals,) = run_ranks(_refusals, 1)
    for refusal, expected in zip(
        refusals,
        [
            "The weight of 'loss' is -1; it should be 0 or more",
            "The weight of 'loss' requires a gradient",
            "The weight of 'loss' is a tensor of shape (2,); it should be one number",
            "The weight of 'loss' is NoneType; it should be one number",
            "The loss function returned str as 'words'; each of its values should be one number",
            "The loss function returned a tensor of shape (3,) as 'words'",
            "The loss function returned a tuple of 3; it should return one number",
            "it should return the same names in every step",
        ],
        strict=True,
    ):
        assert expected in refusal


def _other_names() -> str:
    rank = worker_facts().rank
    try:
        return _refusal_of(lambda model, batch: (model(batch[0]).mean(), {f"of worker {rank}": 1.0}))
    except PacelineError as problem:
        return str(problem)


def test_workers_that_return_other_names_are_told() -> None:
    for refusal in run_ranks(_other_names, 2):
        assert "a plain loss and 'of worker 0' for some samples, and a plain loss and 'of worker 1'" in refusal


# --- evaluation ---


def perplexity(log_likelihoods: Tensor) -> tuple[float, int]:
    return float(log_likelihoods.double().sum()), len(log_likelihoods)


def evaluate(strategy: str) -> dict[str, float]:
    job, plan = run_of(Case(strategy, values={"eval_batch_size": 3}), worker_facts().world_size)
    functions = perplexity, lambda one, other: (one[0] + other[0], one[1] + other[1]), lambda s: np.exp(-s[0] / s[1])
    with paceline.init(job, plan=plan) as run:
        model = token_model()
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))

        def measure(model: nn.Module, batch: Any) -> dict[str, Any]:
            tokens, labels = batch
            mean, values = token_loss(model, batch)
            logits = model(tokens)
            counted = labels != IGNORED
            return {
                "loss": mean,
                "accuracy": values["accuracy"],
                "first": tokens[:, 0].double(),
                "f1": (logits.argmax(-1)[counted], labels[counted]),
                "scores": (logits[counted].softmax(-1)[:, 0], labels[counted] == 0),
                "perplexity": logits.log_softmax(-1)[counted].gather(1, labels[counted][:, None])[:, 0],
            }

        import torchmetrics.classification as metrics

        f1 = metrics.MulticlassF1Score(VOCABULARY, average="macro")
        return run.evaluate(corpus(), measure, {"f1": f1, "scores": metrics.BinaryAUROC(), "perplexity": functions}) | {
            "plain": _whole_f1(run.model),
            "seen": float(run.metrics["f1"]),
        }


def _whole_f1(model: nn.Module) -> float:
    from torchmetrics.functional.classification import multiclass_f1_score

    if any("DTensor" in type(parameter).__name__ for parameter in model.parameters()):
        return float("nan")
    tokens, labels = corpus().tensors
    with torch.no_grad():
        predicted = model(tokens).argmax(-1)
    counted = labels != IGNORED
    return float(multiclass_f1_score(predicted[counted], labels[counted], VOCABULARY, average="macro"))


@pytest.mark.parametrize(("strategy", "world_size"), [("dp", 2), ("dp", 3), ("fsdp", 2)])
def test_metrics_count_every_token_once_on_any_number_of_workers(strategy: str, world_size: int) -> None:
    (alone_,) = run_ranks(evaluate, 1, "dp")
    assert alone_["f1"] == pytest.approx(alone_["plain"])
    assert alone_["perplexity"] == pytest.approx(np.exp(alone_["loss"]))
    for result in run_ranks(evaluate, world_size, strategy):
        for name in set(alone_) - {"plain"}:
            tolerance = 0.0 if strategy == "dp" else 1e-12
            assert result[name] == pytest.approx(alone_[name], rel=tolerance, abs=0), name
