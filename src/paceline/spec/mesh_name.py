"""Parses the names of meshes, such as "fsdp" or "dp2 x pp2", and checks whether a mesh can train a job."""

from __future__ import annotations

import dataclasses
import math
import re

from paceline.errors import JobError, did_you_mean, shortened
from paceline.spec.job import Job
from paceline.spec.mesh import AXES, Mesh

STRATEGIES = ("dp", "fsdp", "zero1", "zero2", "hsdp", "pp", "tp", "dp_one_process")
"""The strategies with a name; others are meshes such as "dp2 x pp2"."""

_TERM = re.compile(rf"({'|'.join(AXES)}|zero[123]):?([0-9]{{0,7}})")


def num_named(text: str) -> int:
    """The product of the degrees in the text."""
    return math.prod(int(degree) for _, degree in _TERM.findall(text) if degree)


def check_strategy(text: str) -> None:
    """Raises `JobError` for what is no strategy on any number of workers."""
    if text.strip().lower() != "hsdp":
        parse_mesh(text, max(1, num_named(text)))


def parse_mesh(text: str, num_workers: int, num_nodes: int = 1) -> Mesh:
    """The mesh of `num_workers` workers for a strategy: "fsdp", "hsdp", "dp2 x pp2", "fsdp x tp2".

    One axis may leave its degree out: it takes the workers that are left. "hsdp" replicates over the nodes and
    shards inside of each; on one node it makes two replicas.

    Raises:
        JobError: no such strategy, an axis named twice, or degrees that do not make up the world size.
    """
    words = text.strip().lower()
    if words in ("auto", "dp_one_process"):
        raise JobError(
            f"The strategy '{words}' is for paceline train and paceline scale, which know the job before they start "
            "workers; name a mesh here, such as 'fsdp' or 'dp2 x pp2'."
        )
    if words == "hsdp":
        replicas = num_nodes if num_nodes > 1 else 2
        words = f"dp{replicas} x fsdp"
    degrees: dict[str, int] = {}
    zero_stage = 3
    is_open = None
    for word in re.split(r"\s*[x*,]\s*|\s+", words):
        term = _TERM.fullmatch(word)
        if term is None:
            raise JobError(
                f"There is no strategy '{shortened(text)}'; {did_you_mean(word, STRATEGIES)}it is one of "
                f"{', '.join(STRATEGIES)}, auto, or axes with their degrees such as 'dp2 x pp2' or 'fsdp2 x tp2'."
            )
        axis, degree = term.groups()
        if degree and not int(degree):
            raise JobError(f"The strategy '{shortened(text)}' gives {axis} the degree 0; a degree is 1 or more.")
        if axis.startswith("zero"):
            axis, zero_stage = "fsdp", int(axis[-1])
        if axis in degrees or (not degree and is_open is not None):
            raise JobError(
                f"The strategy '{shortened(text)}' should name every axis once, and leave at most one degree out."
            )
        if degree:
            degrees[axis] = int(degree)
        else:
            is_open = axis
            degrees[axis] = 0
    known = math.prod(degree for axis, degree in degrees.items() if axis != is_open)
    if is_open is not None and known:
        degrees[is_open] = num_workers // known
    mesh = dataclasses.replace(Mesh(zero_stage=zero_stage), **degrees) if all(degrees.values()) else None
    if mesh is None or mesh.num_workers != num_workers:
        raise JobError(
            f"The strategy '{shortened(text)}' does not make {num_workers} workers; the degrees of its axes should "
            f"multiply to {num_workers}."
        )
    return mesh


def check_mesh(job: Job, mesh: Mesh | None) -> None:
    """Raises `JobError` for a job that only whole replicas can train, where the mesh has none."""
    if mesh is None or mesh.is_plain:
        return
    spec = job.aggregation
    wrong = (
        (f"aggregation.method = '{spec.method}'", "'every_step'", spec.method != "every_step"),
        ("precision = 'float16'", "precision = 'bfloat16'", job.precision == "float16"),
    )
    if job.parity == "bitwise" and mesh.tp > 1:
        raise JobError(
            f"parity = 'bitwise' needs a mesh without tp, not {mesh}: divided layers make their sums in another order; "
            "use parity = 'numeric', or an axis fsdp or pp in its place."
        )
    if job.parity == "bitwise" and job.channels_last:
        raise JobError(
            f"parity = 'bitwise' needs channels_last = false with {mesh}: shards have the plain format, whose kernels "
            "may round differently; use channels_last = false, or the strategy dp."
        )
    for setting, remedy, is_set in wrong:
        if is_set:
            raise JobError(
                f"{setting} needs the whole model on every worker; use {remedy}, or the strategy dp, not {mesh}."
            )
