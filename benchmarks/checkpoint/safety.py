"""What becomes of damage: a flipped byte, and a save that was killed half-way."""

from __future__ import annotations

import collections
import contextlib
import io
import random
import shutil
import signal
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.kit.workers import run_ranks
from torch import Tensor, nn
from torch.optim import Optimizer

from .cost import gpt, say, state_tensors, trained
from .ways import WAYS, join_workers

FLIP_PARAMETERS = 1e6
NOTICED, HARMLESS, SILENT = "noticed", "harmless", "loaded silently"
"""A flipped byte that is noticed, that changes no number, or that becomes part of the model."""

NEWEST, OLDER, REFUSED, WRONG = "complete", "older one found", "refused", "taken for a good one"
"""What loading the newest checkpoint after a kill finds."""


def numbered(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    """State that tells by itself of which step it is, torch's generator included."""
    with torch.no_grad():
        for tensor in _floats(model, optimizer):
            tensor.fill_(step)
    torch.manual_seed(step)


def is_state_of(model: nn.Module, optimizer: Optimizer, step: int, *, keeps_random_state: bool) -> bool:
    right = all(bool((tensor == step).all()) for tensor in _floats(model, optimizer))
    if keeps_random_state:
        right &= torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(step).get_state())
    return right


def _floats(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    return [tensor for tensor in state_tensors(model, optimizer) if tensor.is_floating_point()]


def save_once(way: str, num_parameters: float, folder: str) -> None:
    """In each of the workers: the state of step 1."""
    join_workers()
    model = gpt(num_parameters)
    optimizer = trained(model)
    saver = WAYS[way](Path(folder), model, optimizer)
    numbered(model, optimizer, 1)
    saver.save(1)
    saver.wait()
    if dist.is_initialized():
        dist.barrier()


def load_flipped(way: str, num_parameters: float, folder: str, num_flips: int, seed: int) -> list[str]:
    """In one worker: flip a byte of the largest file, load, put it back; what came of each."""
    join_workers()
    model = gpt(num_parameters)
    optimizer = trained(model)
    saver = WAYS[way](Path(folder), model, optimizer)
    largest = max((path for path in Path(folder).rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    draw = random.Random(seed)
    outcomes = []
    for _ in range(num_flips):
        place, bit = draw.randrange(len(content)), 1 << draw.randrange(8)
        content[place] ^= bit
        largest.write_bytes(content)
        numbered(model, optimizer, 0)
        try:
            with _silence():
                step = saver.load()
            right = is_state_of(model, optimizer, step, keeps_random_state=False)
            outcomes.append(HARMLESS if step == 1 and right else SILENT)
        except BaseException:  # every library has errors of its own, and torch's CheckpointException is no Exception
            outcomes.append(NOTICED)
        content[place] ^= bit
    return outcomes


def flips(ways: Sequence[str], num_flips: int, scratch: Path, seed: int = 0) -> dict[str, Any]:
    """Of each way, how many single flipped bits in the largest file were noticed when it was loaded."""
    table = {}
    for way in ways:
        with tempfile.TemporaryDirectory(dir=scratch) as folder:
            run_ranks(save_once, 2, way, FLIP_PARAMETERS, folder, timeout_s=120)
            outcomes = run_ranks(load_flipped, 1, way, FLIP_PARAMETERS, folder, num_flips, seed, timeout_s=600)[0]
        table[way] = dict(collections.Counter(outcomes))
        say(f"flipped bits  {way}: {table[way]}")
    return table


def save_and_die(way: str, num_parameters: float, folder: str, after_s: float | None) -> float:
    """In each of the workers: save step 1, and step 2 until the kernel ends this process.

    Returns:
        Seconds of the second save, from its begin until it is complete, where nothing ends it (`after_s` is None).
    """
    join_workers()
    model = gpt(num_parameters)
    optimizer = trained(model)
    saver = WAYS[way](Path(folder), model, optimizer)
    numbered(model, optimizer, 1)
    saver.save(1)
    saver.wait()
    numbered(model, optimizer, 2)
    dist.barrier()
    if after_s is not None:
        # What this signal does by default no program can delay or clean up after: it is as sudden as SIGKILL.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, max(after_s, 1e-4))
    began = time.perf_counter()
    saver.save(2)
    saver.wait()
    dist.barrier()
    seconds = time.perf_counter() - began
    if after_s is not None:
        signal.pause()
    return seconds


def load_after_kill(way: str, num_parameters: float, folder: str) -> str:
    """In one worker: what loading the newest checkpoint finds."""
    join_workers()
    model = gpt(num_parameters)
    optimizer = trained(model)
    numbered(model, optimizer, 0)
    saver = WAYS[way](Path(folder), model, optimizer)
    try:
        with _silence():
            step = saver.load()
    except BaseException:  # as above
        return REFUSED
    if not is_state_of(model, optimizer, step, keeps_random_state=WAYS[way].keeps_random_state):
        return WRONG
    return NEWEST if step == 2 else OLDER


def kills(ways: Sequence[str], num_parameters: float, num_kills: int, scratch: Path, seed: int = 0) -> dict[str, Any]:
    """Of each way, what saves that were killed at random moments left, both workers at once."""
    table = {}
    for way in ways:
        draw = random.Random(seed)
        with tempfile.TemporaryDirectory(dir=scratch) as folder:
            whole_s = min(run_ranks(save_and_die, 2, way, num_parameters, folder, None, timeout_s=120))
        outcomes = []
        for number in range(num_kills):
            after_s = whole_s * (number + draw.random()) / num_kills  # spread over the whole of a save
            folder = tempfile.mkdtemp(dir=scratch)
            with contextlib.suppress(AssertionError):  # that they died without a word is what is meant
                run_ranks(save_and_die, 2, way, num_parameters, folder, after_s, timeout_s=120)
            outcomes.append(run_ranks(load_after_kill, 1, way, num_parameters, folder, timeout_s=120)[0])
            shutil.rmtree(folder)
        table[way] = dict(collections.Counter(outcomes)) | {"save_s": round(whole_s, 3)}
        say(f"kills  {way}: {table[way]}")
    return table


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        yield
