"""Who writes what is thought over again when some worker's state has changed in kind, and only then."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from paceline.checkpoint.write_plan import WritePlan, plan_writes
from paceline.env import worker_facts
from paceline.spec import Plan
from paceline.train.process.process_group import join
from tests.kit.workers import run_ranks


def _divide_again() -> dict[str, object]:
    facts = worker_facts()
    join(facts, Plan(world_size=2, timeout_s=30))
    group = dist.group.WORLD
    mesh = init_device_mesh("cpu", (2,))

    def state(value: float) -> dict[str, torch.Tensor]:
        rows = torch.full((4, 3), value)
        return {"alike": torch.full((5,), value), "sharded": distribute_tensor(rows, mesh, [Shard(0)])}

    first = plan_writes(state(1.0), group)
    again = plan_writes(state(2.0), group, first)
    more = state(3.0) | ({"worker:1/debt": torch.full((2,), 3.0)} if facts.rank == 1 else {})
    with_more = plan_writes(more, group, again)
    whole = state(4.0)
    whole["sharded"] = distribute_tensor(torch.full((4, 3), 4.0), mesh, [Replicate()])
    replicated = plan_writes(whole, group, plan_writes(state(4.0), group, with_more))

    def written(division: WritePlan, given: dict[str, torch.Tensor]) -> dict[str, tuple[list[int], float]]:
        return {
            key: (list(values.shape), float(values.mean())) for key, values in division.tensors_to_write(given).items()
        }

    return {
        "is_kept": again is first,
        "again": written(again, state(2.0)),
        "is_new": with_more is not again,
        "with_more": written(with_more, more),
        "lists_more": "worker:1/debt" in with_more.entries,
        "replicated": written(replicated, whole),
    }


def test_a_division_lasts_until_some_worker_has_other_tensors() -> None:
    first, second = run_ranks(_divide_again, 2)
    for answer in (first, second):
        assert answer["is_kept"]
        assert answer["is_new"]
        assert answer["lists_more"]
    # Of what is sharded each has its half, of what is alike one has all; the values are those of the state at hand.
    assert first["again"]["sharded@0,0"] == second["again"]["sharded@2,0"] == ([2, 3], 2.0)
    assert ("alike" in first["again"]) != ("alike" in second["again"])
    assert second["with_more"]["worker:1/debt"] == ([2], 3.0)
    assert "worker:1/debt" not in first["with_more"]
    assert [answer["replicated"].get("sharded") for answer in (first, second)].count(([4, 3], 4.0)) == 1


def test_one_worker_divides_anew_after_a_change_of_shape_or_dtype() -> None:
    state = {"a": torch.zeros(3), "b": torch.zeros(2)}
    division = plan_writes(state, None)
    assert plan_writes({name: tensor + 1 for name, tensor in state.items()}, None, division) is division
    for other in (torch.zeros(4), torch.zeros(3, dtype=torch.float64)):
        changed = plan_writes(state | {"a": other}, None, division)
        assert changed.entries["a"].shape == tuple(other.shape)
        assert changed.tensors_to_write(state | {"a": other})["a"].dtype == other.dtype
    assert set(plan_writes({"a": state["a"]}, None, division).entries) == {"a"}
