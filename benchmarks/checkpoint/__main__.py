"""What keeping a run's state costs and what it is worth, beside torch.save, DCP, Accelerate and Lightning Fabric.

    python -m benchmarks.checkpoint [--parameters 100e6] [--only PART,…] [--ways NAME,…] [--out DIR]

Parts: cost (two workers, every way in turn), stall (beside a copy in memory), background (steps while a checkpoint is
written), agreement (what every step pays), flips (a flipped bit), kills (a save killed half-way), resume (in the
middle of an epoch, and with one worker instead of two). Prints tables as Markdown and leaves them in DIR, with all
figures as JSON. Needs the extra `bench`.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .agreement import agreement
from .cost import background, beside_others, say, stall
from .resuming import SCRIPTS, resumes
from .safety import HARMLESS, NEWEST, NOTICED, OLDER, REFUSED, SILENT, WRONG, flips, kills
from .ways import WAYS

KILL_PARAMETERS = 20e6
"""Large enough for a save to take a part of a second, small enough to be saved often."""


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.checkpoint",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--parameters", type=float, default=100e6, help="of the model whose saves are timed")
    parser.add_argument("--only", default="", help="some of the parts, by commas")
    parser.add_argument("--ways", default="", help="some of the ways, by commas")
    parser.add_argument("--rounds", type=int, default=5, help="how often each is timed")
    parser.add_argument("--blocks", type=int, default=200, help="of steps, for what every step pays")
    parser.add_argument("--flips", type=int, default=20, help="bytes flipped, one at a time")
    parser.add_argument("--kills", type=int, default=12, help="saves killed")
    parser.add_argument("--out", type=Path, help="folder for checkpoint.json and checkpoint.md")
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()), help="where checkpoints go")
    arguments = parser.parse_args()
    ways = _chosen(parser, "--ways", arguments.ways, list(WAYS))
    scripts = [name for name in SCRIPTS if name.partition(",")[0] in ways]
    scratch: Path = arguments.scratch

    parts: dict[str, Callable[[], Any]] = {
        "cost": lambda: beside_others(ways, arguments.parameters, arguments.rounds, scratch),
        "stall": lambda: stall(arguments.parameters, arguments.rounds, scratch),
        "background": lambda: background(arguments.parameters, arguments.rounds, scratch),
        "agreement": lambda: agreement(arguments.blocks, scratch),
        "flips": lambda: flips(ways, arguments.flips, scratch),
        "kills": lambda: kills(ways, min(arguments.parameters, KILL_PARAMETERS), arguments.kills, scratch),
        "resume": lambda: resumes(scripts, scratch),
    }
    results: dict[str, Any] = {"parameters": arguments.parameters, "load_average": {}}
    for name in _chosen(parser, "--only", arguments.only, list(parts)):
        before = os.getloadavg()[0]
        results[name] = parts[name]()
        results["load_average"][name] = [round(before, 1), round(os.getloadavg()[0], 1)]
        say(f"{name}: {json.dumps(results[name])}")
        if arguments.out is not None:  # what there is by now is kept, whatever comes
            arguments.out.mkdir(parents=True, exist_ok=True)
            (arguments.out / "checkpoint.json").write_text(json.dumps(results, indent=2) + "\n")
            (arguments.out / "checkpoint.md").write_text(markdown(results))
    print(markdown(results), end="")


def _chosen(parser: argparse.ArgumentParser, option: str, text: str, known: Sequence[str]) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in known:
            parser.error(f"{option} {name}: there are {', '.join(known)}")
    return [name for name in known if not names or name in names]


def markdown(results: dict[str, Any]) -> str:
    """The tables of all parts that were measured."""
    lines: list[str] = []
    if "cost" in results:
        lines += _table(
            ("", "training stalls", "the first time", "complete after", "on disk after", "fsync", "size"),
            {
                way: (
                    f"{row['stall_s']:.2f} s",
                    f"{row['first_stall_s']:.2f} s",
                    f"{row['complete_s']:.2f} s",
                    f"{row['durable_s']:.2f} s",
                    "yes" if row["does_fsync"] else "no",
                    f"{row['num_bytes'] / 1e6:,.0f} MB",
                )
                for way, row in results["cost"].items()
            },
        )
    flipped, killed = results.get("flips", {}), results.get("kills", {})
    if flipped or killed:
        lines += _table(
            ("", "flipped bit noticed", "killed while saving: what loading the newest does"),
            {way: (_flip_text(flipped.get(way)), _kill_text(killed.get(way))) for way in flipped or killed},
        )
    if "resume" in results:
        lines += _table(
            ("", "resumed in the middle of an epoch", "with dropout in the model", "with 1 worker instead of 2"),
            {way: (row["same_workers"], row["dropout"], row["one_worker"]) for way, row in results["resume"].items()},
        )
    for part in ("stall", "background", "agreement"):
        if part in results:
            lines += _table((part, ""), {name: (str(value),) for name, value in results[part].items()})
    return "\n".join(lines)


def _table(heads: Sequence[str], rows: dict[str, tuple[str, ...]]) -> list[str]:
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    return [*lines, *(f"| {' | '.join((name, *cells))} |" for name, cells in rows.items()), ""]


def _flip_text(counts: dict[str, int] | None) -> str:
    if counts is None:
        return ""
    total = sum(counts.values())
    text = f"{counts.get(NOTICED, 0)} of {total}"
    return (
        text
        + (f", {counts[SILENT]} loaded silently" if SILENT in counts else "")
        + (f", {counts[HARMLESS]} changed no number" if HARMLESS in counts else "")
    )


def _kill_text(counts: dict[str, int] | None) -> str:
    if counts is None:
        return ""
    words = {
        NEWEST: "complete",
        OLDER: "goes back to the older one",
        REFUSED: "fails",
        WRONG: "**takes it for a good one**",
    }
    return ", ".join(f"{counts[outcome]}x {text}" for outcome, text in words.items() if outcome in counts)


if __name__ == "__main__":
    main()
