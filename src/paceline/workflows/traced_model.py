"""A job's model without memory for its parameters: what it is made of, before any device is used. Loads torch."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from paceline.spec import Job

if TYPE_CHECKING:
    from paceline.plan.memory import ModelFacts

_TRACED_SAMPLES = 2


def trace_model(job: Job) -> ModelFacts:
    """What the job's model tells on paper: its layers, with their arithmetic and their memory."""
    from paceline.parallel.dry_run import trace_layers
    from paceline.plan.layer_partition import Layer
    from paceline.plan.memory import Activations, ModelFacts

    model, arguments = model_on_paper(job, _TRACED_SAMPLES)
    layers = tuple(Layer(**dataclasses.asdict(layer)) for layer in trace_layers(model, arguments, _TRACED_SAMPLES))
    num_parameters = round(sum(layer.num_parameters for layer in layers))
    return ModelFacts(num_parameters, Activations(sum(layer.kept_bytes for layer in layers)), layers)


def model_on_paper(job: Job, num_samples: int) -> tuple[Any, tuple[Any, ...]]:
    """The job's model without memory, and what it is called with for so many samples."""
    from paceline.data import load
    from paceline.models import build
    from paceline.parallel.dry_run import on_paper
    from paceline.train.loop import data_facts

    train_set, _ = load(job.data)
    return on_paper(lambda: build(job.model, **data_facts(train_set)), train_set[0][0], num_samples)
