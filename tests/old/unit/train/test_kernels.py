"""By which of torch's kernels an optimizer updates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.testing._internal.distributed.fake_pg import FakeStore

from paceline.errors import JobError
from paceline.spec import parse_mesh
from paceline.train.optimizers.optim import check_updates_by_element, choose_kernels
from paceline.train.session.optimizer_state import Names, load_optimizer_state, optimizer_state

ELSEWHERE = torch.device("meta")


def parameters(device: str = "meta") -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(3, device=device)), nn.Parameter(torch.zeros(2, device=device))]


@pytest.fixture
def shards() -> Iterator[list[nn.Parameter]]:
    """Along two axes of a mesh."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    yield [
        nn.Parameter(DTensor.from_local(torch.zeros(3, device="meta"), mesh[axis], [Replicate()], run_check=False))
        for axis in ("a", "b")
    ]
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (torch.optim.SGD, {"fused": True, "foreach": None}),
        (torch.optim.AdamW, {"fused": True, "foreach": None}),
        (torch.optim.RMSprop, {"foreach": None}),
        (lambda p: torch.optim.SGD(p, foreach=True), {"fused": None, "foreach": True}),
        (lambda p: torch.optim.Adam(p, fused=False), {"fused": False}),
    ],
)
def test_fused_where_torch_has_it_and_nobody_chose(make: Any, expected: dict[str, Any]) -> None:
    optimizer = make(parameters())
    choose_kernels(optimizer, ELSEWHERE)
    (group,) = optimizer.param_groups
    assert {key: group[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("make", "fused"),
    [
        (torch.optim.AdamW, True),
        (torch.optim.Adam, True),
        (torch.optim.SGD, None),
        (lambda p: torch.optim.AdamW(p, fused=False), False),
        (lambda p: torch.optim.AdamW(p, foreach=False), None),
        (lambda p: torch.optim.AdamW(p, differentiable=True), None),
        (lambda p: torch.optim.AdamW([*p, nn.Parameter(torch.zeros(2, 3).t())]), None),
    ],
)
def test_on_a_cpu_only_adam_of_plain_parameters_is_fused(make: Any, fused: bool | None) -> None:
    optimizer = make(parameters("cpu"))
    choose_kernels(optimizer, torch.device("cpu"))
    assert optimizer.param_groups[0]["fused"] is fused


def test_what_stays_in_host_memory_is_not_fused_for_another_device() -> None:
    optimizer = torch.optim.AdamW(parameters("cpu"))
    choose_kernels(optimizer, ELSEWHERE)
    assert optimizer.param_groups[0]["fused"] is None


def test_shards_and_whole_parameters_are_not_taken_together(shards: list[nn.Parameter]) -> None:
    for mixed in ([*parameters(), shards[0]], shards):
        optimizer = torch.optim.SGD(mixed)
        choose_kernels(optimizer, ELSEWHERE)
        assert optimizer.param_groups[0]["foreach"] is False
    alike = torch.optim.SGD(shards[:1])
    choose_kernels(alike, ELSEWHERE)
    assert (alike.param_groups[0]["foreach"], alike.param_groups[0]["fused"]) == (None, None)


def test_what_torch_refuses_for_such_a_mixture_is_off_whatever_was_chosen(shards: list[nn.Parameter]) -> None:
    for device in (torch.device("cpu"), ELSEWHERE):
        optimizer = torch.optim.SGD([*parameters(), shards[0]], foreach=True)
        choose_kernels(optimizer, device)
        assert (optimizer.param_groups[0]["foreach"], optimizer.param_groups[0]["fused"]) == (False, False)


def test_a_checkpoint_of_another_device_does_not_choose_kernels() -> None:
    model = nn.Linear(2, 1)
    there, here = torch.optim.AdamW(model.parameters(), fused=True), torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    there.step()
    names = Names.of(here, model)
    kept = optimizer_state(there, names, model)
    kept["groups"][0]["lr"] = 0.25
    load_optimizer_state(here, names, model, kept, hyper=True)
    assert here.param_groups[0]["fused"] is None and here.param_groups[0]["lr"] == 0.25


@pytest.mark.parametrize(
    ("make", "device", "sentence"),
    [
        (lambda p: torch.optim.Adafactor(p), "cpu", "Adafactor is not known to"),
        (lambda p: torch.optim.AdamW(p, fused=True), "cpu", "fused kernels for CPUs"),
        (lambda p: torch.optim.AdamW([*p, nn.Parameter(torch.zeros(()))]), "meta", "parameters without dimensions"),
    ],
)
def test_bits_of_shards_are_those_of_whole_parameters_or_refused(make: Any, device: str, sentence: str) -> None:
    mesh = parse_mesh("fsdp2", 2)
    check_updates_by_element(torch.optim.AdamW(parameters("cpu")), mesh, torch.device(device))
    with pytest.raises(JobError, match=sentence):
        check_updates_by_element(make(parameters("cpu")), mesh, torch.device(device))


def test_whole_parameters_are_updated_by_the_kernels_of_shards_where_bits_count() -> None:
    for optimizer, device in (
        (torch.optim.SGD(parameters()), ELSEWHERE),
        (torch.optim.AdamW(parameters("cpu")), torch.device("cpu")),
    ):
        choose_kernels(optimizer, device, alike_on_shards=True)
        assert (optimizer.param_groups[0]["foreach"], optimizer.param_groups[0]["fused"]) == (None, None)
