"""Golden records: what one commit of Paceline computes, writes and says, kept as files to compare another commit with.

    python benchmarks/golden.py record --source CHECKOUT --out DIR [--only PART ...] [--cases PATTERN ...]
    python benchmarks/golden.py compare DIR_BEFORE DIR_AFTER [--changed FILE]

`record` runs the Paceline in CHECKOUT/src, whatever its modules are called: by its command line alone, in a folder with
the jobs, scripts and clusters of golden_inputs/, and with topologies and a checkpoint of the tests beside this file, so
that every commit is given the same. The cases are in golden_inputs/cases.toml; PATTERN chooses among their names, and
what DIR has of other cases stays, so that a long record can be made in pieces. What no two runs have alike (times,
process ids, folders, this machine's name) becomes a placeholder, and so do names of Paceline's modules. Record both
commits on one machine, with the same torch.

`compare` prints what differs, by its path, and then ends with 1. FILE lists what was changed on purpose, a line each: a
pattern for paths as `compare` prints them, " # ", and the reason. Help texts may change: it only says that they did.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import json
import math
import os
import platform
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

STEPS, STOP = 7, 5
"""Of 61 samples in batches of 24, three make an epoch and the last one is smaller."""
TOLERANCE = 1e-12
TIMEOUT_S = 900.0
MOST_LINES = 20
"""Of one case, that `compare` prints."""
INPUTS = Path(__file__).resolve().parent / "golden_inputs"
TESTS = INPUTS.parents[1] / "tests"
WORKERS = (1, 2, 3, 4)

_tables = tomllib.loads((INPUTS / "cases.toml").read_text())
CASES: dict[str, dict[str, str]] = {
    table: {name: words.format(**_tables["short"]) for name, words in rows.items()} for table, rows in _tables.items()
}
"""By table and name, what follows on the command line."""
for _path in sorted((TESTS / "topologies").glob("*.[tx]*")):
    CASES["exact"] |= {
        f"topo-{_path.name}": f"topo --from topologies/{_path.name} --json",
        f"topo-{_path.name}-pick": f"topo --from topologies/{_path.name} --pick 2 --json",
    }

VOLATILE_KEYS = {"samples_per_s", "measured_samples_per_s", "time_to_first_step_s", "wall_s", "train_s", "total_s"}
VOLATILE_KEYS |= {"data_s", "compute_s", "exposed_comm_s", "environment", "pid", "noticed_at", "sha256", "epoch_start"}
DECIDED_KEYS = {"not_measured", "sums", "rejected", "recommended_devices", "verdict"}
"""What follows from measured numbers, in commands that measure."""
VOLATILE_TEXT = (
    (r"\bpid \d+|-CONT \d+", "pid <pid>"),
    (r"\b\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d)?Z?", "<moment>"),
    (r"\b0x[0-9a-f]{8,}|(?<=bench-)[0-9a-f]{8}\b|(?<=\[127\.0\.0\.1\]:)\d+", "<number>"),
    (r"\bpaceline\.(?!init)[a-z_]+(\.[a-z_]+)*", "<module>"),
    (r"(?s)<script[^>]*>.{100000,}?</script>", "<script>"),
    (rf"\b{re.escape(socket.gethostname())}\b", "<host>"),
)
FOREIGN = ("RANK", "WORLD_SIZE", "LOCAL_", "SLURM_", "OMPI_", "PMI", "MASTER_", "PACELINE_", "OMP_", "CUDA_")
"""How variables begin that would say that a command is a worker, or where it runs."""


@dataclass(frozen=True)
class Source:
    """A checkout, the scratch folder in which its commands run, and which cases are run: patterns of their names."""

    checkout: Path
    scratch: Path
    chosen: tuple[str, ...] = ("*",)

    def cases(self, table: str) -> dict[str, str]:
        """The words of each chosen case in a table, by its name."""
        found = CASES[table].items()
        return {name: words for name, words in found if any(fnmatch.fnmatchcase(name, one) for one in self.chosen)}

    def lay_out(self, name: str) -> Path:
        """A new folder with every input of every command."""
        folder = self.scratch / name
        shutil.copytree(INPUTS, folder)
        shutil.copytree(TESTS / "topologies", folder / "topologies")
        for copy in ("checkpoint", "damaged"):
            shutil.copytree(TESTS / "fixtures" / "checkpoint-format-1", folder / copy)
        with open(next(folder.glob("damaged/step-*/worker-00000.safetensors")), "r+b") as file:
            file.seek(-5, os.SEEK_END)
            file.write(b"x")
        return folder

    def call(self, folder: Path, words: str) -> subprocess.CompletedProcess[str]:
        """`paceline WORDS` in `folder`, to its end."""
        environ = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
        environ |= {"PYTHONPATH": f"{self.checkout}/src{os.pathsep}{folder}", "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
        environ |= {"PACELINE_DEVICE": "cpu", "GLOO_SOCKET_IFNAME": "lo", "NO_COLOR": "1"}
        command = [sys.executable, "-m", "paceline", *shlex.split(words)]
        try:
            return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return subprocess.CompletedProcess(command, 124, "", f"paceline: not at its end after {TIMEOUT_S:.0f} s")

    def train(self, folder: Path, words: str, out: str = "run", steps: int = STEPS) -> dict[str, Any]:
        """What a training computes: the weights' fingerprint, and every line of its metrics."""
        result = self.call(folder, f"train {words} --max-steps {steps} --threads 1 --quiet --json --out {out}")
        if result.returncode:
            return {"exit_code": result.returncode, "stderr": self.plain(result.stderr).splitlines()}
        summary = json.loads(result.stdout)
        lines = [json.loads(line) for line in (folder / out / "metrics.jsonl").read_text().splitlines()]
        metrics = [line for line in lines if "samples_per_s" not in line]  # those hold times alone
        for line in metrics:
            line.pop("time", None)
        return {**{key: summary[key] for key in ("weights_sha256", "accuracy", "loss")}, "metrics": metrics}

    def plain(self, text: str) -> str:
        """A text with placeholders for what no two runs have alike."""
        paths = {str(self.scratch): "<scratch>", str(self.checkout): "<source>", sys.executable: "<python>"}
        for path, placeholder in paths.items():
            text = text.replace(path, placeholder)
        for pattern, placeholder in VOLATILE_TEXT:
            text = re.sub(pattern, placeholder, text)
        return text

    def settled(self, value: Any, numbers: str) -> Any:
        """The same of a value of JSON."""
        if isinstance(value, dict):
            hidden = {"measured": VOLATILE_KEYS, "kinds": DECIDED_KEYS}.get(numbers, ())
            return {key: "<measured>" if key in hidden else self.settled(one, numbers) for key, one in value.items()}
        if isinstance(value, list):
            every = [self.settled(one, numbers) for one in value]
            kinds = sorted({json.dumps(one) for one in every})
            return [json.loads(kind) for kind in kinds] if numbers == "kinds" else every
        if isinstance(value, str) and numbers == "kinds":  # sentences may depend on what was measured
            return re.sub(r"\d+(\.\d+)?", "<n>", self.plain(value)) if len(value) <= 40 else "<text>"
        if isinstance(value, str):
            return self.plain(value)
        if numbers == "kinds" and not isinstance(value, bool | None):
            return "<number>"
        return float(f"{value:.12g}") if isinstance(value, float) else value

    def read(self, text: str, numbers: str) -> Any:
        """What was printed or written: JSON, lines of JSON, or lines."""
        for parse in (json.loads, lambda text: [json.loads(line) for line in text.splitlines()]):
            try:
                return self.settled(parse(text), numbers)
            except ValueError:
                continue
        return self.plain(text).splitlines()

    def read_file(self, path: Path, numbers: str) -> Any:
        if path.suffix != ".safetensors":
            return self.read(path.read_text(), numbers)
        return {name: fingerprint(value) for name, value in load_file(path).items()}


def fingerprint(tensor: torch.Tensor) -> str:
    content = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{tensor.dtype} {list(tensor.shape)} {hashlib.sha256(content).hexdigest()}"


# --- the parts: each gives the name and the record of one case after the other ---

Cases = Iterator[tuple[str, Any]]
Part = Callable[[Source, Path], Cases]


def record_bits(source: Source, _: Path) -> Cases:
    for name, words in source.cases("bits").items():
        folder = source.lay_out(f"bits-{name}")
        on = {n: source.train(folder, f"{words} -n {n}", f"run{n}-workers") for n in WORKERS}
        yield name, {"all alike": len({json.dumps(one) for one in on.values()}) == 1, "workers": on}


def record_weights(part: str) -> Part:
    def record(source: Source, out: Path) -> Cases:
        for name, words in source.cases(part).items():
            folder = source.lay_out(f"{part}-{name}")
            outcome = source.train(folder, words)
            if "exit_code" not in outcome:
                shutil.copy(folder / "run" / "model.safetensors", out / f"{name}.safetensors")
            yield name, outcome

    return record


def record_commands(source: Source, _: Path) -> Cases:
    for numbers in ("exact", "measured", "kinds"):
        for name, words in source.cases(numbers).items():
            folder = source.lay_out(f"json-{name}")
            before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
            result = source.call(folder, words)
            said = {"exit_code": result.returncode, "stdout": source.read(result.stdout, numbers)}
            if numbers == "exact":
                said["stderr"] = source.plain(result.stderr).splitlines()
            kept = (".json", ".jsonl", ".csv", ".html", ".svg", ".safetensors")[: None if numbers == "exact" else 2]
            files = [
                path
                for path in sorted(folder.rglob("*"))
                if path.suffix in kept
                and "checkpoints" not in path.parts
                and path.stat().st_mtime_ns != before.get(path)
            ]
            said["files"] = {str(path.relative_to(folder)): source.read_file(path, numbers) for path in files}
            yield name, said


def record_failures(source: Source, _: Path) -> Cases:
    for name, words in (source.cases("faults") | source.cases("mistakes")).items():
        folder = source.lay_out(f"failures-{name}")
        result = source.call(folder, words)
        sentences = [line for line in source.plain(result.stderr).splitlines() if line.startswith("paceline: ")]
        found = {"exit_code": result.returncode, "sentences": without_times(sentences)}
        for path in folder.glob("**/failure.json"):
            found["failure"] = source.settled(failure(json.loads(path.read_text())), "measured")
        yield name, found


def without_times(value: Any) -> Any:
    if isinstance(value, list):
        return list(map(without_times, value))
    return re.sub(r"\b\d+\.\d+ s\b", "<time>", value) if isinstance(value, str) else value


def failure(report: dict[str, Any]) -> dict[str, Any]:
    """A failure.json without frames of libraries, and without what workers were in by chance when it was noticed."""
    evidence: str = report["evidence"]
    ours = re.findall(r'File "[^"]*(?:points|faulty)\.py", line .*', evidence)
    ours += [line for line in evidence.splitlines()[-1:] if not line.startswith((" ", "Extension modules"))]
    workers = [re.sub(r"[;,] (in |its last ).*", "", line) for line in report["workers"]]
    # Where the culprit has ended, it is a matter of chance who else has.
    num_sure = len(workers) if report["exit_code"] is None else 1
    report |= {"evidence": ours, "workers": workers[:num_sure]}
    return {key: without_times(value) for key, value in report.items()}


def record_checkpoints(source: Source, _: Path) -> Cases:
    for name, words in source.cases("saved").items():
        folder = source.lay_out(f"checkpoint-{name}")
        # One on the way and one at the end: of checkpoints that follow each other quickly some may be left out.
        moments = "--set checkpoint.every_steps=3 --set checkpoint.every_epoch=false"
        found: dict[str, Any] = {"outcome": source.train(folder, f"{words} {moments}", steps=STOP)}
        files = [path for path in sorted(folder.glob("run/checkpoints/**/*")) if path.is_file()]
        tensors = [path for path in files if path.suffix == ".safetensors"]  # a manifest has times, of any length
        found["bytes"] = {str(path.relative_to(folder)): path.stat().st_size for path in tensors}
        found["content"] = {str(path.relative_to(folder)): source.read_file(path, "measured") for path in files}
        for words in ("checkpoint ls run --json", "checkpoint verify run"):
            found[words] = source.read(source.call(folder, words).stdout, "measured")
        yield name, found
    for name, words in source.cases("resumed").items():
        folder = source.lay_out(f"checkpoint-{name}")
        job, first, then = re.match(r"(.*?) (-n .*) => (.*)", words).groups()  # type: ignore[union-attr]
        kept = f"--set checkpoint.dir={folder / 'kept'}"
        whole = source.train(folder, f"{job} {then}", "whole")
        begun = source.train(folder, f"{job} {first} {kept}", "begun", STOP)
        rest = source.train(folder, f"{job} {then} {kept}", "rest")
        same = whole.get("weights_sha256") == rest.get("weights_sha256")
        yield name, {"weights of a run that nobody interrupted": same, "begun": begun, "rest": rest}


def record_help(source: Source, _: Path) -> Cases:
    for name, words in source.cases("help").items():
        yield name, source.call(source.scratch, f"{words} --help").stdout.splitlines()


PARTS: dict[str, Part] = {
    "bits": record_bits,
    "strategies": record_weights("strategies"),
    "aggregation": record_weights("aggregation"),
    "json": record_commands,
    "failures": record_failures,
    "checkpoint": record_checkpoints,
    "help": record_help,
}


def record(checkout: Path, out: Path, parts: list[str], chosen: tuple[str, ...]) -> None:
    """Run the chosen cases of these parts and keep what comes of them."""
    environ = {**os.environ, "PYTHONPATH": f"{checkout}/src"}
    where = [sys.executable, "-c", "import paceline; print(paceline.__file__)"]
    found = subprocess.run(where, cwd="/", env=environ, capture_output=True, text=True, check=True).stdout
    if not found.startswith(f"{checkout}/src/"):
        sys.exit(f"Python takes Paceline from {found.strip()}, not from {checkout}/src.")
    out.mkdir(parents=True, exist_ok=True)
    commit = subprocess.run(["git", "-C", checkout, "describe", "--always", "--dirty"], capture_output=True, text=True)
    about = {
        "commit": commit.stdout.strip(),
        "torch": torch.__version__,
        "python": sys.version,
        "machine": platform.uname(),
    }
    (out / "about.json").write_text(json.dumps(about, indent=1) + "\n")
    with tempfile.TemporaryDirectory(prefix="golden-") as scratch:
        for part in parts:
            if chosen == ("*",):
                shutil.rmtree(out / part, ignore_errors=True)
            (out / part).mkdir(exist_ok=True)
            began = time.monotonic()
            for name, value in PARTS[part](Source(checkout, Path(scratch), chosen), out / part):
                (out / part / f"{name}.json").write_text(json.dumps(value, indent=1) + "\n")
                print(f"{part}/{name}  {time.monotonic() - began:.1f} s", flush=True)
                began = time.monotonic()


# --- comparing ---


def leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Every value in a tree of JSON, by its path."""
    if isinstance(value, dict | list) and value:
        for key, one in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(one, f"{name}/{key}")
    else:
        yield name, value


def load(folder: Path) -> dict[str, dict[str, Any]]:
    """Every case of a part: its values by their names, with the tensors of its model."""
    cases = {path.stem: dict(leaves(json.loads(path.read_text()), "")) for path in sorted(folder.glob("*.json"))}
    for path in folder.glob("*.safetensors"):
        cases[path.stem] |= {f"/weights/{name}": value for name, value in load_file(path).items()}
    return cases


def differences(before: dict[str, Any] | None, after: dict[str, Any] | None, case: str) -> list[tuple[str, str]]:
    """The names of a case's values that differ, and how."""
    if before is None or after is None:
        return [(case, "only after" if before is None else "only before")]
    found = dict.fromkeys(after.keys() - before.keys(), "only after")
    found |= dict.fromkeys(before.keys() - after.keys(), "only before")
    found |= {name: what for name in before.keys() & after.keys() if (what := difference(before[name], after[name]))}
    return [(case + name, found[name]) for name in sorted(found)]


def difference(before: Any, after: Any) -> str | None:
    """What differs between two values, in a few words; None where nothing does."""
    if isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor) and before.shape == after.shape:
        distance, size = float((before.double() - after.double()).abs().max()), float(before.double().abs().max())
        same = before.dtype == after.dtype and distance <= TOLERANCE * size
        return None if same else f"{before.dtype} and {after.dtype} differ by {distance:.3g}, of {size:.3g}"
    if isinstance(before, float) and isinstance(after, float) and math.isclose(before, after, rel_tol=TOLERANCE):
        return None
    return None if repr(before) == repr(after) else f"{before!r:.80} -> {after!r:.80}"


def allowance(name: str, allowed: dict[str, str]) -> str:
    """Why a value may differ; empty if it may not."""
    return next((reason for glob, reason in allowed.items() if fnmatch.fnmatchcase(name, glob)), "")


def compare(before: Path, after: Path, parts: list[str], allowed: dict[str, str]) -> bool:
    """Print what differs; returns whether that is nothing, or all of it is allowed."""
    old_facts, new_facts = (json.loads((folder / "about.json").read_text()) for folder in (before, after))
    for key in (key for key in old_facts if old_facts[key] != new_facts[key]):
        print(f"{key}: {old_facts[key]} -> {new_facts[key]}")
    num_different = 0
    for part in parts:
        old, new = load(before / part), load(after / part)
        counts = {"equal": 0, "different": 0, "changed (allowed)": 0}
        for case in sorted(old.keys() | new.keys()):
            found = differences(old.get(case), new.get(case), f"{part}/{case}")
            reasons = {name: allowance(name, allowed) for name, _ in found}
            lines = [
                f"{name}: {what}{reasons[name]}" for name, what in sorted(found, key=lambda one: reasons[one[0]] != "")
            ]
            for line in lines[:MOST_LINES]:
                print(line)
            if len(lines) > MOST_LINES:
                print(f"{part}/{case}: … and {len(lines) - MOST_LINES} more")
            counts["equal" if not found else "changed (allowed)" if all(reasons.values()) else "different"] += 1
        print(f"== {part}: {', '.join(f'{count} {how}' for how, count in counts.items())}")
        num_different += counts["different"]
    return num_different == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record")
    recording.add_argument("--source", type=Path, required=True, metavar="CHECKOUT")
    recording.add_argument("--out", type=Path, required=True, metavar="DIR")
    recording.add_argument("--cases", nargs="+", default=["*"], metavar="PATTERN", help="names of cases")
    comparing = commands.add_parser("compare")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    comparing.add_argument("--changed", type=Path, metavar="FILE")
    for command in (recording, comparing):
        command.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS), metavar="PART")
    arguments = parser.parse_args()
    if arguments.command == "record":
        record(arguments.source.resolve(), arguments.out, arguments.only, tuple(arguments.cases))
        return
    allowed = {"help/*": "  (help texts may change)"}
    for line in arguments.changed.read_text().splitlines() if arguments.changed else ():
        glob, _, reason = line.partition(" # ")
        allowed |= {glob.strip(): f"  (changed on purpose: {reason.strip()})"} if line.strip() else {}
    sys.exit(0 if compare(arguments.before, arguments.after, arguments.only, allowed) else 1)


if __name__ == "__main__":
    main()
