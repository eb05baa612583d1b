"""How many small defects do the tests notice? One defect at a time is put into a copy of a checkout, and tests are run.

    python -m benchmarks.mutations --source CHECKOUT --out FILE.json [--only NAME …]
    python -m benchmarks.mutations --table BEFORE.json AFTER.json

Defects are found by their text, wherever a checkout keeps it, so that commits with other file names can be compared.
A defect whose text is not found exactly once is reported as such. For each defect the unit tests of its room are run
first and, if they pass, the tests with real processes; the first test that fails has noticed it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

UNNOTICED = "not noticed"
MISSING = "the text is not in this checkout"


@dataclass(frozen=True)
class Defect:
    """A change of one line of the source, and the tests that might notice it."""

    name: str
    text: str
    """A regular expression that matches once in the source."""
    replacement: str
    unit: str
    """The folder of unit tests of its room."""
    ranks: tuple[str, ...] = ()
    """Files under tests/ranks, without "test_" and ".py"."""


DEFECTS = (
    # --- comm ---
    Defect(
        "ring: sends to itself after next",
        r"order\[\(place \+ 1\) % size\], order\[place - 1\]",
        "order[(place + 2) % size], order[place - 1]",
        "comm",
        ("algorithms",),
    ),
    Defect(
        "ring: one hop less",
        r"for hop in range\(size - 1\):\n(?=        leaving)",
        "for hop in range(size - 2):\n",
        "comm",
        ("algorithms",),
    ),
    Defect(
        "halving: the first round is not undone",
        r"in reversed\(rounds\):",
        "in reversed(rounds[1:]):",
        "comm",
        ("algorithms",),
    ),
    Defect(
        "hierarchical: no broadcast in the node",
        r"    links\.broadcast_in_node\(chunk\)\n",
        "",
        "comm",
        ("hierarchical", "algorithms"),
    ),
    Defect("tree: blocks not aligned", r"while start % \(2 \* size\) == 0 and", "while", "comm", ("tree_exact",)),
    Defect(
        "tree: siblings of any size",
        r"return left\[1\] == right\[1\] and left\[0\]",
        "return left[0]",
        "comm",
        ("tree_exact", "parity"),
    ),
    Defect("int8: 126 steps", r"\.mul_\(127\.0\)\.round_", ".mul_(126.0).round_", "comm", ("algorithms",)),
    Defect(
        "shared memory: a slot is reused one chunk early",
        r"number - DEPTH \+ 1\)",
        "number - DEPTH)",
        "comm",
        ("shared_memory",),
    ),
    Defect(
        "error feedback: nothing is kept",
        r"            self\.remember\(name, part(, poison)?\)\n",
        "            pass\n",
        "comm",
        ("compressors",),
    ),
    Defect(
        "scheduler: calls are never compared",
        r"self\._check_always or self\._step <= CHECKED_STEPS",
        "self._check_always",
        "comm",
        ("scheduler",),
    ),
    Defect(
        "async: one update too stale",
        r"self\.finished \+ self\._staleness \+ 1\)",
        "self.finished + self._staleness + 2)",
        "comm",
        ("parameter_server_async",),
    ),
    Defect(
        "async: every push counts as arrived",
        r"            return arrived\n\n    def _update",
        "            return True\n\n    def _update",
        "comm",
        ("parameter_server_async",),
    ),
    # --- parallel ---
    Defect(
        "shards: larger ones last",
        r"small \+ \(shard < extra\) for shard",
        "small + (shard >= num_shards - extra) for shard",
        "parallel",
        ("parity",),
    ),
    Defect(
        "shards: weight of the whole batch",
        r"sum\(sizes\) / self\.global_size(?=\))|sum\(self\.sizes\) / sum\(self\.all_sizes\)",
        "1.0",
        "parallel",
        ("engine",),
    ),
    Defect(
        "batch norm: biased total weight",
        r"(?<=weight = )size(?= / sum\(s for s in self\.shards\.all)|(?<=return \[)size(?= / total if size)",
        "1",
        "parallel",
        ("engine", "parity"),
    ),
    Defect(
        "batch norm: not one step a batch",
        r"(?<=running\.lerp_\(target, )factor|(?<=before\.lerp\(values / weights, )factors",
        r"2 * \g<0>",
        "parallel",
        ("engine", "parity"),
    ),
    Defect(
        "sync norm: means forgotten",
        r"\(variances \+ \(means - global_mean\) \*\* 2\)",
        "(variances)",
        "parallel",
        ("engine", "parity"),
    ),
    Defect(
        "local_sgd: workers count alike",
        r"return (self\._own_samples / self\._all_samples|own / total)\n",
        "return 1 / max(1, dist.get_world_size(self._group)) if self._group else 1.0\n",
        "parallel",
        ("infrequent",),
    ),
    Defect(
        "diloco: plain momentum",
        r"            move\.add_\(self\.momentum, alpha=momentum\)\n",
        "            move.copy_(self.momentum)\n",
        "parallel",
        ("infrequent",),
    ),
    Defect(
        "fsdp: means in place of sums",
        r"set_gradient_divide_factor\(1\.0\)",
        "set_gradient_divide_factor(2.0)",
        "parallel",
        ("meshes",),
    ),
    Defect(
        "schedules: warm-up one longer",
        r"stride \* \(num_workers - 1 - r\) \+ further \+ 1\)",
        "stride * (num_workers - 1 - r) + further + 2)",
        "parallel/pipeline",
        ("pipeline",),
    ),
    Defect(
        "stage cut: memory is not looked at", r" or held_bytes > limits\.memory_bytes:", ":", "parallel/pipeline", ()
    ),
    Defect(
        "noise scale: batch sizes swapped", r"small_sqr - large_sqr", "large_sqr - small_sqr", "spec", ("noise_scale",)
    ),
    # --- checkpoint ---
    Defect(
        "slices: overlap may be empty",
        r"if all\(size > 0 for size in sizes\)",
        "if all(size >= 0 for size in sizes)",
        "checkpoint",
        ("together", "checkpoint_storage"),
    ),
    Defect(
        "checkpoint: checksum not compared",
        r"if summed\.file\(file\.name\)\.crc32 != file\.crc32:",
        "if False:",
        "checkpoint",
        (),
    ),
    Defect("checkpoint: no fsync", r"                os\.fsync\(file\.fileno\(\)\)\n", "", "checkpoint", ()),
    Defect(
        "checkpoint: written in place",
        r"unfinished = path\.with_name\(path\.name \+ \"\.part\"\)\n(?=        if not path)",
        "unfinished = path\n",
        "checkpoint",
        ("checkpoint_storage",),
    ),
    Defect(
        "retention: one less is kept", r"known\[-spec\.keep_last :\]", "known[-spec.keep_last + 1 :]", "checkpoint", ()
    ),
    Defect(
        "retention: the worst is kept",
        r"keep\.add\(max\(scored\)\[1\]\)|best_place\(values, spec\.keep_best, spec\.best_mode\)",
        "best_place([-one for one in values], spec.keep_best, spec.best_mode)",
        "checkpoint",
        (),
    ),
    Defect("receipts: of any attempt", r"if receipt\.attempt != writing\.attempt:", "if False:", "checkpoint", ()),
    # --- launch ---
    Defect(
        "hang: the waiting are blamed",
        r"Hang\(\"hung\", tuple\(state\.rank for state in awaited\), ranks",
        'Hang("hung", ranks, tuple(state.rank for state in awaited)',
        "launch",
        ("hangs",),
    ),
    Defect(
        "root cause: the latest failure",
        r"merely_lost_a_peer\(e\), e\.time, e\.rank\)",
        "merely_lost_a_peer(e), -e.time, e.rank)",
        "launch",
        ("launch_failures",),
    ),
    Defect(
        "root cause: lost peers are causes",
        r"key=lambda e: \(e\.time > stopped_at, merely_lost_a_peer\(e\)",
        "key=lambda e: (e.time > stopped_at, False",
        "launch",
        ("launch_failures",),
    ),
    Defect(
        "nodelist: ranges one short",
        r"range\(int\((\w+)\), int\((\w+)\) \+ 1\)",
        r"range(int(\1), int(\2))",
        "launch",
        (),
    ),
    Defect("hosts: a node may be named twice", r"        if name in found:\n", "        if False:\n", "launch", ()),
    # --- plan ---
    Defect(
        "ring cost: n hops in place of n - 1",
        r"return 2 \* \(n - 1\) \* _hop_s\(size_bytes / n, layout",
        "return 2 * n * _hop_s(size_bytes / n, layout",
        "plan",
        (),
    ),
    Defect(
        "efficiency: base batch forgotten",
        r"return \(noise_scale \+ base_batch_size\) /",
        "return noise_scale /",
        "plan",
        (),
    ),
    Defect(
        "slowest worker: spread ignored",
        r"return compute \* \(1 \+ spread \* expected_maximum_of_workers\)",
        "return compute * (1 + 0 * expected_maximum_of_workers)",
        "plan",
        (),
    ),
    Defect(
        "stage cut: transfer counted once",
        r"time_s \+ 2 \* (\S+) / limits\.bytes",
        r"time_s + \1 / limits.bytes",
        "parallel/pipeline",
        (),
    ),
    Defect(
        "memory: half of the optimizer state",
        r"optimizer_bytes=own \* state\.optimizer / shards",
        "optimizer_bytes=own * state.optimizer / shards / 2",
        "plan",
        (),
    ),
)


def put_in(defect: Defect, source: Path) -> bool:
    """Change the one place in `source` that has the defect's text; False if there is none, or several."""
    found = [path for path in sorted(source.rglob("*.py")) if re.search(defect.text, path.read_text(encoding="utf-8"))]
    if len(found) != 1:
        return False
    text = found[0].read_text(encoding="utf-8")
    found[0].write_text(re.sub(defect.text, defect.replacement, text, count=1), encoding="utf-8")
    return True


def noticed_by(defect: Defect, checkout: Path, timeout_s: float) -> str:
    """The first test that fails, or `UNNOTICED`."""
    unit = checkout / "tests" / "unit" / defect.unit
    ranks = [checkout / "tests" / "ranks" / f"test_{name}.py" for name in defect.ranks]
    for tests in ([unit], ranks):
        present = [str(path) for path in tests if path.exists()]
        if not present:
            continue
        command = [sys.executable, "-m", "pytest", "-x", "-q", "--timeout", str(int(timeout_s)), *present]
        environ = {**os.environ, "PYTHONPATH": str(checkout / "src")}
        ended = subprocess.run(command, cwd=checkout, env=environ, capture_output=True, text=True, check=False)
        failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", ended.stdout, re.MULTILINE)
        if ended.returncode:
            return failed[0] if failed else f"pytest ended with {ended.returncode}"
    return UNNOTICED


def run(source: Path, out: Path, only: list[str], timeout_s: float) -> None:
    """Try all defects on a copy of `source`; results are written after each one."""
    results: dict[str, str] = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
    for defect in DEFECTS:
        if (only and defect.name not in only) or (not only and defect.name in results):
            continue
        with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
            checkout = Path(folder)
            for name in ("src", "tests", "benchmarks", "examples", "docs", "README.md", "pyproject.toml"):
                if (source / name).is_dir():
                    shutil.copytree(source / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__"))
                elif (source / name).exists():
                    shutil.copy(source / name, checkout / name)
            began = time.monotonic()
            is_in = put_in(defect, checkout / "src")
            results[defect.name] = noticed_by(defect, checkout, timeout_s) if is_in else MISSING
        print(f"{time.monotonic() - began:6.1f} s  {defect.name}: {results[defect.name]}", flush=True)
        out.write_text(json.dumps(results, indent=1), encoding="utf-8")


def table(before: Path, after: Path) -> str:
    """A Markdown table of which test of either checkout noticed each defect."""
    first, second = (json.loads(path.read_text(encoding="utf-8")) for path in (before, after))
    lines = ["| defect | before | after |", "|---|---|---|"]
    lines += [f"| {d.name} | {first.get(d.name, '')} | {second.get(d.name, '')} |" for d in DEFECTS]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, help="the checkout whose tests are tried")
    parser.add_argument("--out", type=Path, help="where results go; defects that it has already are not tried again")
    parser.add_argument("--only", nargs="*", default=[], help="names of defects")
    parser.add_argument("--timeout", type=float, default=120, help="seconds a test may take")
    parser.add_argument("--table", type=Path, nargs=2, metavar=("BEFORE", "AFTER"), help="compare two results")
    arguments = parser.parse_args()
    if arguments.table:
        print(table(*arguments.table))
    elif arguments.source and arguments.out:
        run(arguments.source, arguments.out, arguments.only, arguments.timeout)
    else:
        parser.error("give --source and --out, or --table")


if __name__ == "__main__":
    main()
