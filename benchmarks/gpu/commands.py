"""Parts 3 to 5, by commands of Paceline; as a script, what `paceline launch` starts for the last of them."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from .notes import RESULTS, Cases, Notes
from .workloads import ALL, loss_fn

_EPOCH, _PUBLISHED_EPOCH_S = 50_000, 28.3
"""Samples of CIFAR-10; EfficientNet-B7's seconds on one A100 (707 s for 25 epochs)."""
_TINY = ("data.train_limit=64", "data.test_limit=32", "epochs=1", "global_batch_size=8", "virtual_shards=2")
_STEPS, _DEATH = 15, 8


def cifar10(notes: Notes) -> Cases:
    """Part 3: EfficientNet-B7 by 200 steps, and a whole training."""
    return {"an epoch of EfficientNet-B7": partial(_epoch, notes), "94 %": partial(_accuracy, notes)}


def _epoch(notes: Notes) -> None:
    settings = ("global_batch_size=512",) if notes.is_gpu else (*_TINY, "model=lenet")
    record = _train(notes, "cifar10-efficientnet-b7", 200 if notes.is_gpu else 4, *settings)
    epoch_s = _EPOCH / record["samples_per_s"]
    row = {"global batch": record["job"]["global_batch_size"], "model": record["job"]["model"]["name"]}
    row |= {"steps": record["steps"], "samples/s": round(record["samples_per_s"]), "epoch s": round(epoch_s, 1)}
    if notes.is_gpu:
        row |= {"published, one A100": _PUBLISHED_EPOCH_S, "ratio": round(epoch_s / _PUBLISHED_EPOCH_S, 2)}
    notes.row("EfficientNet-B7 on CIFAR-10: seconds an epoch, by the median step", row)


def _accuracy(notes: Notes) -> None:
    record = _train(notes, "cifar10-one-gpu", None, *(() if notes.is_gpu else _TINY))
    row = {"accuracy": f"{record['accuracy']:.2%}", "steps": record["steps"]}
    row |= {key: round(record[key], 1) for key in ("train_s", "wall_s", "samples_per_s")}
    is_reached = record["accuracy"] >= 0.94 or not notes.is_gpu
    notes.row("CIFAR-10 by cifar10-one-gpu, aim 94 %", row, good=is_reached)


def _train(notes: Notes, recipe: str, max_steps: int | None, *settings: str) -> dict[str, Any]:
    """The record of a recipe, trained on one device."""
    if notes.data is None:
        raise RuntimeError("left out: it needs --data DIR with cifar10/train.parquet and test.parquet")
    run = notes.scratch / recipe
    command = ["paceline", "train", recipe, "-n", "1", "--out", str(run), "--data", str(notes.data / "cifar10")]
    command += [] if max_steps is None else ["--max-steps", str(max_steps)]
    for setting in ("checkpoint.every_epoch=false", *settings):
        command += ["--set", setting]
    notes.command(*command)
    record: dict[str, Any] = json.loads((run / "record.json").read_text())
    return record


def machine(notes: Notes) -> Cases:
    """Part 4: what the machine says of itself, and a probe's forecast of the steps of part 2."""
    asked: dict[str, tuple[str, ...]] = {"machine.txt": ("paceline", "doctor", "--all")}
    if notes.is_gpu:
        asked |= {"topo.json": ("paceline", "topo", "--json"), "nvidia-smi-topo.txt": ("nvidia-smi", "topo", "-m")}
        asked["topo.txt"] = ("paceline", "topo", "--from", str(notes.out / "nvidia-smi-topo.txt"))
        asked["nvidia-smi.txt"] = ("nvidia-smi", "-q")
    found: dict[str, Any] = {name: partial(_ask, notes, name, *command) for name, command in asked.items()}
    rows = [json.loads(line).get("values", {}) for line in (notes.out / RESULTS).read_text().splitlines()]
    steps = [row for row in rows if row.get("way") == "numeric, 8 shards" and "ratio" in row]
    return found | {f"forecast of {row['workload']}": partial(_forecast, notes, row) for row in steps}


def _ask(notes: Notes, name: str, *command: str) -> None:
    said = notes.command(*command, may_fail="doctor" in command)  # it judges the machine, not Paceline
    (notes.out / name).write_text(said)
    row = {"command": " ".join(command), "ends with": said.strip().splitlines()[-1][-200:]}
    notes.row("What the machine says", row)


def _forecast(notes: Notes, measured: dict[str, Any]) -> None:
    name, budget = measured["workload"], "8" if notes.is_gpu else "2"
    workload = ALL[name]
    job, cluster, out = (str(notes.scratch / f"{name}{end}") for end in (".toml", ".json", ""))
    lines = [f"{key} = {json.dumps(value)}" for key, value in workload.job.items()]
    for table in ("model", "data"):
        lines += [f'[{table}]\nname = "benchmarks.gpu.workloads:job_{table}"\noptions = {{ workload = "{name}" }}']
    Path(job).write_text("\n".join([*lines, f'[optim]\nname = "{workload.optimizer}"\n']))
    notes.command("paceline", "probe", job, "-n", "1", "--budget", budget, "--out", cluster)
    notes.command("paceline", "plan", job, "--cluster", cluster, "--devices", "1", "--out", out)
    (forecast,) = json.loads((Path(out) / "forecast.json").read_text())["rows"]
    row, found = {"workload": name}, {"ms a step": 1e3 * forecast["step_s"]}
    if "MiB" in measured and forecast["memory_bytes"] is not None:
        found["MiB"] = forecast["memory_bytes"] / 2**20
    for unit, value in found.items():
        row |= {f"forecast {unit}": f"{value:.4g}", f"measured {unit}": measured[unit]}
        row |= {f"error of {unit}": f"{value / measured[unit] - 1:+.0%}"}
    notes.row("A probe's forecast beside the steps of part 2", row)


def recovery(notes: Notes) -> Cases:
    """Part 5: what a checkpoint costs, a restart after a kill, the report of a killed worker."""
    parts = {"checkpoint": _checkpoint, "restart after a kill": _restart, "report of a killed worker": _report}
    return {name: partial(part, notes) for name, part in parts.items()}


def _checkpoint(notes: Notes) -> None:
    found = _trained(notes, "saved", "GPT-2 small" if notes.is_gpu else "GPT of 2 layers", 0)
    for save in found["saves"]:
        notes.row("A checkpoint: training waits, the checkpoint is complete", {"device": found["device"], **save})


def _restart(notes: Notes) -> None:
    whole = _trained(notes, "whole", "small LeNet", 0)
    killed = _trained(notes, "killed", "small LeNet", _DEATH, "--max-restarts", "1")
    is_equal = whole["sha"] == killed["sha"] and (notes.scratch / "killed" / "died").exists()
    row = {"device": killed["device"], "killed in step": _DEATH, "steps": killed["steps"], "same weights": is_equal}
    notes.row("A worker killed, and started again from its checkpoint", row, good=is_equal)


def _report(notes: Notes) -> None:
    """On CPUs: `paceline launch` gives each worker a GPU of its own."""
    said = _launch(notes, "reported", "small LeNet", _DEATH, "-n", "2", may_fail=True, PACELINE_DEVICE="cpu")
    lines = [line for line in said.splitlines() if "rank 1" in line.lower()]
    is_named = bool(lines) and "SIGKILL" in said
    notes.row("Rank 1 of 2 killed, on CPUs", {"the report": (lines or [said[-500:]])[0]}, good=is_named)


def _trained(notes: Notes, name: str, workload: str, death: int, *options: str) -> dict[str, Any]:
    _launch(notes, name, workload, death, "-n", "1", *options)
    result: dict[str, Any] = json.loads((notes.scratch / name / "result.json").read_text())
    return result


def _launch(notes: Notes, name: str, workload: str, death: int, *options: str, **environ: Any) -> str:
    folder = notes.scratch / name
    folder.mkdir()
    script = ("-m", "benchmarks.gpu.commands", str(folder), workload, str(death))
    return notes.command("paceline", "launch", "--out", str(folder / "run"), *options, *script, **environ)


def main(folder: Path, name: str, death: int) -> None:
    """Train and save twice; the last rank is killed in step `death`, once."""
    import paceline

    workload, saves, died = ALL[name], [], folder / "died"
    values = {**workload.job, "parity": "bitwise", "checkpoint": {"dir": str(folder / "checkpoints")}}
    with paceline.init(**values, progress=False) as run:
        model = workload.build()
        run.prepare(model, workload.build_optimizer(model))
        for batch in run.batches(workload.samples(_STEPS)):
            float(run.step(batch, loss_fn))
            if run.steps == death and run.rank == run.world_size - 1 and not died.exists():
                died.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            if run.steps in (_STEPS // 3, 2 * _STEPS // 3):
                began = time.perf_counter()
                run.save()
                saved_s = time.perf_counter() - began
                while len(list(folder.glob("checkpoints/*/manifest.json"))) < 3 * run.steps // _STEPS:
                    time.sleep(0.01)  # a thread writes it
                complete_s = round(time.perf_counter() - began, 2)
                size = sum(file.stat().st_size for file in folder.glob(f"checkpoints/*{run.steps}/*"))
                save = {"MiB": round(size / 2**20), "waits ms": round(1e3 * saved_s, 1), "complete s": complete_s}
                saves.append({"step": run.steps, **save})
        found = {"sha": run.weights_sha256(), "steps": run.steps, "device": run.device.type, "saves": saves}
        if run.rank == 0:
            (folder / "result.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
