"""Ways to keep a model and its optimizer, each set up as its documentation shows, behind one signature."""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from paceline.checkpoint import Saver, Snapshot, newest_good, open_storage
from paceline.spec import CheckpointSpec
from paceline.train.session.optimizer_state import Names, load_optimizer_state, optimizer_state


class Way(ABC):
    """One worker's side; everything is a common act of all workers, whose process group is there if they are many."""

    does_fsync: ClassVar[bool]
    """Whether a complete checkpoint would survive a power cut."""
    keeps_random_state: ClassVar[bool]
    """Of torch's generator, without being told to."""

    @abstractmethod
    def __init__(self, folder: Path, model: nn.Module, optimizer: Optimizer) -> None: ...

    @abstractmethod
    def save(self, step: int) -> None:
        """Returns when training may go on."""

    @abstractmethod
    def wait(self) -> None:
        """Until the checkpoint is complete."""

    @abstractmethod
    def load(self) -> int:
        """Put the newest checkpoint in the folder back, and return its step; raises what its library raises."""


class Paceline(Way):
    """Every worker a part, in the background; the newest good one is loaded."""

    does_fsync = True
    keeps_random_state = False  # no generator goes on from step to step: each step's is derived from its number

    def __init__(self, folder: Path, model: nn.Module, optimizer: Optimizer) -> None:
        self._storage = open_storage(folder)
        self._model, self._optimizer = model, optimizer
        self._names = Names.of(optimizer, model)
        self._saver = Saver(self._storage, CheckpointSpec(keep_last=100), _gloo_group(), print)

    def save(self, step: int) -> None:
        shared = {
            "model": self._model.state_dict(),
            "optimizer": optimizer_state(self._optimizer, self._names, self._model),
        }
        self._saver.begin(Snapshot(step, {}, shared, {}))

    @property
    def is_writing(self) -> bool:
        return self._saver.busy

    def wait(self) -> None:
        self._saver.wait()

    def load(self) -> int:
        checkpoint, _problems = newest_good(self._storage)
        if checkpoint is None:
            raise FileNotFoundError("no checkpoint")
        shared = checkpoint.shared
        self._model.load_state_dict(shared["model"])
        load_optimizer_state(self._optimizer, self._names, self._model, shared["optimizer"], hyper=True)
        return checkpoint.manifest.step


class TorchSave(Way):
    """Rank 0 writes one file (tutorial "Saving and loading a general checkpoint")."""

    does_fsync = False
    keeps_random_state = False

    def __init__(self, folder: Path, model: nn.Module, optimizer: Optimizer) -> None:
        self._folder, self._model, self._optimizer = folder, model, optimizer

    def save(self, step: int) -> None:
        if rank() == 0:
            state = {"step": step, "model": self._model.state_dict(), "optimizer": self._optimizer.state_dict()}
            torch.save(state, self._folder / f"step-{step}.pt")

    def wait(self) -> None:
        pass

    def load(self) -> int:
        state = torch.load(_newest(self._folder.glob("step-*")), weights_only=True)
        self._model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        return int(state["step"])


class DistributedCheckpoint(Way):
    """torch.distributed.checkpoint.save (recipe "Getting started with DCP"), a fresh folder each time."""

    does_fsync = True
    keeps_random_state = False

    def __init__(self, folder: Path, model: nn.Module, optimizer: Optimizer) -> None:
        self._folder, self._model, self._optimizer = folder, model, optimizer

    def save(self, step: int) -> None:
        from torch.distributed.checkpoint.state_dict_saver import save

        save(self._state(), checkpoint_id=self._folder / f"step-{step}", no_dist=not dist.is_initialized())

    def wait(self) -> None:
        pass

    def load(self) -> int:
        from torch.distributed.checkpoint.state_dict import set_state_dict
        from torch.distributed.checkpoint.state_dict_loader import load

        newest = _newest(self._folder.glob("step-*"))
        state = self._state()
        load(state, checkpoint_id=newest, no_dist=not dist.is_initialized())
        set_state_dict(
            self._model, self._optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        return _number(newest)

    def _state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self._model, self._optimizer)
        return {"model": model, "optimizer": optimizer}


class DistributedCheckpointAsync(DistributedCheckpoint):
    """The same by async_save (recipe "Asynchronous saving with DCP"): a group of its own, memory for the copy kept."""

    def __init__(self, folder: Path, model: nn.Module, optimizer: Optimizer) -> None:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        super().__init__(folder, model, optimizer)
        self._group = _gloo_group()
        # What it uses by default, which cannot pin memory without a GPU; kept, it copies into the same memory again.
        self._stager = DefaultStager(StagingOptions(False, False, False, False))
        self._saved: Future[Any] | None = None

    def save(self, step: int) -> None:
        from torch.distributed.checkpoint.state_dict_saver import async_save

        saved = async_save(
            self._state(),
            checkpoint_id=self._folder / f"step-{step}",
            async_stager=self._stager,
            process_group=self._group,
            no_dist=self._group is None,
        )
        assert isinstance(saved, Future)
        self._saved = saved

    def wait(self) -> None:
        if self._saved is not None:
            self._saved.result()


class Accelerate(Way):
    """Accelerator.save_state with automatic names (guide "Checkpointing")."""

    does_fsync = False
    keeps_random_state = True

    def __init__(self, folder: Path, model: nn.Module, optimizer: Optimizer) -> None:
        from accelerate import Accelerator
        from accelerate.utils import ProjectConfiguration

        self._folder = folder
        names = ProjectConfiguration(project_dir=str(folder), automatic_checkpoint_naming=True)
        self._accelerator = Accelerator(cpu=True, project_config=names)
        self._accelerator.prepare(model, optimizer)

    def save(self, step: int) -> None:
        self._accelerator.project_configuration.iteration = step
        self._accelerator.save_state()

    def wait(self) -> None:
        pass

    def load(self) -> int:
        self._accelerator.load_state()
        return _number(_newest((self._folder / "checkpoints").iterdir()))


class Fabric(Way):
    """Fabric.save (guide "Saving and loading checkpoints")."""

    does_fsync = False
    keeps_random_state = False

    def __init__(self, folder: Path, model: nn.Module, optimizer: Optimizer) -> None:
        from lightning_fabric import Fabric as LightningFabric

        self._folder = folder
        self._fabric = LightningFabric(accelerator="cpu", strategy="ddp", devices=world_size())
        self._fabric.launch()
        self._model, self._optimizer = self._fabric.setup(model, optimizer)

    def save(self, step: int) -> None:
        state = {"model": self._model, "optimizer": self._optimizer, "step": step}
        self._fabric.save(self._folder / f"step-{step}.ckpt", state)

    def wait(self) -> None:
        pass

    def load(self) -> int:
        state = {"model": self._model, "optimizer": self._optimizer, "step": 0}
        self._fabric.load(_newest(self._folder.glob("step-*")), state)
        return int(state["step"])


WAYS: Mapping[str, type[Way]] = {
    "Paceline": Paceline,
    "torch.save": TorchSave,
    "DCP save": DistributedCheckpoint,
    "DCP async_save": DistributedCheckpointAsync,
    "Accelerate": Accelerate,
    "Lightning Fabric": Fabric,
}
"""By the name in the tables."""


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _gloo_group() -> dist.ProcessGroup | None:
    """One that no other part of the program speaks on."""
    return dist.new_group(backend="gloo") if dist.is_initialized() else None


def _number(path: Path) -> int:
    found = re.search(r"(\d+)(\.\w+)?$", path.name)
    assert found is not None
    return int(found[1])


def _newest(paths: Iterable[Path]) -> Path:
    """The one with the highest number; raises `FileNotFoundError` where there is none."""
    found = max(paths, key=_number, default=None)
    if found is None:
        raise FileNotFoundError("no checkpoint")
    return found


def join_workers() -> None:
    """Meet the other workers where the environment says, as a script does before anything else; also a worker alone."""
    dist.init_process_group(
        "gloo",
        init_method=os.environ["PACELINE_RENDEZVOUS"],
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
