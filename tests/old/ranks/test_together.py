"""A run that is spread over workers resumes: each reads its part, and no damage to any byte passes unnoticed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import paceline
from paceline import env
from paceline.checkpoint import Loaded, SharedCatalogue, block_checksums, newest_that, read_together
from paceline.checkpoint.storage import Folder
from paceline.spec import Job, PipelineSpec, Plan, parse_mesh
from paceline.train.process.process_group import join
from paceline.train.session import session
from paceline.train.session.resume import CheckpointReader
from tests.kit.workers import run_ranks
from tests.old.unit.checkpoint.memory import Memory, state_at, write_checkpoint

# --- every byte is checked ---

NEWER = "step-00000007"
NUM_READERS = 3


@dataclass(frozen=True)
class _Harm:
    """What is done to a file."""

    path: str
    place: int
    kind: str = "flip"
    reader: int | None = None
    """Who finds it so; None: everybody."""

    def apply(self, files: dict[str, bytes]) -> dict[str, bytes]:
        content = files[self.path]
        match self.kind:
            case "flip":
                flipped = bytes([content[self.place] ^ 1 << self.place % 8])
                return files | {self.path: content[: self.place] + flipped + content[self.place + 1 :]}
            case "cut":
                return files | {self.path: content[: self.place]}
            case "lengthen":
                return files | {self.path: content + b"\0"}
            case _:
                return {path: other for path, other in files.items() if path != self.path}


def _want(rank: int, shared: dict[str, Any]) -> dict[str, Any]:
    """Rows of one tensor; nobody wants what workers had for themselves."""
    model = shared["model"]
    rows = {0: ((0, 0), (1, 3)), 1: ((1, 0), (2, 3)), 2: ((3, 1), (1, 2))}[rank]
    return {"model": {"weight": model["weight"].slice_at(*rows)} | ({"bias": model["bias"]} if rank else {})}


def _read_harmed(files: dict[str, bytes], harms: list[_Harm]) -> list[tuple[int, Tensor, Tensor | None, list[str]]]:
    """What a worker reads after each of the harms."""
    block_checksums.BLOCK_BYTES = 32
    world = join(env.worker_facts(), Plan(world_size=NUM_READERS, timeout_s=60))
    assert world.group is not None
    answers = []
    for harm in harms:
        harmed = harm.reader in (None, world.rank)
        storage = Memory(harm.apply(files) if harmed else files)
        read = partial(read_together, storage, group=world.group, want=partial(_want, world.rank))
        found, problems = newest_that(read, SharedCatalogue(storage, world.group))
        assert found is not None
        manifest, tree = found
        assert isinstance(tree["model"]["weight"], Loaded)
        answers.append((manifest.step, tree["model"]["weight"].values, tree["model"].get("bias"), problems))
    return answers


def test_no_byte_is_used_that_is_not_right() -> None:
    """Where one worker alone finds a byte changed, it may be one that it has no need to read."""
    storage = Memory()
    write_checkpoint(storage, 4)
    write_checkpoint(storage, 7)
    parts = [f"{NEWER}/worker-{rank:05d}.safetensors" for rank in range(2)]
    places = [(path, place) for path in parts for place in range(0, len(storage.files[path]), 53)]
    harms = [_Harm(path, place) for path, place in places]
    harms += [_Harm(path, place, reader=place % NUM_READERS) for path, place in places]
    harms += [_Harm(path, 40, kind) for path in parts for kind in ("cut", "lengthen", "remove")]
    harms += [_Harm(f"{NEWER}/manifest.json", 99), _Harm(f"{NEWER}/manifest.json", 99, reader=0)]
    harms += [_Harm(f"{NEWER}/manifest.json", 99, reader=1)]  # who does not look
    answers = run_ranks(_read_harmed, NUM_READERS, storage.files, harms)
    steps = []
    for harm, *told in zip(harms, *answers, strict=True):
        ((step, first, _, problems), (_, second, bias, _), (_, third, _, _)) = told
        assert {one[0] for one in told} == {step} and {tuple(one[3]) for one in told} == {tuple(problems)}
        if harm.reader is None:
            assert step == 4 and Path(harm.path).name in problems[0]
        weight = state_at(step)["model/weight"]
        assert torch.equal(torch.cat([first, second]), weight[:3]) and torch.equal(third, weight[3:, 1:])
        assert bias is not None and torch.equal(bias, state_at(step)["model/bias"])
        steps.append(step)
    assert steps[-1] == 7 and steps[-2] == 4
    alone = [step for step, harm in zip(steps, harms, strict=True) if harm.reader is not None]
    assert 4 in alone and 7 in alone


# --- and few more than the worker needs ---

LAYERS, WIDTH = 8, 1024


class _Counting(Folder):
    """Counts what it has read."""

    num_bytes = 0

    def stretch(self, name: str, start: int, stop: int) -> bytearray:
        content = super().stretch(name, start, stop)
        self.num_bytes += len(content)
        return content

    def pieces(self, name: str) -> Any:
        for piece in super().pieces(name):
            self.num_bytes += len(piece)
            yield piece


def _loss(model: nn.Module, batch: Any) -> Tensor:
    inputs, targets = batch
    return F.cross_entropy(model(inputs), targets)


def _peak_bytes() -> int:
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024


def _train(strategy: str, num_workers: int, folder: str) -> tuple[int, int, int, str]:
    """Bytes read to resume, most bytes of memory that came on top meanwhile, steps before it, and the weights then."""
    storage = _Counting(Path(folder))
    session.open_storage = lambda _address: storage  # type: ignore[attr-defined,assignment]
    mesh = parse_mesh(strategy, num_workers)
    # Given, so that no measuring on a busy machine makes parts of different sizes.
    cuts = tuple(str(LAYERS * stage // mesh.pp) for stage in range(1, mesh.pp))
    plan = Plan(
        world_size=num_workers, mesh=mesh, pipeline=PipelineSpec(cuts=cuts), algorithm="all_reduce", timeout_s=60
    )
    job = Job().with_values(global_batch_size=4, virtual_shards=4, epochs=1, measure_noise=False)
    with paceline.init(job, plan=plan, max_steps=1, checkpoint_dir=folder) as run:
        torch.manual_seed(1)
        model = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS)])
        before, looked = [0], CheckpointReader.newest

        def newest(self: Any) -> Any:
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
            before[0] = _peak_bytes()
            return looked(self)

        CheckpointReader.newest = newest  # type: ignore[method-assign]
        run.prepare(model, torch.optim.Adam(model.parameters()), example=torch.zeros(2, WIDTH))
        num_read, peak, steps = storage.num_bytes, _peak_bytes() - before[0], run.steps
        data = torch.utils.data.TensorDataset(torch.ones(8, WIDTH), torch.arange(8))
        for batch in run.batches(data):
            run.step(batch, _loss)
        return num_read, peak, steps, run.weights_sha256()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, int, str]:
    """Where four workers have saved one step of a model in shards, how large that is, and their weights."""
    folder = tmp_path_factory.mktemp("saved")
    results = run_ranks(_train, 4, "fsdp", 4, str(folder), timeout_s=120)
    assert {steps for *_, steps, _ in results} == {0}
    return str(folder), sum(path.stat().st_size for path in folder.glob("step-*/worker-*")), results[0][-1]


@pytest.mark.parametrize(
    ("strategy", "num_workers", "share"),
    [("fsdp", 4, 0.3), ("pp", 4, 0.4), ("fsdp2 x tp2", 4, 0.8), ("fsdp", 2, 0.55)],
)
def test_a_worker_reads_its_part(saved: tuple[str, int, str], strategy: str, num_workers: int, share: float) -> None:
    folder, num_bytes, weights = saved
    results = run_ranks(_train, num_workers, strategy, num_workers, folder, timeout_s=120)
    assert {(steps, sha) for *_, steps, sha in results} == {(1, weights)}
    assert max(num_read for num_read, *_ in results) <= share * num_bytes
    assert sum(num_read for num_read, *_ in results) >= num_bytes
    # What it has read, and the optimizer's state that is made of it: less than twice its part.
    assert max(peak for _, peak, *_ in results) <= 2 * num_bytes / num_workers
