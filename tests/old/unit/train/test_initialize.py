"""What `paceline.init` takes over from the command that started its process."""

from __future__ import annotations

from typing import Any

import pytest

import paceline
from paceline import env
from paceline.errors import JobError


def test_a_script_compares_collectives_where_its_launcher_was_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not paceline.init(global_batch_size=8).plan.debug_comm
    facts = env.WorkerFacts()
    asked = env.worker_variables(
        facts,
        node=0,
        num_nodes=1,
        restart=0,
        torch_store=None,
        run_dir=env.data_dir(),
        threads_per_worker=1,
        launched_at=0.0,
        debug_comm=True,
    )
    assert "TORCH_DISTRIBUTED_DEBUG" not in asked  # whose DETAIL ends DistributedDataParallel over Gloo in a crash
    monkeypatch.setenv(env.DEBUG_COMM, asked[env.DEBUG_COMM])
    assert paceline.init(global_batch_size=8).plan.debug_comm


@pytest.mark.parametrize(("name", "method"), [("find_unused_parameters", "prepare"), ("collate_fn", "batches")])
def test_what_a_method_of_the_run_takes_is_named_with_it(name: str, method: str) -> None:
    given: dict[str, Any] = {name: True}
    with pytest.raises(JobError, match=rf"'{name}' is no key of a job: give it to run.{method}\("):
        paceline.init(**given)
