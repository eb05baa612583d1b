"""Steps at one batch size, forecast from the noise scale that a run at another one recorded: every pair of sizes.

    python -m benchmarks.noise_scale --data DIR

DIR holds pollux/, training runs published with Pollux. Rows are the run that was measured, columns the run forecast:
the error of its steps to the end of training. The last column is the worst error of all of them on the way there, from
a tenth of the progress on. Errors beyond the 15 % that were asked are bold. Then the same from two runs at once, and
how well the law itself can do.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from scipy.optimize import minimize_scalar
from tests.old.unit.pollux_runs import Run, errors, from_two, read_runs

ASKED = 0.15
FORMS: dict[str, Callable[[Run], Sequence[float]]] = {
    "as recorded at the ends of epochs": lambda run: run.recorded,
    "as counted over epochs": lambda run: run.counted,
    "as counted, less what clipping added": lambda run: run.unclipped,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    folder = parser.parse_args().data / "pollux"
    for model in ("cifar10", "imagenet"):
        runs = read_runs(folder, model)
        for name, noise_scales in FORMS.items():
            print(f"\n{model}: noise scales {name}\n")
            print(pairs(runs, noise_scales))
        spreads = ", ".join(f"{size}: {run.spread:.3f}" for size, run in runs.items())
        print(f"\nSpread of one estimate, for clipping, as each run gives it: {spreads}")
        print(f"\n{model}: two runs of neighbouring sizes, less an excess of |G|^2 that falls as 1 / batch\n")
        print(pairs_of_two(runs))
        print(f"\n{model}: one noise scale for all sizes, the best there is for the steps to a share of the progress\n")
        print(best_single(runs))


def pairs(runs: dict[int, Run], noise_scales: Callable[[Run], Sequence[float]]) -> str:
    """Markdown: the error of every pair of runs."""
    lines = _head(["measured at", *map(str, runs), "worst from a tenth on"])
    lines += [_errors(str(size), run, noise_scales(run), runs) for size, run in runs.items()]
    return "\n".join(lines)


def pairs_of_two(runs: dict[int, Run]) -> str:
    """Markdown: the errors of forecasts from two runs each."""
    lines = _head(["measured at", *map(str, runs), "worst from a tenth on"])
    for small, large in pairwise(runs.values()):
        name = f"{small.batch_size} and {large.batch_size}"
        lines.append(_errors(name, large, from_two(small, large), runs))
    return "\n".join(lines)


def best_single(runs: dict[int, Run]) -> str:
    """Markdown: with the noise scale chosen in hindsight so that the worst error is smallest, errors that remain."""
    lines = _head(["share", *map(str, runs), "noise scale"])
    base = min(runs)
    end = min(run.progress[-1] for run in runs.values())
    for share in (0.01, 0.1, 0.5, 1.0):
        progress = share * end
        taken = [np.interp(progress, [0.0, *run.progress], [0.0, *run.steps]) for run in runs.values()]

        def remaining(log_noise: float, progress: float = progress, taken: Sequence[float] = taken) -> list[float]:
            noise = float(np.exp(log_noise))
            min_steps = progress / (1 + noise / base)
            return [min_steps * (1 + noise / size) / of - 1 for size, of in zip(runs, taken, strict=True)]

        best = float(
            minimize_scalar(
                lambda log_noise, left=remaining: max(abs(error) for error in left(log_noise)),
                bounds=(np.log(base / 100), np.log(max(runs) * 100)),
                method="bounded",
            ).x
        )
        lines.append(_row([f"{share:.0%}", *map(_percent, remaining(best)), f"{np.exp(best):,.0f}"]))
    return "\n".join(lines)


def _errors(name: str, source: Run, noise_scales: Sequence[float], runs: dict[int, Run]) -> str:
    found = [errors(source, noise_scales, target) for target in runs.values()]
    begin = int(np.searchsorted(source.progress, source.progress[-1] / 10))
    worst = max((error for column in found for error in column[begin:]), key=abs)
    return _row([name, *(_percent(column[-1]) for column in found), _percent(worst)])


def _head(names: Sequence[str]) -> list[str]:
    return [_row(names), _row(["---"] * len(names))]


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _percent(error: float) -> str:
    text = f"{error:+.1%}"
    return f"**{text}**" if abs(error) > ASKED else text


if __name__ == "__main__":
    main()
