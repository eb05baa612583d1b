"""A mesh tried on paper: what it counts is what real workers send, and what the formulas say."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import paceline
from paceline.env import worker_facts
from paceline.models.gpt import GPT
from paceline.models.resnet import resnet18
from paceline.parallel.dry_run.comm_bytes import CommBytes
from paceline.parallel.dry_run.dry_run import dry_run, on_paper, trace_model
from paceline.parallel.sharded import shard
from paceline.parallel.tensor import bytes_per_sample, find_plan, layer_sizes
from paceline.spec import Job, Mesh, Plan
from tests.kit.workers import run_ranks
from tests.old.ranks.training import images, loss_fn
from tests.old.traffic import bytes_per_pass, padded_bytes, sent_bytes, sharding_bytes, sum_bytes


def _net() -> nn.Module:
    """Rows that do not divide by two, and blocks of more than a MiB."""
    return nn.Sequential(nn.Linear(64, 601), nn.ReLU(), nn.Linear(601, 603), nn.ReLU(), nn.Linear(603, 5))


def _gpt() -> nn.Module:
    return GPT(vocab_size=64, context=16, num_layers=4, num_heads=4, width=32)


_SHAPES = [tuple(parameter.shape) for parameter in _net().parameters()]
_TOKENS = torch.zeros(16, dtype=torch.int64)


def _sharded_pass(zero_stage: int, num_passes: int) -> float:
    """What this worker sends along fsdp, by every collective that torch makes."""
    facts = worker_facts()
    dist.init_process_group(
        "gloo", init_method=os.environ["PACELINE_RENDEZVOUS"], rank=facts.rank, world_size=facts.world_size
    )
    mesh = init_device_mesh("cpu", (facts.world_size,), mesh_dim_names=("fsdp",))
    model = shard(_net(), mesh, zero_stage, cpu_offload=False)
    assert isinstance(model, nn.Module)
    with CommBytes({mesh.get_group().group_name: "fsdp"}) as counted:
        for _ in range(num_passes):
            model(torch.ones(3, 64)).sum().backward()
    dist.destroy_process_group()
    return float(counted.sent_bytes["fsdp"])


def _on_paper(mesh: Mesh, num_micro_batches: int) -> float:
    model, arguments = on_paper(_net, torch.zeros(64), 3)
    return dry_run(model, arguments, mesh, num_micro_batches).sent_bytes("fsdp")


@pytest.mark.slow
@pytest.mark.parametrize("zero_stage", [2, 3])
def test_the_fsdp_axis_sends_what_the_formula_and_the_dry_run_say(zero_stage: int) -> None:
    mesh = Mesh(fsdp=2, zero_stage=zero_stage)
    expected = sharding_bytes(padded_bytes(_SHAPES, 4, 2), mesh, 2)
    assert run_ranks(_sharded_pass, 2, zero_stage, 2) == [expected, expected]
    assert run_ranks(_on_paper, 1, mesh, 2) == [expected]


def _summed_bytes() -> float:
    """What this worker hands to all_reduce in one step of plain data parallelism, from whatever thread."""
    counted: list[int] = []
    plain = dist.all_reduce

    def count(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        counted.append(tensor.numel() * tensor.element_size())
        return plain(tensor, *args, **kwargs)

    job = Job(global_batch_size=8, virtual_shards=2)
    with paceline.init(job, plan=Plan(world_size=2, algorithm="all_reduce", timeout_s=30), max_steps=2) as run:
        model = nn.Sequential(nn.Flatten(), nn.Linear(192, 10))
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        steps = iter(run.batches(images(32)))
        run.step(next(steps), loss_fn)
        dist.all_reduce = count
        run.step(next(steps), loss_fn)
        dist.all_reduce = plain
    return float(max(counted))


def test_the_dp_axis_sums_every_gradient_once() -> None:
    parameter_bytes = 4 * (1920 + 10)
    assert run_ranks(_summed_bytes, 2) == [parameter_bytes] * 2
    assert sent_bytes(Mesh(dp=2), parameter_bytes, 0, 0, 1)["dp"] == sum_bytes(parameter_bytes, 2) == parameter_bytes


def _tensor_bytes() -> tuple[float, float]:
    model, arguments = on_paper(_gpt, _TOKENS, 2)
    plan, sizes = find_plan(model, 4), layer_sizes(model, lambda one: one(*arguments), 2)
    expected = 2 * bytes_per_sample(plan, sizes, 4) + bytes_per_pass(plan, model, 0, 4)
    return dry_run(model, arguments, Mesh(tp=4), 1).sent_bytes("tp"), expected


def test_the_tp_axis_sends_what_its_formula_says() -> None:
    ((counted, expected),) = run_ranks(_tensor_bytes, 1)
    assert counted == expected > 0


def _positions() -> Any:
    found = []
    for sequence_parallel in (False, True):
        model, arguments = on_paper(_gpt, _TOKENS, 2)
        found.append(dry_run(model, arguments, Mesh(tp=4), 1, sequence_parallel=sequence_parallel))
    return found


@pytest.mark.slow
def test_parts_of_the_positions_keep_less() -> None:
    ((whole, parts),) = run_ranks(_positions, 1)
    assert parts.stages[0].activation_bytes < 0.9 * whole.stages[0].activation_bytes
    assert parts.stages[0].parameter_bytes == whole.stages[0].parameter_bytes
    assert whole.sent_bytes("tp") < parts.sent_bytes("tp") < 1.2 * whole.sent_bytes("tp")


def _large_meshes() -> list[Any]:
    found = []
    for mesh in (Mesh(dp=128, tp=4, pp=2), Mesh(dp=1024), Mesh(dp=8, fsdp=16, tp=4, pp=2)):
        model, arguments = on_paper(_gpt, _TOKENS, 2)
        found.append(dry_run(model, arguments, mesh, 4, optimizer_copies=2))
    model, arguments = on_paper(_gpt, _TOKENS, 2)
    found.append(dry_run(model, arguments, Mesh(dp=128, pp=2), 4, optimizer_copies=2, is_bitwise=True))
    return found


@pytest.mark.slow
def test_1024_devices_are_tried_on_one() -> None:
    ((cut, whole, sharded, exact),) = run_ranks(_large_meshes, 1, timeout_s=120)
    num_bytes = sum(4 * parameter.numel() for parameter in _gpt().parameters())
    (stage,) = whole.stages
    assert stage.parameter_bytes == num_bytes
    assert [memory.total_bytes for memory in whole.memory] == [4 * num_bytes + stage.activation_bytes]
    assert whole.sent_bytes("dp") == pytest.approx(2 * 1023 / 1024 * num_bytes)
    assert whole.bubble == 0
    assert len(cut.stages) == 2
    # Stages and tensor groups each hold a part; the tied embedding lives on both stages.
    assert num_bytes / 8 < max(stage.parameter_bytes for stage in cut.stages) < num_bytes / 4
    assert 0.2 <= cut.bubble < 0.4  # (p - 1)/(m + p - 1) with stages of equal time
    message_bytes = 2 * 16 * 32 * 4
    assert cut.sent_bytes("pp") == 4 * message_bytes + 64 * 32 * 4  # and the tied embedding's gradient, once
    assert exact.sent_bytes("pp") == 4 * (message_bytes + 64 * 32 * 4), "with every micro-batch in bitwise parity"
    assert [memory.gradient_bytes for memory in exact.memory] == [4 * one.gradient_bytes for one in exact.stages]
    # Each block is summed four times (Megatron-LM), by rings of four; beside that, rows of its weights are traded.
    assert cut.sent_bytes("tp") > 4 * 2 * 4 * sum_bytes(message_bytes, 4)
    for one, same in zip(sharded.stages, cut.stages, strict=True):
        assert one.parameter_bytes < same.parameter_bytes / 15
        assert one.sent_bytes["tp"] == same.sent_bytes["tp"]


def _layers() -> Any:
    model, arguments = on_paper(lambda: resnet18(stem="cifar"), torch.zeros(3, 32, 32), 2)
    return trace_model(model, arguments, 2)


@pytest.mark.slow
def test_a_convolutional_net_has_layers_that_stages_and_tensor_groups_share() -> None:
    (model,) = run_ranks(_layers, 1)
    layers = model.layers
    assert sum(layer.time_s for layer in layers) == pytest.approx(1)
    assert model.num_parameters == sum(p.numel() for p in resnet18(stem="cifar").parameters())
    convolutions = [layer for layer in layers if layer.num_all_reduces]
    assert sum(layer.time_s for layer in convolutions) > 0.9
    assert all(layer.num_tensor_slices >= 4 for layer in convolutions)
    assert all(layer.output_bytes > 0 for layer in layers[:-1])
