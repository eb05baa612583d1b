"""Checkpoints at rest: whatever happens to a byte of them is noticed, the last and the best are kept, and any tool can
read the weights."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

import paceline
from paceline.errors import CheckpointError, JobError
from tests.faults.stage import wait_until
from tests.kit.commands import forked_paceline, succeeded
from tests.kit.workers import run_ranks
from tests.resume.training import TIMEOUT_S, build_model, checkpoints_in

ACCURACIES = (0.1, 0.9, 0.2, 0.3)
LOSSES = (3.0, 2.0, 1.0, 4.0)
FIRST, SECOND, THIRD, LAST = (f"step-{step:08d}" for step in (1, 2, 3, 4))


def _train(folder: Path, keep: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Four epochs of a step, and a checkpoint after each; the weights at the end."""
    data = torch.utils.data.TensorDataset(torch.linspace(-1, 1, 24).view(8, 3), torch.ones(8, 1))
    checkpoint = {"dir": str(folder), "every_minutes": None, "every_epoch": False, **keep}
    with paceline.init(global_batch_size=8, virtual_shards=2, epochs=4, checkpoint=checkpoint, progress=False) as run:
        model = build_model()
        model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for epoch in run.epochs():
            for batch in run.batches(data, epoch):
                run.step(batch, lambda model, shard: (model(shard[0]) - shard[1]).square().mean())
            found = {"accuracy": ACCURACIES[epoch], "loss": LOSSES[epoch]}
            run.evaluate(data, lambda _, batch: {name: torch.full((len(batch[0]),), found[name]) for name in found})  # noqa: B023
            run.save()
            wait_until((folder / f"step-{run.steps:08d}" / "manifest.json").exists)
        return {name: value.clone() for name, value in run.whole_state().items()}


@pytest.fixture(scope="module")
def all_four(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of four checkpoints of two workers, and the weights in the newest."""
    folder = tmp_path_factory.mktemp("four")
    weights, _ = run_ranks(_train, 2, folder / "checkpoints", {"keep_last": 4}, timeout_s=TIMEOUT_S)
    torch.save(weights, folder / "weights.pt")
    return folder


@pytest.fixture
def run_folder(all_four: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(all_four, tmp_path / "run"))


def names_in(run_folder: Path) -> list[str]:
    return [checkpoint.name for checkpoint in checkpoints_in(run_folder)]


def state_of(checkpoint: Path) -> str:
    return {one.name: one.state for one in paceline.checkpoint.verify(checkpoint.parent)}[checkpoint.name]


def flip_a_bit(file: Path, place: float = 0.9, bits: int = 1) -> None:
    content = bytearray(file.read_bytes())
    content[int(place * len(content))] ^= bits
    file.write_bytes(content)


FILES = ("manifest.json", "worker-00000.safetensors", "worker-00001.safetensors")
places = st.floats(0, 1, exclude_max=True)


@contextmanager
def restored(file: Path) -> Iterator[None]:
    content = file.read_bytes()
    try:
        yield
    finally:
        file.write_bytes(content)


def test_every_file_of_a_checkpoint_is_known(all_four: Path) -> None:
    assert sorted(file.name for file in (all_four / "checkpoints" / LAST).iterdir()) == sorted(FILES)
    assert state_of(all_four / "checkpoints" / LAST) == "good"


@given(st.sampled_from(FILES), places, st.integers(1, 255))
def test_every_changed_byte_is_noticed(all_four: Path, file: str, place: float, bits: int) -> None:
    checkpoint = all_four / "checkpoints" / LAST
    with restored(checkpoint / file):
        flip_a_bit(checkpoint / file, place, bits)
        assert state_of(checkpoint) == "damaged"


@given(st.sampled_from(FILES), places)
def test_every_truncation_is_noticed(all_four: Path, file: str, place: float) -> None:
    checkpoint = all_four / "checkpoints" / LAST
    with restored(checkpoint / file):
        content = (checkpoint / file).read_bytes()
        (checkpoint / file).write_bytes(content[: int(place * len(content))])
        assert state_of(checkpoint) == "damaged"
        (checkpoint / file).write_bytes(content + b"\0")
        assert state_of(checkpoint) == "damaged"


@pytest.mark.parametrize("file", FILES)
def test_a_missing_file_and_one_of_another_checkpoint_are_noticed(run_folder: Path, file: str) -> None:
    checkpoint = run_folder / "checkpoints" / LAST
    shutil.copy(run_folder / "checkpoints" / THIRD / file, checkpoint / file)
    assert state_of(checkpoint) == "damaged"
    (checkpoint / file).unlink()
    assert state_of(checkpoint) == ("unfinished" if file == "manifest.json" else "damaged")


def test_an_unfinished_checkpoint_is_not_loaded(run_folder: Path, tmp_path: Path) -> None:
    (run_folder / "checkpoints" / LAST / "manifest.json").unlink()
    assert paceline.checkpoint.export(run_folder, tmp_path / "model.safetensors").name == THIRD
    with pytest.raises(CheckpointError):
        paceline.checkpoint.export(run_folder / "checkpoints" / LAST, tmp_path / "other.safetensors")
    assert not (tmp_path / "other.safetensors").exists()


def test_a_run_keeps_the_last_and_the_best(tmp_path: Path) -> None:
    rules = {"keep_last": 1, "keep_best": "accuracy"}
    run_ranks(_train, 1, tmp_path / "checkpoints", rules, timeout_s=TIMEOUT_S)
    assert names_in(tmp_path) == [SECOND, LAST]
    assert (tmp_path / "checkpoints" / "best").read_text().strip() == SECOND


RULES: list[tuple[dict[str, Any], list[str]]] = [
    ({"keep_last": 1}, [LAST]),
    ({"keep_last": 3}, [SECOND, THIRD, LAST]),
    ({"keep_last": 9}, [FIRST, SECOND, THIRD, LAST]),
    ({"keep_last": 1, "keep_best": "accuracy"}, [SECOND, LAST]),
    ({"keep_last": 1, "keep_best": "loss"}, [THIRD, LAST]),
    ({"keep_last": 1, "keep_every_hours": 1000}, [FIRST, LAST]),
]


@pytest.mark.parametrize(("rules", "stay"), RULES)
def test_pruning_keeps_what_its_rules_say(run_folder: Path, rules: dict[str, Any], stay: list[str]) -> None:
    found = paceline.checkpoint.prune(run_folder, **rules, dry_run=True)
    assert names_in(run_folder) == [FIRST, SECOND, THIRD, LAST]
    assert list(found.stay) == stay
    paceline.checkpoint.prune(run_folder, **rules)
    assert names_in(run_folder) == stay
    assert {one.state for one in paceline.checkpoint.verify(run_folder)} == {"good"}


def test_a_damaged_checkpoint_does_not_count_as_kept(run_folder: Path) -> None:
    flip_a_bit(run_folder / "checkpoints" / LAST / FILES[1])
    paceline.checkpoint.prune(run_folder, keep_last=1)
    assert names_in(run_folder) == [THIRD, LAST]
    assert state_of(run_folder / "checkpoints" / THIRD) == "good"


def test_a_rule_about_an_unknown_metric_removes_nothing(run_folder: Path) -> None:
    with pytest.raises(JobError, match=r"acuracy.*accuracy"):
        paceline.checkpoint.prune(run_folder, keep_last=1, keep_best="acuracy")
    assert len(names_in(run_folder)) == 4


def test_exported_weights_are_those_of_the_run_under_the_models_own_names(run_folder: Path, tmp_path: Path) -> None:
    """And the files of the checkpoint itself are of the same format."""
    target = tmp_path / "model.safetensors"
    assert paceline.checkpoint.export(run_folder, target).step == 4
    assert all(safetensors.torch.load_file(run_folder / "checkpoints" / LAST / file) for file in FILES[1:])
    weights = torch.load(run_folder / "weights.pt")
    found = safetensors.torch.load_file(target)
    assert found.keys() == weights.keys() == build_model().state_dict().keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)
    safetensors.torch.load_model(build_model(), target)


def test_the_commands_say_what_is_damaged_with_their_exit_codes(run_folder: Path) -> None:
    good = succeeded(forked_paceline("checkpoint", "verify", "run", cwd=run_folder.parent))
    assert good.stdout.count("good") == 4
    flip_a_bit(run_folder / "checkpoints" / LAST / FILES[1])
    verified = forked_paceline("checkpoint", "verify", "run", cwd=run_folder.parent)
    assert verified.returncode == 1
    (line,) = (line for line in verified.stdout.splitlines() if "damaged" in line)
    assert LAST in line and FILES[1] in line
    listed = succeeded(forked_paceline("checkpoint", "ls", "run", cwd=run_folder.parent)).stdout
    assert all(name in listed for name in (FIRST, SECOND, THIRD, LAST))
    pruned = succeeded(forked_paceline("checkpoint", "prune", "run", "--keep-last", "1", cwd=run_folder.parent))
    assert names_in(run_folder) == [THIRD, LAST]
    assert FIRST in pruned.stdout and "damaged" in pruned.stdout


def test_an_export_replaces_no_file_unless_it_is_forced(run_folder: Path) -> None:
    target = run_folder.parent / "model.safetensors"
    target.write_text("mine")
    refused = forked_paceline("export", "run", target.name, cwd=run_folder.parent)
    assert refused.returncode == 2 and target.name in refused.stderr
    assert target.read_text() == "mine"
    exported = succeeded(forked_paceline("export", "run", target.name, "--force", cwd=run_folder.parent))
    assert LAST in exported.stdout
    assert safetensors.torch.load_file(target)
