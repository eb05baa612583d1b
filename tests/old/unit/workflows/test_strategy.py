"""What a command line says of strategies becomes a plan, or one sentence."""

from __future__ import annotations

import dataclasses
import resource
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from paceline.cli import command_line
from paceline.errors import JobError
from paceline.spec import Cluster, Device, Job, Mesh, Node, Plan
from paceline.spec.model_cost import Activations, ModelCost
from paceline.workflows.strategy import Strategy, worker_memory_bytes

MACHINE = Cluster((Node("here", 8, 2**34, "a processor", tuple(Device("cpu", i, "", 2**32) for i in range(8))),))
JOB = Job()


def placed(num_workers: int, planned: Plan | None = None, **options: Any) -> Plan:
    return Strategy(**options).placed(JOB, MACHINE, num_workers, planned)


@pytest.mark.parametrize(
    ("strategy", "mesh"),
    [
        (None, None),
        ("fsdp", Mesh(fsdp=4)),
        ("zero2", Mesh(fsdp=4, zero_stage=2)),
        ("dp x pp2", Mesh(2, pp=2)),
    ],
)
def test_a_strategy_lays_out_the_workers(strategy: str | None, mesh: Mesh | None) -> None:
    plan = placed(4, strategy=strategy)
    assert (plan.mesh, plan.world_size, plan.devices_in_process) == (mesh, 4, 1)


def test_replicas_that_do_not_fit_are_refused_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    small = ModelCost(10**6, Activations(1e4))
    monkeypatch.setattr("paceline.workflows.strategy.trace_model", lambda _job: small)
    assert placed(4, strategy="dp").mesh is None
    monkeypatch.setattr(
        "paceline.workflows.strategy.trace_model", lambda _job: dataclasses.replace(small, num_parameters=10**9)
    )
    with pytest.raises(JobError, match=r"whole replicas need 11\.2 GiB on each worker .* where 3\.68 GiB can be used"):
        placed(4, strategy="dp")
    assert placed(4).mesh is None  # nobody asked


def test_a_limited_process_has_less_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = worker_memory_bytes(MACHINE, 4)
    monkeypatch.setattr(resource, "getrlimit", lambda _kind: (2**28, 2**28))
    assert worker_memory_bytes(MACHINE, 4) == 2**28 < whole


def test_one_process_drives_all_devices() -> None:
    plan = placed(4, strategy="dp_one_process")
    assert (plan.mesh, plan.world_size, plan.devices_in_process) == (None, 1, 4)


@pytest.mark.parametrize(
    ("options", "option"),
    [
        ({"schedule": "gpipe", "strategy": "fsdp"}, "schedule"),
        ({"cut": ["1"], "strategy": "tp"}, "cut"),
        ({"stages_per_worker": 2}, "stages_per_worker"),
        ({"cpu_offload": True, "strategy": "pp"}, "cpu_offload"),
        ({"recompute": True}, "recompute"),
    ],
)
def test_an_option_needs_its_axis(options: dict[str, Any], option: str) -> None:
    with pytest.raises(JobError, match=f"^{option} ") as caught:
        placed(4, **options)
    assert str(caught.value).count(".") == 1 or str(caught.value).endswith(".")


def test_a_plan_of_other_workers_is_refused_and_a_named_strategy_wins() -> None:
    planned = Plan(world_size=4, mesh=Mesh(dp=2, pp=2), recompute=True)
    assert placed(4, planned).mesh == planned.mesh and placed(4, planned).recompute
    assert placed(4, planned, strategy="fsdp").mesh == Mesh(fsdp=4)
    with pytest.raises(JobError, match="lays out 4 workers as dp2 x pp2, not 2"):
        placed(2, planned)


def test_a_script_is_launched_on_the_workers_of_its_mesh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_DEVICE", "cpu")
    script = tmp_path / "train.py"
    script.touch()
    words = ["launch", "--dry-run", "--strategy", "dp2 x pp2", "-n"]
    shown = CliRunner().invoke(command_line(), [*words, "4", str(script)], catch_exceptions=False).stdout
    assert "PACELINE_STRATEGY='dp2 x pp2'" in shown and "--nproc-per-node 4" in shown
    with pytest.raises(JobError, match="does not make 3 workers"):
        CliRunner().invoke(command_line(), [*words, "3", str(script)], catch_exceptions=False)
