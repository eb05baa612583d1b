"""What is said of a run at its end."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

from paceline.spec import Job, StepTime
from paceline.train.end_table import end_rows
from paceline.train.records.progress import Progress, table


def _run(**changes: Any) -> Any:
    timer = SimpleNamespace(train_s=9.12, median=lambda: StepTime(0.1, 0.01, 0.07, 0.02))
    facts = {
        "rank": 0,
        "world_size": 1,
        "device": SimpleNamespace(type="cpu"),
        "metrics": {"accuracy": 0.9694, "loss": 0.11031},
        "display": Progress(io.StringIO()),
        "stopping": SimpleNamespace(reason=None),
        "timer": timer,
        "job": Job(global_batch_size=200),
        "samples_seen": 17_970,
    }
    return SimpleNamespace(**(facts | changes))


def _progress(epochs_done: int | None) -> Any:
    return SimpleNamespace(steps=90, epochs_done=epochs_done, epoch=14, num_epochs=20, samples_seen=17_970)


def test_a_run_to_its_end() -> None:
    assert table(end_rows(_run(), _progress(15), "runs/one/checkpoints/step-00000090")).splitlines() == [
        "steps       90 in 15 epochs, 17,970 samples",
        "workers     1 worker, cpu",
        "evaluated   accuracy 96.94%  loss 0.1103",
        "speed       2,000 samples/s",
        "time        9.1 s of training: compute 70%, data 10%, waiting for others 20%",
        "checkpoint  runs/one/checkpoints/step-00000090",
    ]


def test_a_run_that_stopped_in_the_middle_of_an_epoch_fits_eighty_columns() -> None:
    stopping = SimpleNamespace(reason="loss has not improved for 5 evaluations; best 0.110312 at step 1234567890")
    run = _run(world_size=2, metrics={}, stopping=stopping)
    run.display.rows["best"] = "accuracy 96.94%  loss 0.1103 at step 70"
    lines = table(end_rows(run, _progress(None), None)).splitlines()
    assert lines == [
        "steps    90 in epoch 15 of 20, 17,970 samples",
        "workers  2 workers, cpu",
        "best     accuracy 96.94%  loss 0.1103 at step 70",
        "stopped  loss has not improved for 5 evaluations; best 0.110312 at step",
        "         1234567890",
        "speed    2,000 samples/s",
        "time     9.1 s of training: compute 70%, data 10%, waiting for others 20%",
    ]
    assert max(map(len, lines)) <= 80


def test_other_workers_say_nothing_and_nobody_says_it_of_a_run_without_steps() -> None:
    assert end_rows(_run(rank=1), _progress(15), None) == []
    screen = io.StringIO()
    Progress(screen).end([("steps", "0")])
    assert screen.getvalue() == ""
