"""Models that others wrote on meshes and pipeline schedules that docs/models.md has no column for, beside one worker.

    python -m benchmarks.zoo_meshes [--models t5,gpt2] [--meshes "tp2 x pp2, zero_bubble"] [--large 1]

Every model trains for three steps in float64, each mesh by a launch of its own; a cell is the largest difference of any
weight, loss or metric from those of one worker, or how the launch failed. The models are so small that tensor groups
would leave their embeddings and single linear layers whole: --large is the number of weights from which they do not.
"""

from __future__ import annotations

import argparse

from tests.kit.workers import run_ranks
from tests.old.ranks.zoo import ZOO, Column, Result, difference_in_words, train_entry

from paceline.parallel import tensor
from paceline.parallel.tensor import finder
from paceline.spec import PipelineSpec

ALONE = Column("numeric")
ZERO_BUBBLE, INTERLEAVED, GPIPE = PipelineSpec("zero_bubble"), PipelineSpec("interleaved", 2), PipelineSpec("gpipe")
COLUMNS = {
    "tp": Column("numeric", "tp", 2),
    "tp, sequence": Column("numeric", "tp", 2, sequence_parallel=True),
    "pp, zero_bubble": Column("numeric", "pp", 2, ZERO_BUBBLE),
    "pp, interleaved": Column("numeric", "pp", 2, INTERLEAVED),
    "hsdp": Column("numeric", "hsdp", 4),
    "dp2 x tp2": Column("numeric", "dp2 x tp2", 4),
    "fsdp2 x pp2": Column("numeric", "fsdp2 x pp2", 4),
    "zero1:2 x pp2, gpipe": Column("numeric", "zero1:2 x pp2", 4, GPIPE),
    "tp2 x pp2": Column("numeric", "tp2 x pp2", 4),
    "tp2 x pp2, sequence": Column("numeric", "tp2 x pp2", 4, sequence_parallel=True),
    "tp2 x pp2, zero_bubble": Column("numeric", "tp2 x pp2", 4, ZERO_BUBBLE),
}


def train(name: str, column: Column, large: int) -> Result:
    """What this worker has after three steps."""
    for function in (finder.find_plan, tensor.tensor_parallel):
        function.__kwdefaults__ = {**(function.__kwdefaults__ or {}), "large": large}
    return train_entry(ZOO[name], column)


def cell(name: str, alone: Result, column: Column, large: int) -> str:
    try:
        result: Result = run_ranks(train, column.world_size, name, column, large, timeout_s=300)[0]
    except AssertionError as problem:
        return f"**failed**: {str(problem).splitlines()[-1]}"
    return f"refused: {result.refusal}" if result.refusal else difference_in_words(alone, result)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(ZOO))
    parser.add_argument("--meshes", nargs="*", choices=COLUMNS, default=list(COLUMNS))
    parser.add_argument("--large", type=int, default=1)
    asked = parser.parse_args()
    print("| model | mesh | difference from one worker |\n|---|---|---|")
    for name in asked.models.split(","):
        alone: Result = run_ranks(train, 1, name, ALONE, asked.large, timeout_s=300)[0]
        for mesh in asked.meshes:
            found = alone.refusal or cell(name, alone, COLUMNS[mesh], asked.large)
            print(f"| {name} | {mesh} | {found} |", flush=True)


if __name__ == "__main__":
    main()
