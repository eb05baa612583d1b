"""Workers on simulated GPUs: those of `tests.kit.workers`, one on each GPU."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.kit.sim_gpu.torch_cuda import simulate
from tests.kit.workers import run_ranks


def run_on_gpus(
    library: Path,
    function: Callable[..., Any],
    num_workers: int,
    *args: Any,
    num_gpus: int | None = None,
    memory_bytes: int | None = None,
    timeout_s: float = 240.0,
) -> list[Any]:
    """What `function(native, *args)` returns in each worker, which finds itself on a machine with simulated GPUs.

    Args:
        library: what `build.build()` returned.
        num_gpus: of the machine; None: one for each worker.
        memory_bytes: of each GPU; None: plenty.
    """
    setting = (str(library), num_gpus or num_workers, memory_bytes)
    return run_ranks(_on_gpus, num_workers, setting, function, *args, timeout_s=timeout_s)


def _on_gpus(setting: tuple[str, int, int | None], function: Callable[..., Any], *args: Any) -> Any:
    library, num_gpus, memory_bytes = setting
    native = simulate(Path(library), num_gpus, memory_bytes)
    os.environ["PACELINE_DEVICE"] = "cuda"
    return function(native, *args)
