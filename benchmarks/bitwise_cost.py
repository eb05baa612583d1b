"""What bitwise parity costs: steps per second and memory, numeric and bitwise, for several numbers of virtual shards.

    python benchmarks/bitwise_cost.py --data DIR [--before CHECKOUT] [--cases lenet resnet18] [--workers 2]

Workers with a thread each, numeric and bitwise alternately in one run; with --before the Paceline of another
checkout takes its turns too. Prints a Markdown table of medians. DIR holds mnist/ and cifar10/.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from side_by_side import Result, run

CASES = ("lenet", "gpt", "resnet20", "resnet18", "efficientnet-b0")
SHARDS = (4, 8, 16)
PARITIES = ("numeric", "bitwise")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--before", type=Path, help="a checkout")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--shards", nargs="+", type=int, default=list(SHARDS))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    sources = {"before": arguments.before, "now": None} if arguments.before else {"now": None}
    print("| case | virtual shards | commit | numeric steps/s | bitwise steps/s | bitwise / numeric | MiB | MiB |")
    print("|---|---|---|---|---|---|---|---|")
    for case in arguments.cases:
        for shards in arguments.shards:
            found: dict[tuple[str, str], list[Result]] = {(when, parity): [] for when in sources for parity in PARITIES}
            for _ in range(arguments.rounds):
                for (when, parity), results in found.items():
                    options = ["--data", str(arguments.data.resolve()), "--steps", str(arguments.steps)]
                    options += ["--parity", parity, "--virtual-shards", str(shards)]
                    results.append(run("paceline", case, *options, source=sources[when], workers=arguments.workers))
            for when in sources:
                print(_row(case, shards, when, *(found[when, parity] for parity in PARITIES)), flush=True)


def _row(case: str, shards: int, when: str, numeric: list[Result], bitwise: list[Result]) -> str:
    rates = [[one["steps_per_s"] for one in results] for results in (numeric, bitwise)]
    ratios = [exact / plain for plain, exact in zip(*rates, strict=True)]
    memory = [statistics.median(one["peak_mib"] for one in results) for results in (numeric, bitwise)]
    medians = " | ".join(f"{statistics.median(one):.3g}" for one in rates)
    each = ", ".join(f"{ratio:.2f}" for ratio in ratios)
    return (
        f"| {case} | {shards} | {when} | {medians} | {statistics.median(ratios):.2f} ({each}) | "
        + " | ".join(f"{one:.0f}" for one in memory)
        + " |"
    )


if __name__ == "__main__":
    main()
