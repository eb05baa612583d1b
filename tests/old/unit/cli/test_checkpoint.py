"""`paceline checkpoint` and `paceline export`, from the command line to the last line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

from paceline.checkpoint import Saver, Snapshot, save_weights
from paceline.checkpoint.storage import Folder
from paceline.spec.job import CheckpointSpec
from tests.old.fixtures.checkpoint import FOLDER, Tied
from tests.old.unit.cli.conftest import Run


def _model(step: int) -> nn.Module:
    torch.manual_seed(step)
    return Tied()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run folder with the checkpoints of steps 10, 20 and 30, the best of which is 20, and one that is unfinished."""
    storage = Folder(tmp_path / "run" / "checkpoints")
    saver = Saver(storage, CheckpointSpec(keep_last=9), None, pytest.fail)
    for step, accuracy in ((10, 0.5), (20, 0.875), (30, 0.75)):
        shared = {"model": _model(step).state_dict(), "metrics": {"accuracy": accuracy}}
        saver.begin(Snapshot(step, {"name": "test"}, shared, {}))
        saver.wait()
    storage.write("step-00000040/worker-00000.safetensors", [b"half"])
    return tmp_path / "run"


def _break(folder: Path, step: int) -> None:
    path = folder / "checkpoints" / f"step-{step:08d}" / "worker-00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_ls(run: Run, folder: Path) -> None:
    (folder / "checkpoints" / "step-00000020" / "manifest.json").write_text("{}")
    code, out, _ = run("checkpoint", "ls", folder)
    assert code == 0
    heads, *lines = [line.split() for line in out.splitlines()]
    assert heads == ["checkpoint", "step", "saved", "(UTC)", "workers", "size", "metrics", "state"]
    assert [line[0] for line in lines] == [f"step-000000{step}" for step in (10, 20, 30, 40)]
    assert lines[0][1] == "10" and lines[0][-3:] == ["accuracy", "0.5", "complete"]
    assert " ".join(lines[1][1:]) == "damaged: manifest.json is damaged"
    assert lines[3][1:] == ["unfinished"]


def test_ls_shows_names_of_metrics_as_they_are(run: Run, tmp_path: Path) -> None:
    saver = Saver(Folder(tmp_path / "checkpoints"), CheckpointSpec(), None, pytest.fail)
    shared = {"model": _model(1).state_dict(), "metrics": {"f1[macro]": 0.5, "f1[/a]": 0.25}}
    saver.begin(Snapshot(10, {"name": "test"}, shared, {}))
    saver.wait()
    code, out, _ = run("checkpoint", "ls", tmp_path)
    assert code == 0 and "f1[macro] 0.5" in out and "f1[/a] 0.25" in out


def test_ls_for_programs(run: Run, folder: Path) -> None:
    code, out, _ = run("checkpoint", "ls", folder / "checkpoints", "--json")
    answer = json.loads(out)
    assert code == 0 and answer["address"] == str(folder / "checkpoints")
    first, *_, last = answer["checkpoints"]
    assert first["step"] == 10 and first["workers"] == 1 and first["metrics"] == {"accuracy": 0.5}
    assert first["bytes"] > 100 and first["state"] == "complete"
    assert last == {"name": "step-00000040", "state": "unfinished"}


def test_verify(run: Run, folder: Path) -> None:
    good = "step-00000010  good\nstep-00000020  good\nstep-00000030  good\nstep-00000040  unfinished\n"
    assert run("checkpoint", "verify", folder) == (0, good, "")
    _break(folder, 20)
    code, out, err = run("checkpoint", "verify", folder)
    assert (code, err) == (1, "")
    damage = "damaged: worker-00000.safetensors is damaged: its checksum is wrong"
    assert out == good.replace("20  good", f"20  {damage}")
    assert run("checkpoint", "verify", folder / "checkpoints" / "step-00000020") == (
        1,
        f"step-00000020  {damage}\n",
        "",
    )
    assert run("checkpoint", "verify", folder / "checkpoints" / "step-00000030") == (0, "step-00000030  good\n", "")


def test_prune(run: Run, folder: Path) -> None:
    names = ["latest", *(f"step-000000{step}" for step in (10, 20, 30, 40))]
    code, out, _ = run("checkpoint", "prune", folder, "--keep-last", 1, "--keep-best", "accuracy", "--dry-run")
    assert code == 0
    assert out == "step-00000020  stays\nstep-00000030  stays\nstep-00000010  would be removed\n"
    checkpoints = Folder(folder / "checkpoints")
    assert checkpoints.names() == names
    assert run("checkpoint", "prune", folder, "--keep-last", 1, "--keep-best", "accuracy")[0] == 0
    assert checkpoints.names() == [name for name in names if name != "step-00000010"]


def test_prune_refuses_a_metric_that_no_checkpoint_has(run: Run, folder: Path) -> None:
    before = Folder(folder / "checkpoints").names()
    for more in ([], ["--dry-run"]):
        code, out, err = run("checkpoint", "prune", folder, "--keep-last", 1, "--keep-best", "acuracy", *more)
        assert (code, out) == (2, "")
        assert err == (
            f"paceline: --keep-best 'acuracy': no checkpoint in {folder / 'checkpoints'} has a value of it; they have "
            "accuracy.\n"
        )
    assert Folder(folder / "checkpoints").names() == before


def test_prune_does_not_count_damaged_ones(run: Run, folder: Path) -> None:
    _break(folder, 30)
    code, out, _ = run("checkpoint", "prune", folder, "--keep-last", 1)
    assert code == 0
    assert out.splitlines()[0].startswith("step-00000030  is damaged, does not count and is left alone: worker-00000")
    assert out.splitlines()[1:] == ["step-00000020  stays", "step-00000010  is removed"]


def test_export(run: Run, folder: Path, tmp_path: Path) -> None:
    """It is the file that a run writes at its end."""
    target = tmp_path / "model.safetensors"
    _break(folder, 30)
    code, out, err = run("export", folder, target)
    assert code == 0
    assert out == f"{target}: the model at step 20, from step-00000020 in {folder / 'checkpoints'}\n"
    assert err.startswith("The checkpoint step-00000030 cannot be used: worker-00000.safetensors is damaged")
    save_weights(_model(20).state_dict(), tmp_path / "expected.safetensors")
    exported, expected = (
        safetensors.torch.load_file(tmp_path / f"{name}.safetensors") for name in ("model", "expected")
    )
    assert exported.keys() == expected.keys() and "last.weight" not in exported
    assert all(torch.equal(exported[name], value) for name, value in expected.items())
    model = _model(0)
    missing, unexpected = safetensors.torch.load_model(model, target)
    assert not missing and not unexpected
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), _model(20).parameters(), strict=True))

    # Not over what is there.
    before = target.read_bytes()
    code, _, err = run("checkpoint", "export", folder / "checkpoints" / "step-00000010", target)
    assert code == 2 and "is there already; choose another name, or replace it with --force" in err
    assert target.read_bytes() == before
    assert run("checkpoint", "export", folder / "checkpoints" / "step-00000010", target, "--force")[0] == 0
    assert target.read_bytes() != before
    assert sorted(path.name for path in tmp_path.glob("model*")) == ["model.safetensors"]


def test_export_of_a_damaged_one_that_is_named(run: Run, folder: Path, tmp_path: Path) -> None:
    _break(folder, 30)
    code, _, err = run("export", folder / "checkpoints" / "step-00000030", tmp_path / "model.safetensors")
    assert code == 2 and "step-00000030 cannot be used: worker-00000.safetensors is damaged" in err
    assert not (tmp_path / "model.safetensors").exists()


@pytest.mark.parametrize("command", ["ls", "verify", "prune", "export"])
def test_mistakes(run: Run, tmp_path: Path, command: str) -> None:
    def ask(place: object) -> str:
        target = [str(tmp_path / "model.safetensors")] if command == "export" else []
        code, _, err = run("checkpoint", command, place, *target)
        assert code == 2 and err.startswith("paceline: ") and err.count("\n") == 1
        return err

    assert "There is no folder 'nowhere', or there is nothing in it." in ask("nowhere")
    (tmp_path / "notes.txt").write_text("")
    assert "There is no folder" in ask(tmp_path / "notes.txt")
    assert f"There is no checkpoint in '{tmp_path}'." in ask(tmp_path)
    assert "cannot be kept at s4://bucket" in ask("s4://bucket/run")


def test_mistakes_of_export(run: Run, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, _, err = run("export", folder, tmp_path / "file" / "model.safetensors")
    assert code == 2 and "model.safetensors cannot be written: " in err
    for step in (10, 20, 30):
        _break(folder, step)
    code, _, err = run("export", folder, tmp_path / "model.safetensors")
    assert code == 2 and "None of the 3 checkpoints in" in err
    storage = Folder(tmp_path / "other")
    saver = Saver(storage, CheckpointSpec(), None, pytest.fail)
    saver.begin(Snapshot(1, {}, {"metrics": {}}, {}))
    saver.wait()
    code, _, err = run("export", tmp_path / "other", tmp_path / "model.safetensors")
    assert code == 2 and "The checkpoint step-00000001 holds no model." in err


def test_a_checkpoint_of_the_first_release(run: Run, tmp_path: Path) -> None:
    code, out, _ = run("checkpoint", "verify", FOLDER)
    assert (code, out) == (0, "step-00000005  good\n")
    assert run("export", FOLDER, tmp_path / "model.safetensors")[0] == 0
    model = Tied()
    missing, unexpected = safetensors.torch.load_model(model, tmp_path / "model.safetensors")
    assert not missing and not unexpected
    assert model.norm.num_batches_tracked == 5
