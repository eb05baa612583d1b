"""Which strategies give the bits of one worker in `parity = "bitwise"`: all models by all strategies.

python -m benchmarks.bitwise_parity [--models lenet,gpt] [--strategies "pp2, gpipe;dp2 x pp2, 1f1b"]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from tests.kit.workers import run_ranks
from tests.old.ranks.bitwise_cases import CASES, Outcome, can_be_cut, train

SCHEDULES = ("gpipe", "1f1b", "interleaved of 2", "zero_bubble", "zero_bubble of 2")
STRATEGIES = {
    2: ("dp2", "fsdp2", "zero1:2", "zero2:2", *(f"pp2, {schedule}" for schedule in SCHEDULES)),
    4: (
        *("dp4", "fsdp4", "hsdp", "pp4, gpipe", "pp4, 1f1b", "pp4, zero_bubble"),
        *(f"dp2 x pp2, {schedule}" for schedule in SCHEDULES),
        *(f"fsdp2 x pp2, {schedule}" for schedule in SCHEDULES),
        *("zero1:2 x pp2, 1f1b", "zero2:2 x pp2, interleaved of 2"),
    ),
}
"""By number of workers."""


def _train(names: Sequence[str], strategy: str) -> list[Outcome]:
    return [train(CASES[name], strategy) for name in names]


def main() -> int:
    """Train on one worker and by every strategy; print a row of each model, and return how many differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(CASES), help="names of tests.old.ranks.bitwise_cases")
    parser.add_argument("--strategies", default="", help="separated by semicolons; all without")
    options = parser.parse_args()
    names = options.models.split(",")
    wanted = [one.strip() for one in options.strategies.split(";") if one.strip()]
    alone = dict(zip(names, run_ranks(_train, 1, names, "dp", timeout_s=600)[0], strict=True))
    num_different = 0
    for world_size, strategies in STRATEGIES.items():
        for strategy in strategies:
            if wanted and strategy not in wanted:
                continue
            tried = [name for name in names if can_be_cut(name, strategy)]
            outcomes = run_ranks(_train, world_size, tried, strategy, timeout_s=1800)[0]
            different = [name for name, one in zip(tried, outcomes, strict=True) if one != alone[name]]
            num_different += len(different)
            print(f"| {strategy} | {', '.join(tried)} | {', '.join(different) or 'equal'} |", flush=True)
    return num_different


if __name__ == "__main__":
    sys.exit(bool(main()))
