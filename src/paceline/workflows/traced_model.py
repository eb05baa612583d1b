"""A job's model without memory for its parameters: what it is made of, before any device is used. Loads torch."""

from __future__ import annotations

from typing import Any

from paceline.spec import Job
from paceline.spec.model_cost import ModelCost

_TRACED_SAMPLES = 2


def trace_model(job: Job) -> ModelCost:
    """What the job's model tells without memory for it: its layers, with their arithmetic and their memory."""
    from paceline.parallel import layer_costs

    model, arguments = model_on_paper(job, _TRACED_SAMPLES)
    return layer_costs.trace_model(model, arguments, _TRACED_SAMPLES)


def model_on_paper(job: Job, num_samples: int) -> tuple[Any, tuple[Any, ...]]:
    """The job's model without memory, and what it is called with for so many samples."""
    from paceline.data import load
    from paceline.models import build
    from paceline.parallel.layer_costs import on_paper
    from paceline.train.loop import data_facts

    train_set, _ = load(job.data)
    return on_paper(lambda: build(job.model, **data_facts(train_set)), train_set[0][0], num_samples)
