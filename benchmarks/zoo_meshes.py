"""Models that others wrote on meshes and pipeline schedules that docs/models.md has no column for, beside one worker.

    python -m benchmarks.zoo_meshes [--models t5,gpt2] [--meshes "tp2 x pp2, zero_bubble"] [--large 1]

Every model trains for three steps in float64, each mesh by a launch of its own; a cell is the largest difference of any
weight, loss or metric from those of one worker, or how the launch failed. The models are so small that tensor groups
would leave their embeddings and single linear layers whole: --large is the number of weights from which they do not.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace

from tests.ranks import zoo
from tests.ranks.harness import run_ranks
from tests.ranks.zoo import ZOO, Column, Result, largest_difference, train_entry

from paceline.parallel import tensor
from paceline.parallel.tensor import finder
from paceline.spec import PipelineSpec
from paceline.spec.mesh import ScheduleName


@dataclass(frozen=True)
class Spread:
    """How a model is spread over workers."""

    mesh: str
    num_workers: int
    schedule: ScheduleName = "1f1b"
    stages_per_worker: int = 1
    sequence_parallel: bool = False

    def __str__(self) -> str:
        schedule = f", {self.schedule}" if self.schedule != "1f1b" else ""
        return f"{self.mesh}{schedule}{', sequence' if self.sequence_parallel else ''}"


SPREADS = (
    Spread("tp", 2),
    Spread("tp", 2, sequence_parallel=True),
    Spread("pp", 2, "zero_bubble"),
    Spread("pp", 2, "interleaved", 2),
    Spread("hsdp", 4),
    Spread("dp2 x tp2", 4),
    Spread("fsdp2 x pp2", 4),
    Spread("zero1:2 x pp2", 4, "gpipe"),
    Spread("tp2 x pp2", 4),
    Spread("tp2 x pp2", 4, sequence_parallel=True),
    Spread("tp2 x pp2", 4, "zero_bubble"),
)


def train(name: str, spread: Spread | None, large: int) -> Result:
    """What this worker has after three steps; None: one worker alone."""
    for function in (finder.find_plan, tensor.tensor_parallel):
        function.__kwdefaults__ = {**(function.__kwdefaults__ or {}), "large": large}
    if spread is None:
        return train_entry(ZOO[name], Column("numeric"))
    plan_of, pipeline = zoo._plan, PipelineSpec(spread.schedule, spread.stages_per_worker)
    zoo._plan = lambda column: replace(plan_of(column), pipeline=pipeline, sequence_parallel=spread.sequence_parallel)
    try:
        return train_entry(ZOO[name], Column("numeric", spread.mesh, spread.num_workers))
    finally:
        zoo._plan = plan_of


def cell(name: str, alone: Result, spread: Spread, large: int) -> str:
    try:
        result: Result = run_ranks(train, spread.num_workers, name, spread, large, timeout_s=300)[0]
    except AssertionError as problem:
        return f"**failed**: {str(problem).splitlines()[-1]}"
    if result.refusal:
        return f"refused: {result.refusal}"
    difference = largest_difference(alone, result)
    return f"{difference:.0e}" if difference < 1e-12 else f"**{difference:.0e}**"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(ZOO))
    parser.add_argument("--meshes", nargs="*", default=[str(one) for one in SPREADS], help="as the table names them")
    parser.add_argument("--large", type=int, default=1)
    asked = parser.parse_args()
    print("| model | mesh | difference from one worker |\n|---|---|---|")
    for name in asked.models.split(","):
        alone: Result = run_ranks(train, 1, name, None, asked.large, timeout_s=300)[0]
        for spread in (one for one in SPREADS if str(one) in asked.meshes):
            print(f"| {name} | {spread} | {alone.refusal or cell(name, alone, spread, asked.large)} |", flush=True)


if __name__ == "__main__":
    main()
