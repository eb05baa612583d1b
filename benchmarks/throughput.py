"""Paceline beside a plain DDP script, on the same data, alternately in one run: ratios, and the distance to the limit.

    python benchmarks/throughput.py mnist   --data DIR   LeNet, global batch 256, 2 workers with 1 thread each
    python benchmarks/throughput.py cifar10 --data DIR   crop, flip and cutout feeding a small net
    python benchmarks/throughput.py startup --data DIR   seconds from launch to the first step

DIR holds the data set's files. The plain script gets the number of loader processes that is best for it here.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
Result = dict[str, Any]


def environment() -> dict[str, str]:
    """One thread a process, loopback only, and the peers' modules to be found by name."""
    path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    started_at = repr(time.time())
    return os.environ | {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": path,
        "BENCH_STARTED_AT": started_at,
    }


def run(command: list[str]) -> Result:
    """The JSON on the last line that `command` prints."""
    output = subprocess.run(
        command, env=environment(), stdout=subprocess.PIPE, text=True, check=True, timeout=900
    ).stdout
    result: Result = json.loads(output.strip().splitlines()[-1])
    return result


def plain(case: str, data: Path, *extra: str) -> Result:
    script = str(HERE / "peers" / "plain_ddp.py")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return run([*launcher, script, "--case", case, "--data", str(data), *extra])


def paceline(job: str, data: Path, *extra: str) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "paceline", "train", job, "--workers", "2", "--threads", "1"]
        result = run([*command, "--data", str(data), "--quiet", "--json", "--out", f"{folder}/run", *extra])
        record = json.loads(Path(folder, "run", "record.json").read_text())
        # All steps over all their time, as for the peer; the record's own figure is a median.
        result["samples_per_s"] = record["samples_seen"] / record["train_s"]
        return result


def limit(*flags: str) -> Result:
    """Two processes at once, each with a core to itself if there are two."""
    command = [sys.executable, str(HERE / "peers" / "limit.py"), *flags]
    env = environment()
    both = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    rates = [json.loads(process.communicate(timeout=300)[0])["samples_per_s"] for process in both]
    return {"samples_per_s": sum(rates)}


def resident_ddp(*flags: str) -> Result:
    """Plain DDP on tensors that lie ready: no data, no loss of the global batch, nothing of ours."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return run([*launcher, str(HERE / "peers" / "limit.py"), "--ddp", *flags])


def alternate(contestants: dict[str, Callable[[], Result]], rounds: int) -> dict[str, list[Result]]:
    """Everybody once, then everybody again: a machine whose speed drifts is unfair to nobody."""
    results: dict[str, list[Result]] = {name: [] for name in contestants}
    for number in range(rounds):
        for name, contestant in contestants.items():
            results[name].append(contestant())
            print(f"round {number + 1}/{rounds}  {name}: {results[name][-1]}", file=sys.stderr)
    return results


def summary(results: dict[str, list[Result]], key: str, against: str) -> dict[str, Any]:
    """Medians, and the median of the ratio to `against` taken round by round."""
    table = {}
    for name, rounds in results.items():
        ratios = [mine[key] / other[key] for mine, other in zip(rounds, results[against], strict=True)]
        table[name] = {
            key: round(statistics.median(result[key] for result in rounds), 3),
            f"ratio_to_{against}": round(statistics.median(ratios), 3),
            "ratios": [round(ratio, 3) for ratio in ratios],
        }
        accuracies = [result["accuracy"] for result in rounds if "accuracy" in result]
        if accuracies:
            table[name]["accuracy"] = round(statistics.median(accuracies), 4)
    return table


def best_loader_workers(case: str, data: Path) -> str:
    """Of 0, 1 and 2 DataLoader processes per worker, the number with which the plain script is fastest here."""
    rates = {
        number: plain(case, data, "--max-steps", "60", "--loader-workers", number)["samples_per_s"]
        for number in ("0", "1", "2")
    }
    print(f"plain script by loader processes: {rates}", file=sys.stderr)
    return max(rates, key=lambda number: float(rates[number]))


def mnist(data: Path, rounds: int) -> dict[str, Any]:
    recipe = ["--set", "epochs=1", "--set", "optim.schedule=constant"]
    loaders = best_loader_workers("mnist", data)
    contestants: dict[str, Callable[[], Result]] = {
        "plain": lambda: plain("mnist", data, "--loader-workers", loaders),
        "paceline_float32": lambda: paceline("mnist-lenet", data, *recipe),
        "paceline_bfloat16": lambda: paceline("mnist-lenet", data, *recipe, "--set", "precision=bfloat16"),
        "limit_float32": lambda: limit(),
        "limit_float32_channels_last": lambda: limit("--channels-last"),
        "limit_bfloat16_channels_last": lambda: limit("--channels-last", "--bf16"),
        "limit_float32_channels_last_keep_memory": lambda: limit("--channels-last", "--keep-memory"),
        "limit_bfloat16_channels_last_keep_memory": lambda: limit("--channels-last", "--bf16", "--keep-memory"),
    }
    contestants["resident_ddp_channels_last_keep_memory"] = lambda: resident_ddp("--channels-last", "--keep-memory")
    table = summary(alternate(contestants, rounds), "samples_per_s", "plain")
    for name in ("float32", "bfloat16"):
        best = table[f"limit_{name}_channels_last_keep_memory"]["samples_per_s"]
        table[f"paceline_{name}"]["part_of_limit"] = round(table[f"paceline_{name}"]["samples_per_s"] / best, 3)
    return {"plain_loader_workers": loaders, **table}


def cifar10(data: Path, rounds: int) -> dict[str, Any]:
    loaders = best_loader_workers("cifar10", data)
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "small.toml"
        job.write_text(
            'global_batch_size = 256\nmodel = "peers.plain_ddp:small_net"\n'
            '[data]\nname = "cifar10"\naugment = ["crop", "flip", "cutout"]\ncutout_size = 8\n'
            "[optim]\nlr = 0.05\nmomentum = 0.0\n"
        )
        contestants: dict[str, Callable[[], Result]] = {
            "plain": lambda: plain("cifar10", data, "--lr", "0.05", "--loader-workers", loaders),
            "paceline": lambda: paceline(str(job), data),
        }
        return {
            "plain_loader_workers": loaders,
            **summary(alternate(contestants, rounds), "samples_per_s", "plain"),
        }


def startup(data: Path, rounds: int) -> dict[str, Any]:
    def ours() -> Result:
        began = time.monotonic()
        subprocess.run([sys.executable, "-m", "paceline", "--help"], stdout=subprocess.DEVNULL, check=True)
        command_line_s = time.monotonic() - began
        # The run's own clock starts when it starts its workers; what the command line took before is added.
        result = paceline("mnist-lenet", data, "--max-steps", "1")
        return {"time_to_first_step_s": command_line_s + result["time_to_first_step_s"]}

    contestants: dict[str, Callable[[], Result]] = {
        "plain": lambda: plain("mnist", data, "--max-steps", "1"),
        "paceline": ours,
    }
    return summary(alternate(contestants, rounds), "time_to_first_step_s", "plain")


def main() -> None:
    cases = {"mnist": mnist, "cifar10": cifar10, "startup": startup}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=cases)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    print(json.dumps(cases[arguments.case](arguments.data.resolve(), arguments.rounds), indent=2))


if __name__ == "__main__":
    main()
