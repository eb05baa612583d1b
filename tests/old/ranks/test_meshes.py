"""The law of the world size for meshes: however a model is shared out, it learns what it learns on one worker."""

from __future__ import annotations

import functools
import resource
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import paceline
from paceline.comm import Aggregator
from paceline.errors import JobError, ModelError, PacelineError
from paceline.parallel.dtensor import local_bytes
from paceline.spec import Job, PipelineSpec, Plan, check_mesh, parse_mesh
from paceline.spec.codec import to_mapping
from tests.kit.workers import in_turn, run_ranks
from tests.old.ranks.training import Outcome, images, largest_difference, train

STEPS = 10
ONE_EACH, TWO_EACH, ZERO_BUBBLE = PipelineSpec(), PipelineSpec("interleaved", 2), PipelineSpec("zero_bubble")
PAIRS = ("dp2 x pp2", "fsdp2 x pp2")


def job_for(model: str, precision: str = "float64", **changes: Any) -> Job:
    values = {
        "model": model,
        "global_batch_size": 24,
        "virtual_shards": 6,
        "epochs": 2,
        "precision": precision,
        "optim": {"name": "sgd", "lr": 0.02, "momentum": 0.9, "weight_decay": 1e-4, "clip_norm": 1.0},
    }
    return Job().with_values(**(values | changes))


def on(job: Job, strategy: str, num_workers: int, **plan: Any) -> Outcome:
    # 130 samples are six batches of an epoch, the last of them ragged: 10 samples for six shards.
    size = 16 if job.model.name == "lenet" else 8
    data, test = images(130, (3, size, size)), images(45, (3, size, size), augment=False)
    mesh = None if num_workers == 1 else parse_mesh(strategy, num_workers)
    return train(job, data, test, max_steps=STEPS, mesh=mesh, **plan)


@functools.cache
def alone(job_key: tuple[str, str]) -> Outcome:
    outcome: Outcome = run_ranks(on, 1, job_for(*job_key), "dp", 1, timeout_s=120)[0]
    return outcome


def assert_same(model: str, strategy: str, num_workers: int, precision: str, **plan: Any) -> None:
    base = alone((model, precision))
    outcomes = run_ranks(_on, num_workers, job_for(model, precision), strategy, num_workers, plan, timeout_s=240)
    tolerance = 1e-10 if precision == "float64" else 1e-6
    first = outcomes[0]
    assert first.weights.keys() == base.weights.keys()
    assert largest_difference(base, first) <= 10 * tolerance  # of weights after ten steps with momentum
    assert max(abs(a - b) / abs(a) for a, b in zip(base.losses, first.losses, strict=True)) <= tolerance
    assert all(one.losses == first.losses and one.metrics == first.metrics for one in outcomes)
    assert len({one.sha for one in outcomes}) == 1
    assert first.metrics["accuracy"] == base.metrics["accuracy"]


def _on(job: Job, strategy: str, num_workers: int, plan: dict[str, Any]) -> Outcome:
    return on(job, strategy, num_workers, **plan)


def test_sharded_parameters() -> None:
    assert_same("lenet", "fsdp", 2, "float64")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["zero1", "zero2", "hsdp", "pp", *PAIRS])
def test_four_workers(strategy: str) -> None:
    """Six shards on four workers: two of them have one more pass than the others."""
    assert_same("lenet", strategy, 4, "float64")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp", "dp2 x pp2"])
def test_batch_norm_on_four_workers(strategy: str) -> None:
    assert_same("resnet20", strategy, 4, "float64")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "strategy", "precision"),
    [
        ("lenet", "fsdp", "float32"),
        ("lenet", "fsdp2 x pp2", "float32"),
        ("resnet20", "fsdp", "float64"),  # in 32 bits its batch norm amplifies rounding beyond any useful bound
        ("resnet20", "fsdp2 x pp2", "float64"),
    ],
)
def test_single_precision_and_recomputed_activations(model: str, strategy: str, precision: Any) -> None:
    # Where stages begin, norms are added up; in 32 bits that shows. So it is not left to a measurement.
    pipeline = PipelineSpec(cuts=("stage2",) if model == "resnet20" and "pp" in strategy else ())
    assert_same(model, strategy, 4, precision, recompute=True, pipeline=pipeline)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [("fsdp", "pp"), ("fsdp2 x pp2", "dp")])
def test_a_run_goes_on_under_another_strategy(before: str, after: str, tmp_path: Path) -> None:
    """In the middle of an epoch; what it then learns is what it would have learned."""
    job = job_for("lenet", optim={"name": "adamw", "lr": 0.002}, checkpoint={"every_epoch": False})
    whole = run_ranks(_part, 1, job, "dp", 1, STEPS, None)[0]
    run_ranks(_part, 4, job, before, 4, 4, tmp_path, timeout_s=120)
    rest = run_ranks(_part, 4, job, after, 4, STEPS, tmp_path, timeout_s=120)[0]
    assert rest.losses == pytest.approx(whole.losses[4:], rel=1e-9)
    assert largest_difference(whole, rest) <= 1e-9


def _part(job: Job, strategy: str, num_workers: int, max_steps: int, folder: Path | None) -> Outcome:
    data = images(130, (3, 16, 16))
    mesh = parse_mesh(strategy, num_workers)
    return train(job, data, max_steps=max_steps, checkpoint_dir=folder, mesh=mesh)


# --- memory ---


def _wide(num_layers: int, width: int) -> nn.Sequential:
    layers = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(num_layers)]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def _held_bytes(strategy: str, num_workers: int) -> list[int]:
    """Parameters and optimizer state on this worker after a step, by parity."""
    return [_held_bytes_with(parity, strategy, num_workers) for parity in ("numeric", "bitwise")]


def _held_bytes_with(parity: str, strategy: str, num_workers: int) -> int:
    job = Job().with_values(parity=parity, global_batch_size=8, virtual_shards=4, epochs=1)
    plan = Plan(world_size=num_workers, mesh=parse_mesh(strategy, num_workers), algorithm="all_reduce", timeout_s=60)
    with paceline.init(job, plan=plan) as run:
        model = _wide(6, 64)
        run.prepare(model, torch.optim.Adam(model.parameters()))
        for batch in run.batches(_vectors(8, 64)):
            run.step(batch, _loss)
        state = [value for entry in run.optimizer.state.values() for value in entry.values()]
        return local_bytes([*run.model.parameters(), *state])


def _vectors(num_samples: int, width: int) -> Any:
    draw = torch.Generator().manual_seed(0)
    return torch.utils.data.TensorDataset(
        torch.randn(num_samples, width, generator=draw), torch.randint(0, 10, (num_samples,), generator=draw)
    )


def _loss(model: nn.Module, batch: Any) -> Tensor:
    inputs, targets = batch
    return F.cross_entropy(model(inputs), targets)


def test_a_worker_holds_its_part() -> None:
    whole = run_ranks(_held_bytes, 1, "dp", 1)[0]
    for parts in run_ranks(_held_bytes, 4, "fsdp", 4):
        assert all(part <= 0.35 * all_of_it for part, all_of_it in zip(parts, whole, strict=True))


LAYERS, WIDTH = 64, 1024
THREADS_BYTES = 64 << 20
"""Stacks of the threads that a run starts for itself."""


def _trained_within(limit_bytes: int, strategy: str, num_workers: int) -> float:
    """The loss after two steps of a model on the meta device, with so much more memory than torch itself takes."""
    used = int(Path("/proc/self/status").read_text().split("VmData:")[1].split()[0]) * 1024
    most = used + limit_bytes + THREADS_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    mesh = parse_mesh(strategy, num_workers)
    plan = Plan(world_size=num_workers, mesh=mesh, algorithm="all_reduce", timeout_s=60)
    job = Job().with_values(global_batch_size=4, virtual_shards=4, epochs=1, measure_noise=False)
    with paceline.init(job, plan=plan) as run:
        with torch.device("meta"):
            model = _wide(LAYERS, WIDTH)
        run.prepare(model, torch.optim.Adam(model.parameters()))
        return [float(run.step(batch, _loss)) for batch in run.batches(_vectors(8, WIDTH))][-1]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("strategy", ["fsdp", "pp"])
def test_a_model_three_times_too_large_for_a_worker(strategy: str) -> None:
    needed = 16 * (LAYERS * WIDTH**2)  # parameters, gradients and two moments, four bytes each
    losses = run_ranks(_trained_within, 4, needed // 3, strategy, 4, timeout_s=280)
    assert losses == pytest.approx([losses[0]] * 4)
    with pytest.raises(AssertionError, match=r"MemoryError|allocate"):
        run_ranks(_trained_within, 1, needed // 3, "dp", 1, timeout_s=280)


def _first_loss(strategy: str, num_workers: int, on_meta: bool) -> float:
    mesh = parse_mesh(strategy, num_workers)
    plan = Plan(world_size=num_workers, mesh=mesh, algorithm="all_reduce", timeout_s=60)
    with paceline.init(Job().with_values(global_batch_size=8, virtual_shards=4, epochs=1), plan=plan) as run:
        with torch.device("meta" if on_meta else "cpu"):
            model = nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10))
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        return next(float(run.step(batch, _loss)) for batch in run.batches(_vectors(8, 12)))


def test_weights_drawn_layer_by_layer_are_those_of_a_model_built_at_once() -> None:
    expected = run_ranks(_first_loss, 1, "dp", 1, False)[0]
    assert run_ranks(_first_loss, 1, "dp", 1, True)[0] == expected
    assert run_ranks(_first_loss, 4, "fsdp", 4, True) == pytest.approx([expected] * 4, rel=1e-6)


# --- models that are not all alike ---


class _SkipsLayers(nn.Module):
    """Of its middle, every pass draws whether it is used; another layer never is."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle = nn.Linear(12, 16), nn.ModuleList([nn.Linear(16, 16)])
        self.never, self.last = nn.Linear(16, 16), nn.Linear(16, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.relu(self.first(inputs))
        if float(torch.rand(())) < 0.5:
            hidden = torch.relu(self.middle[0](hidden))
        result: Tensor = self.last(hidden)
        return result


def _tied() -> nn.Module:
    """Of which two layers, each a block of its own for its size, have one weight."""
    first, last = nn.Linear(512, 512, bias=False), nn.Linear(512, 512, bias=False)
    last.weight = first.weight
    middle = nn.Sequential(nn.Linear(512, 512), nn.Tanh())
    return nn.Sequential(nn.Linear(12, 512), first, nn.Tanh(), middle, last, nn.Linear(512, 10))


class _NeverUsed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*[nn.Sequential(nn.Linear(12, 12), nn.BatchNorm1d(12), nn.ReLU()) for _ in range(3)])
        self.never, self.last = nn.Linear(3, 3), nn.Linear(12, 10)
        next(self.body.parameters()).requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.last(self.body(inputs))
        return result


class _Words(nn.Module):
    """Its embedding, large enough for tensor groups to divide it, is used by operations in every stage."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.words, self.last = nn.Linear(12, 256), nn.Embedding(256, 256), nn.Linear(256, 10)
        self.middle = nn.ModuleList([nn.Linear(256, 256), nn.Linear(256, 256)])

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs) + self.words(torch.full((len(inputs),), 3))
        for layer in self.middle:
            hidden = torch.relu(layer(torch.tanh(F.linear(hidden, self.words.weight))))
        result: Tensor = self.last(F.linear(hidden, self.words.weight))
        return result


class _Repeats(nn.Module):
    """The same layers four times, in several stages."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(12, 192), nn.Linear(192, 10)
        self.up, self.down, self.beside = nn.Linear(192, 256), nn.Linear(256, 192), nn.Linear(192, 192)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        for _ in range(4):
            hidden = hidden + self.down(torch.relu(self.up(hidden))) + self.beside(hidden)
        result: Tensor = self.last(hidden)
        return result


class _Block(nn.Module):
    """Returns a view; large enough to be gathered by itself."""

    def __init__(self, *, changes_input: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(256, 300), nn.Linear(300, 256)
        self.changes_input = changes_input

    def forward(self, inputs: Tensor) -> Tensor:
        if self.changes_input:
            inputs = inputs.mul_(0.9)
        result: Tensor = self.down(F.relu_(self.up(inputs)))
        return result.view(inputs.shape)


class _InPlace(nn.Module):
    """Changes in place what its blocks return, or they what they are given."""

    def __init__(self, *, changes_input: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(12, 256), nn.Linear(256, 10)
        self.blocks = nn.ModuleList([_Block(changes_input=changes_input) for _ in range(2)])
        self.changes_input = changes_input

    def forward(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = self.first(inputs)
        for block in self.blocks:
            result = block(hidden)
            if not self.changes_input:
                result += hidden
            hidden = result.mul_(0.9)
        outputs: Tensor = self.last(hidden)
        return outputs.view(-1, 10)


_BUILDERS: dict[str, Any] = {
    "in place": _InPlace,
    "inputs in place": partial(_InPlace, changes_input=True),
    "skips": _SkipsLayers,
    "tied": _tied,
    "never": _NeverUsed,
    "words": _Words,
    "repeats": _Repeats,
}


MAY_SKIP = {"skips", "never", "words", "repeats"}
"""Which may leave out parameters, or are said to."""


class _Infinite(torch.autograd.Function):
    """Whose gradient is infinite, and whose value is not."""

    @staticmethod
    def forward(_ctx: Any, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * torch.inf


def _learn(
    builder: str,
    strategy: str,
    num_workers: int,
    infinite_at: int | None = None,
    pipeline: PipelineSpec = ONE_EACH,
    recompute: bool = False,
) -> dict[str, Any]:
    mesh = parse_mesh(strategy, num_workers) if num_workers > 1 else None
    plan = Plan(
        world_size=num_workers, mesh=mesh, pipeline=pipeline, recompute=recompute, algorithm="all_reduce", timeout_s=60
    )
    job = Job().with_values(
        global_batch_size=12,
        virtual_shards=4,
        epochs=2,
        precision="float64",
        nonfinite="skip",
        optim={"clip_norm": 1.0},
    )
    num_passes: list[int] = []
    said: list[str] = []

    class Passes:
        """Counts in an attribute of a class, which is not given back after passes that count for nothing."""

        total = 0

    with paceline.init(job, plan=plan) as run:
        run.say = said.append
        model = _BUILDERS[builder]()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
        run.prepare(model, optimizer, find_unused_parameters=builder in MAY_SKIP, example=torch.randn(2, 12).double())

        def loss_fn(model: nn.Module, batch: Any) -> Tensor:
            Passes.total += 1
            outputs = model(batch[0])
            outputs *= 0.5  # in place, as users may
            return F.cross_entropy(_Infinite.apply(outputs) if run.steps == infinite_at else outputs, batch[1])  # type: ignore[no-untyped-call]

        losses = []
        for batch in run.batches(_vectors(36, 12)):
            before = Passes.total
            losses.append(float(run.step(batch, loss_fn)))
            num_passes.append(Passes.total - before)
        weights = {name: tensor.detach().clone().numpy() for name, tensor in run.whole_state().items()}
        return {
            "outcome": Outcome(run.weights_sha256(), weights, losses, {}),
            "num_passes": num_passes,
            "said": said,
            "noise": to_mapping(run.noise),
        }


def _learn_all(cases: list[tuple[Any, ...]]) -> list[dict[str, Any]]:
    """One run after the other, in one process."""
    return in_turn(_learn, cases)


def assert_learn_the_same(num_workers: int, cases: list[tuple[Any, ...]]) -> list[dict[str, Any]]:
    """Cases: model, strategy, the step of an infinite gradient, the pipeline's form."""
    alone = run_ranks(_learn_all, 1, [(model, "dp", 1, *more) for model, _, *more in cases], timeout_s=120)[0]
    spread_cases = [(model, strategy, num_workers, *more) for model, strategy, *more in cases]
    spread: list[dict[str, Any]] = run_ranks(_learn_all, num_workers, spread_cases, timeout_s=240)[0]
    for one, other in zip(alone, spread, strict=True):
        assert other["outcome"].losses == pytest.approx(one["outcome"].losses, rel=1e-9)
        assert other["outcome"].weights.keys() == one["outcome"].weights.keys()
        assert largest_difference(one["outcome"], other["outcome"]) <= 1e-7
        assert [text for text in one["said"] if "Step" in text] == [text for text in other["said"] if "Step" in text]
    return spread


@pytest.mark.slow
def test_parameters_that_are_unused_tied_or_frozen() -> None:
    """And passes without random numbers are one a worker, once the first step has shown that, and in seven passes more
    that its loss is a mean over samples, at other weights too, and does not follow from earlier calls; six more where a
    forward pass reads numbers out of tensors, with the same numbers at other weights."""
    spread = assert_learn_the_same(2, [("skips", "fsdp"), ("tied", "fsdp"), ("tied", "pp"), ("never", "pp")])
    assert spread[0]["num_passes"] == [7 + 6 + 2, *[2] * 5]
    # Two shards are compared again in the steps 2 and 4.
    assert spread[2]["num_passes"] == [7 + 2, 7 + 1, 1, 7 + 1, 1, 1]


@pytest.mark.slow
def test_stages_that_share_parameters_hold_the_same_slices_of_them() -> None:
    """Also where one worker has both stages, and where a stage uses a parameter twice, whose backward pass is whole."""
    cases = [(model, "dp2 x pp2", None, form) for model in ("words", "repeats") for form in (ZERO_BUBBLE, TWO_EACH)]
    assert_learn_the_same(4, [*cases, ("words", "fsdp2 x pp2", None, ZERO_BUBBLE)])
    assert_learn_the_same(2, [(model, "pp", None, PipelineSpec("zero_bubble", 2)) for model in ("words", "repeats")])


@pytest.mark.slow
def test_what_blocks_return_may_be_changed_in_place() -> None:
    """Hooks on views are lost by that: backward gathered nothing, or with ZeRO 1 and 2 left out a sum over workers."""
    strategies = ("fsdp", "zero1", "zero2", "hsdp", "fsdp2 x pp2")
    cases = [("in place", one, None, ONE_EACH) for one in strategies]
    assert_learn_the_same(4, [*cases, ("in place", "fsdp", None, ONE_EACH, True)])
    assert_learn_the_same(2, [("in place", "pp", None, PipelineSpec(cuts=("view",)))])  # as the loss function does


@pytest.mark.parametrize(("strategy", "recompute"), [("fsdp", False), ("zero1", False), ("pp", True)])
def test_blocks_that_change_their_inputs_are_refused_where_these_are_needed(strategy: str, recompute: bool) -> None:
    ends = run_ranks(_refusal_of_inputs, 2, strategy, recompute)
    assert all(ends)


def _refusal_of_inputs(strategy: str, recompute: bool) -> str:
    try:
        _learn("inputs in place", strategy, 2, None, ONE_EACH, recompute)
    except ModelError as problem:
        return str(problem)
    except (RuntimeError, PacelineError):
        return "ended with the other worker"
    return ""


def test_two_stages_of_one_worker_are_not_sharded_apart_where_they_share_a_parameter() -> None:
    for strategy in ("fsdp2 x pp2", "zero1:2 x pp2"):
        for sentence in run_ranks(_refusal, 4, strategy):
            assert sentence.startswith("'words.weight' is used in stages")
            assert "some of which are on one worker" in sentence


def _refusal(strategy: str) -> str:
    # Measured cuts could leave the embedding's last use to another worker, and then nothing is wrong.
    pipeline = PipelineSpec("interleaved", 2, cuts=("middle.0", "middle.1", "last"))
    with pytest.raises(ModelError) as refused:
        _learn("words", strategy, 4, None, pipeline)
    return str(refused.value)


@pytest.mark.slow
def test_an_infinite_gradient_is_named_by_workers_together_and_skipped() -> None:
    spread = assert_learn_the_same(2, [("never", "fsdp", 2), ("never", "pp", 2)])
    assert all("Step 3: the gradient of 'body.0.0.bias'" in one["said"][-1] for one in spread)


@pytest.mark.slow
def test_replicas_that_are_spread_tell_of_noise_what_whole_ones_do_and_use_what_others_do() -> None:
    whole = run_ranks(_learn_all, 2, [("never", "dp", 2)])[0][0]
    spread = assert_learn_the_same(4, [("never", "dp2 x pp2")])
    assert whole["noise"]["num_measured"] == 3
    assert all(one["noise"] == pytest.approx(whole["noise"], rel=1e-6) for one in spread[:2])


# --- replicas ---


def _order_of_sums(strategies: list[str]) -> list[list[str]]:
    """What happens in the second step: sums that begin, and the gradient of each layer."""
    return [_order_of_events(strategy) for strategy in strategies]


def _order_of_events(strategy: str) -> list[str]:
    mesh = parse_mesh(strategy, 4)
    # Measured cuts could leave a stage with one layer, after whose gradient there is no other.
    pipeline = PipelineSpec(cuts=("2",) if mesh.pp > 1 else ())
    plan = Plan(4, mesh=mesh, pipeline=pipeline, algorithm="all_reduce", timeout_s=60)
    job = Job().with_values(global_batch_size=8, virtual_shards=4, epochs=1, measure_noise=False)
    events: list[str] = []
    plain = Aggregator.sum_bucket

    def sum_bucket(self: Aggregator, bucket: Any) -> Any:
        events.append("sum")
        return plain(self, bucket)

    Aggregator.sum_bucket = sum_bucket  # type: ignore[method-assign]
    try:
        with paceline.init(job, plan=plan) as run:
            # Of every stage the last layers are a bucket of their own: a MiB and more, on each of two workers.
            model = nn.Sequential(*[nn.Sequential(nn.Linear(768, 768), nn.ReLU()) for _ in range(4)])
            run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), example=torch.randn(2, 768))
            for name, parameter in run.engine.module.named_parameters():
                if name.endswith("weight"):
                    parameter.register_post_accumulate_grad_hook(lambda _, name=name: events.append(name))
            for number, batch in enumerate(run.batches(_vectors(16, 768))):
                if number == 1:
                    events.clear()
                run.step(batch, _loss)
        return events
    finally:
        Aggregator.sum_bucket = plain  # type: ignore[method-assign]


@pytest.mark.slow
def test_replicas_add_up_while_backward_goes_on() -> None:
    """In the last of a step's passes, and never in one before it."""
    strategies = ["dp2 x fsdp2", "dp2 x pp2"]
    for strategy, events in zip(strategies, run_ranks(_order_of_sums, 4, strategies, timeout_s=120)[0], strict=True):
        first = events.index("sum")
        last_gradient = max(place for place, event in enumerate(events) if event != "sum")
        assert first < last_gradient, strategy
        assert events.count(events[last_gradient]) == events[:first].count(events[0]), strategy


# --- refused ---


@pytest.mark.parametrize("changes", [{"precision": "float16"}])
def test_what_needs_whole_replicas_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(JobError, match="needs the whole model on every worker"):
        check_mesh(Job().with_values(**changes), parse_mesh("fsdp", 2))


def test_bitwise_parity_is_refused_where_a_mesh_rounds_in_another_way() -> None:
    with pytest.raises(JobError, match="parity = 'bitwise' needs channels_last = false with fsdp2"):
        check_mesh(Job().with_values(parity="bitwise", channels_last=True), parse_mesh("fsdp2", 2))
