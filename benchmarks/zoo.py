"""The table of models in docs/models.md: every model of the zoo, trained for three steps by every strategy.

    python -m benchmarks.zoo [--models gpt2,llama] [--page docs/models.md]

A cell compares the weights, losses and evaluation after three steps with those of one worker: whether every bit is
equal (bitwise parity, float32), or the largest difference (float64). What is refused has the number of the sentence
that says why, below the table. Needs no network: models are built from configurations, with random weights.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.kit.workers import run_ranks
from tests.old.ranks.zoo import ABOUT, COLUMNS, ZOO, Column, Result, difference_in_words, train_columns

BEGIN, END = "<!-- begin: python -m benchmarks.zoo -->\n", "<!-- end -->\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the table of models.")
    parser.add_argument("--models", default=",".join(ZOO), help="names, separated by commas")
    parser.add_argument("--page", type=Path, default=Path("docs/models.md"))
    arguments = parser.parse_args()
    names = arguments.models.split(",")
    page = arguments.page.read_text(encoding="utf-8")
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    written = "\n".join(table(names, train(names)))
    arguments.page.write_text(f"{before}{BEGIN}\n{written}\n\n{END}{after}", encoding="utf-8")
    print(written)


def train(names: Sequence[str]) -> dict[Column, dict[str, Result]]:
    """What rank 0 says of every model in every column; one launch for each number of workers."""
    found: dict[Column, dict[str, Result]] = {}
    for world_size in sorted({column.world_size for column in COLUMNS}):
        chosen = {column: names for column in COLUMNS if column.world_size == world_size}
        found |= run_ranks(train_columns, world_size, chosen, timeout_s=1800)[0]
    return found


def table(names: Sequence[str], results: Mapping[Column, Mapping[str, Result]]) -> list[str]:
    """The lines of the table, and the sentences of what is refused."""
    columns = [column for column in COLUMNS if column != column.reference]
    refusals: list[str] = []
    lines = [
        f"| model | what is special | {' | '.join(map(str, columns))} |",
        "|---|---|" + "---|" * len(columns),
    ]
    for name in names:
        cells = [_cell(results[column.reference][name], results[column][name], column, refusals) for column in columns]
        lines.append(f"| `{name}` | {ABOUT[name]} | {' | '.join(cells)} |")
    return [*lines, "", *(f"{number}. {sentence}" for number, sentence in enumerate(refusals, 1))]


def _cell(alone: Result, spread: Result, column: Column, refusals: list[str]) -> str:
    refusal = alone.refusal or spread.refusal
    if refusal:
        if refusal not in refusals:
            refusals.append(refusal)
        return f"refused ({refusals.index(refusal) + 1})"
    if column.parity == "bitwise":
        is_equal = (spread.sha, spread.losses, spread.metrics) == (alone.sha, alone.losses, alone.metrics)
        return "equal" if is_equal else "**differs**"
    return difference_in_words(alone, spread)


if __name__ == "__main__":
    main()
