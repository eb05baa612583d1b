"""Do the tests notice small defects? One defect at a time is put into a copy of a checkout, and tests are run.

    python -m benchmarks.mutations --source CHECKOUT --out FILE.json [--only NAME …] [--targeted]

For each defect the test files that belong to the changed code run, and if they pass the fast suite (`make test-fast`);
the first test that fails has noticed the defect, if it passes without it. A program that a defect keeps from ending is
noticed where a test says so: pytest that is not at its end in time names nobody. A Markdown table of all results in
FILE is printed at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

FAST_SUITE = ("-n", "2", "--dist", "loadgroup", "-m", "not slow and not browser and not hosts", "tests")
COPIED = ("src", "tests", "benchmarks", "examples", "docs", "README.md", "pyproject.toml")


@dataclass(frozen=True)
class Defect:
    """A change of one place of the source, and the tests that belong to that place."""

    name: str
    text: str
    """A regular expression that matches once in the source."""
    replacement: str
    tests: tuple[str, ...]
    """What pytest takes, from the folder of tests on; the quick ones first."""


@dataclass(frozen=True)
class Outcome:
    """What the tests made of a defect."""

    file: str
    """The changed file, from the checkout's root on; empty where the defect's text is not there exactly once."""
    noticed_by: str
    """A test's id; empty if no test noticed."""
    how: str
    """The first words of the test's failure, or why there is none."""


# One test of that file, since the others search for a smaller example: for minutes, where each one waits for ever.
ALGORITHMS = ("ranks/test_algorithms.py::test_every_algorithm_in_every_wire_format",)

DEFECTS = (
    # --- comm ---
    Defect(
        "ring: sends to itself after next",
        r"order\[\(place \+ 1\) % size\], order\[place - 1\]",
        "order[(place + 2) % size], order[place - 1]",
        ALGORITHMS,
    ),
    Defect(
        "ring: one hop less",
        r"for hop in range\(size - 1\):\n(?=        leaving)",
        "for hop in range(size - 2):\n",
        ALGORITHMS,
    ),
    Defect(
        "halving: the first round is not undone",
        r"in reversed\(rounds\):",
        "in reversed(rounds[1:]):",
        ALGORITHMS,
    ),
    Defect(
        "hierarchical: no broadcast in the node",
        r"    links\.broadcast_in_node\(chunk\)\n",
        "",
        ("ranks/test_hierarchical.py", *ALGORITHMS),
    ),
    Defect(
        "tree: blocks not aligned",
        r"while start % \(2 \* size\) == 0 and",
        "while",
        ("unit/comm/test_fixed_tree.py", "ranks/test_tree_exact.py"),
    ),
    Defect(
        "tree: siblings of any size",
        r"return left\[1\] == right\[1\] and left\[0\]",
        "return left[0]",
        ("unit/comm/test_fixed_tree.py", "ranks/test_tree_exact.py", "ranks/test_parity.py"),
    ),
    Defect(
        "int8: 126 steps",
        r"\.mul_\(127\.0\)\.round_",
        ".mul_(126.0).round_",
        ("unit/comm/test_wire.py", *ALGORITHMS),
    ),
    Defect(
        "shared memory: a slot is reused one chunk early",
        r"number - DEPTH \+ 1\)",
        "number - DEPTH)",
        ("ranks/test_shared_memory.py", *ALGORITHMS),
    ),
    Defect(
        "error feedback: nothing is kept",
        r"            self\.remember\(name, part, poison\)\n",
        "            pass\n",
        ("unit/comm/test_sparse.py", "unit/comm/test_powersgd.py", "ranks/test_compressors.py"),
    ),
    Defect(
        "scheduler: calls are never compared",
        r"self\._check_always or self\._step <= CHECKED_STEPS",
        "self._check_always",
        ("ranks/test_scheduler.py",),
    ),
    Defect(
        "async: one update too stale",
        r"self\.finished \+ self\._staleness \+ 1\)",
        "self.finished + self._staleness + 2)",
        ("unit/comm/test_parameter_server_async.py", "ranks/test_parameter_server_async.py"),
    ),
    Defect(
        "async: every push counts as arrived",
        r"            return arrived\n\n    def _update",
        "            return True\n\n    def _update",
        ("unit/comm/test_parameter_server_async.py", "ranks/test_parameter_server_async.py"),
    ),
    # --- parallel ---
    Defect(
        "shards: larger ones last",
        r"small \+ \(shard < extra\) for shard",
        "small + (shard >= num_shards - extra) for shard",
        ("unit/parallel/test_assignment.py", "ranks/test_parity.py"),
    ),
    Defect(
        "shards: weight of the whole batch",
        r"sum\(self\.sizes\) / sum\(self\.all_sizes\)",
        "1.0",
        ("unit/parallel/test_assignment.py", "ranks/test_engine.py"),
    ),
    Defect(
        "batch norm: biased total weight",
        r"(?<=return \[)size(?= / total if size)",
        "1",
        (
            "unit/parallel/test_norm.py",
            "unit/parallel/test_assignment.py",
            "ranks/test_engine.py",
            "ranks/test_parity.py",
        ),
    ),
    Defect(
        "batch norm: not one step a batch",
        r"(?<=before\.lerp\(values / weights, )factors",
        "2 * factors",
        (
            "unit/parallel/test_norm.py",
            "unit/parallel/test_forward_buffers.py",
            "ranks/test_engine.py",
            "ranks/test_parity.py",
        ),
    ),
    Defect(
        "sync norm: means forgotten",
        r"\(variances \+ \(means - global_mean\) \*\* 2\)",
        "(variances)",
        ("unit/parallel/test_norm.py", "ranks/test_engine.py", "ranks/test_parity.py"),
    ),
    Defect(
        "local_sgd: workers count alike",
        r"return own / total if total else ",
        "return ",
        ("ranks/test_infrequent.py", "ranks/test_infrequent_tokens.py"),
    ),
    Defect(
        "diloco: plain momentum",
        r"            move\.add_\(self\.momentum, alpha=momentum\)\n",
        "            move.copy_(self.momentum)\n",
        ("ranks/test_infrequent.py",),
    ),
    Defect(
        "fsdp: means in place of sums",
        r"set_gradient_divide_factor\(1\.0\)",
        "set_gradient_divide_factor(2.0)",
        ("ranks/test_meshes.py",),
    ),
    Defect(
        "schedules: warm-up one longer",
        r"stride \* \(num_workers - 1 - r\) \+ further \+ 1\)",
        "stride * (num_workers - 1 - r) + further + 2)",
        ("unit/parallel/pipeline/test_schedules.py", "ranks/test_pipeline.py"),
    ),
    Defect(
        "stage cut: memory is not looked at",
        r" or held_bytes > limits\.memory_bytes:",
        ":",
        ("unit/test_partition.py", "unit/parallel/pipeline/test_cut.py"),
    ),
    Defect(
        "noise scale: batch sizes swapped",
        r"small_sqr - large_sqr",
        "large_sqr - small_sqr",
        ("unit/test_noise.py", "ranks/test_noise_scale.py"),
    ),
    # --- checkpoint ---
    Defect(
        "slices: overlap may be empty",
        r"if all\(size > 0 for size in sizes\)",
        "if all(size >= 0 for size in sizes)",
        (
            "unit/checkpoint/test_blocks.py",
            "unit/checkpoint",
            "ranks/test_together.py",
            "ranks/test_checkpoint_storage.py",
        ),
    ),
    Defect(
        "checkpoint: checksum not compared",
        r"if summed\.file\(file\.name\)\.crc32 != file\.crc32:",
        "if False:",
        ("unit/checkpoint/test_damage.py", "unit/checkpoint"),
    ),
    Defect(
        "checkpoint: no fsync",
        r"                os\.fsync\(file\.fileno\(\)\)\n",
        "",
        ("unit/checkpoint/test_storage.py", "unit/checkpoint"),
    ),
    Defect(
        "checkpoint: written in place",
        r"unfinished = path\.with_name\(path\.name \+ \"\.part\"\)\n(?=        if not path)",
        "unfinished = path\n",
        ("unit/checkpoint/test_storage.py", "unit/checkpoint", "ranks/test_checkpoint_storage.py"),
    ),
    Defect(
        "retention: one less is kept",
        r"known\[-spec\.keep_last :\]",
        "known[-spec.keep_last + 1 :]",
        ("unit/checkpoint/test_retention.py",),
    ),
    Defect(
        "retention: the worst is kept",
        r"best_place\(values, spec\.keep_best, spec\.best_mode\)",
        "best_place([-one for one in values], spec.keep_best, spec.best_mode)",
        ("unit/checkpoint/test_retention.py",),
    ),
    Defect(
        "receipts: of any attempt",
        r"if receipt\.attempt != writing\.attempt:",
        "if False:",
        ("unit/checkpoint/test_save.py", "ranks/test_checkpoint_storage.py"),
    ),
    # --- launch ---
    Defect(
        "hang: the waiting are blamed",
        r"Hang\(\"hung\", tuple\(state\.rank for state in awaited\), ranks",
        'Hang("hung", ranks, tuple(state.rank for state in awaited)',
        ("unit/launch/test_hang.py", "ranks/test_hangs.py"),
    ),
    Defect(
        "root cause: the latest failure",
        r"e\.is_consequence, e\.time, e\.rank\)",
        "e.is_consequence, -e.time, e.rank)",
        ("unit/launch/test_failures.py", "ranks/test_launch_failures.py"),
    ),
    Defect(
        "root cause: lost peers are causes",
        r"key=lambda e: \(e\.time > stopped_at, e\.is_consequence",
        "key=lambda e: (e.time > stopped_at, False",
        ("unit/launch/test_failures.py", "ranks/test_launch_failures.py"),
    ),
    Defect(
        "streams: a range of files one short",
        r"range\(int\((\w+)\), int\((\w+)\) \+ 1\)",
        r"range(int(\1), int(\2))",
        ("unit/data/test_substreams.py", "ranks/test_streams.py"),
    ),
    Defect(
        "hosts: a node may be named twice",
        r"        if name in found:\n",
        "        if False:\n",
        ("unit/launch/test_node_list.py",),
    ),
    # --- plan ---
    Defect(
        "ring cost: n hops in place of n - 1",
        r"return 2 \* \(n - 1\) \* _hop_s\(size_bytes / n, layout",
        "return 2 * n * _hop_s(size_bytes / n, layout",
        ("unit/plan/test_collectives.py",),
    ),
    Defect(
        "efficiency: base batch forgotten",
        r"return \(noise_scale \+ base_batch_size\) /",
        "return noise_scale /",
        ("unit/test_noise.py",),
    ),
    Defect(
        "slowest worker: spread ignored",
        r"return compute \* \(1 \+ spread \* expected_maximum_of_workers\)",
        "return compute * (1 + 0 * expected_maximum_of_workers)",
        ("unit/plan/test_step_time.py", "unit/plan/test_forecast.py"),
    ),
    Defect(
        "stage cut: transfer counted once",
        r"time_s \+ 2 \* (\S+) / limits\.bytes",
        r"time_s + \1 / limits.bytes",
        ("unit/test_partition.py", "unit/parallel/pipeline/test_cut.py"),
    ),
    Defect(
        "memory: half of the optimizer state",
        r"optimizer_bytes=own \* state\.optimizer / shards",
        "optimizer_bytes=own * state.optimizer / shards / 2",
        ("unit/plan/test_memory.py",),
    ),
)


def put_in(defect: Defect, checkout: Path) -> str:
    """Change the one place that has the defect's text; returns its file, or nothing if there is none, or several."""
    found = [
        path for path in sorted((checkout / "src").rglob("*.py")) for _ in re.finditer(defect.text, path.read_text())
    ]
    if len(found) != 1:
        return ""
    found[0].write_text(re.sub(defect.text, defect.replacement, found[0].read_text()))
    return str(found[0].relative_to(checkout))


def failures(checkout: Path, selection: list[str], limit_s: float) -> dict[str, str]:
    """How each test that fails in a checkout does, by its id; by "pytest" what else went wrong."""
    command = [sys.executable, "-m", "pytest", "-rfE", "--tb=no", *selection]
    environ = {**os.environ, "PYTHONPATH": str(checkout / "src"), "COLUMNS": "300"}
    with tempfile.TemporaryFile("w+") as said:
        pytest = subprocess.Popen(command, cwd=checkout, env=environ, stdout=said, stderr=said, start_new_session=True)
        try:
            exit_code = pytest.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(pytest.pid, signal.SIGKILL)
            pytest.wait()
            return {"pytest": f"pytest was not at its end after {limit_s:.0f} s"}
        said.seek(0)
        failed = re.findall(r"^(?:FAILED|ERROR) (.+?)(?:@\S+)?(?: - (.*))?$", said.read(), re.MULTILINE)
    if not failed and exit_code:
        return {"pytest": f"pytest ended with {exit_code}"}
    return dict(failed)


def try_out(defect: Defect, source: Path, targeted: bool, limit_s: float) -> Outcome:
    """Put a defect into a copy of `source`, and find the test that notices it."""
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        checkout = Path(folder)
        for path in (source / name for name in COPIED):
            if path.is_dir():
                shutil.copytree(path, checkout / path.name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(path, checkout)
        file = put_in(defect, checkout)
        if not file:
            return Outcome("", "", "the text is not in the source exactly once")
        failed = failures(checkout, ["-x", *(f"tests/{path}" for path in defect.tests)], limit_s)
        if not targeted and failed.keys() <= {"pytest"}:
            failed = failures(checkout, ["-x", *FAST_SUITE], limit_s)
    test, how = next(iter(failed.items()), ("", ""))
    return Outcome(file, "" if test == "pytest" else test, how)


def without_defect(outcomes: dict[str, Outcome], source: Path, limit_s: float) -> dict[str, Outcome]:
    """The same outcomes, less the tests that fail in `source` itself."""
    tests = sorted({outcome.noticed_by for outcome in outcomes.values()} - {""})
    failed = failures(source, tests, limit_s) if tests else {}
    if "pytest" in failed:
        sys.exit(f"Nobody knows whether these tests pass without the defects: {failed['pytest']}.")
    return {
        name: Outcome(one.file, "", f"{one.noticed_by} fails without it too") if one.noticed_by in failed else one
        for name, one in outcomes.items()
    }


def table(outcomes: dict[str, Outcome]) -> str:
    """The outcomes in Markdown."""
    lines = ["| defect | file | noticed by |", "|---|---|---|"]
    for name, outcome in outcomes.items():
        file = outcome.file.removeprefix("src/paceline/")
        test = f"`{outcome.noticed_by.removeprefix('tests/')}`" if outcome.noticed_by else f"**nobody** {outcome.how}"
        lines.append(f"| {name} | {file} | {test} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, required=True, metavar="CHECKOUT", help="whose tests are tried")
    parser.add_argument("--out", type=Path, required=True, help="where results go; what it has is not tried again")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="defects to try, again if they have a result")
    parser.add_argument("--targeted", action="store_true", help="leave out the fast suite")
    parser.add_argument("--limit", type=float, default=900, metavar="S", help="seconds for each call of pytest")
    arguments = parser.parse_args()
    source, limit_s = arguments.source.resolve(), arguments.limit
    known = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    for defect in DEFECTS:
        if defect.name in known if arguments.only is None else defect.name not in arguments.only:
            continue
        began = time.monotonic()
        outcome = try_out(defect, source, arguments.targeted, limit_s)
        print(f"{time.monotonic() - began:6.1f} s  {defect.name}: {outcome}", file=sys.stderr, flush=True)
        known[defect.name] = asdict(outcome)
        arguments.out.write_text(json.dumps(known, indent=1) + "\n")
    outcomes = {defect.name: Outcome(**known[defect.name]) for defect in DEFECTS if defect.name in known}
    print(table(without_defect(outcomes, source, limit_s)))


if __name__ == "__main__":
    main()
