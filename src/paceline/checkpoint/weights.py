"""Weights alone as one safetensors file with plain state_dict names."""

from __future__ import annotations

import contextlib
import errno
import re
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save, save_file
from torch import Tensor

from paceline.checkpoint.storage import Storage
from paceline.regular_files import run_file_mode

_OS_ERROR = re.compile(r"os error (\d+)")


def save_weights(weights: Mapping[str, Tensor], path: Path) -> None:
    """Write a model's state_dict, of any shapes; the file is complete or absent. Tied tensors are stored once.

    Raises:
        OSError: it cannot be written.
    """
    unfinished = path.with_name(path.name + ".part")
    tensors, metadata = _stored(weights)
    with contextlib.suppress(FileNotFoundError):
        unfinished.unlink()  # whatever it is, it is not to be written into
    try:
        save_file(tensors, unfinished, metadata)
        unfinished.chmod(run_file_mode())
        unfinished.rename(path)
    except BaseException as problem:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
        if isinstance(problem, SafetensorError):  # its way of telling a full disk
            number = _OS_ERROR.search(str(problem))
            raise OSError(int(number[1]) if number else errno.EIO, str(problem), str(path)) from None
        raise


def export_weights(weights: Mapping[str, Tensor], storage: Storage, name: str) -> None:
    """Write weights of any shapes from a checkpoint; the file is complete or absent. Tied ones are stored once."""
    storage.write(name, [save(*_stored(weights))])


def _stored(weights: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and the metadata of a file in the safetensors format.

    Tied tensors, the same memory under several names, are stored as the first of these in alphabetical order. The
    metadata has the other names, as `safetensors.torch.load_model` expects.
    """
    kept: dict[tuple[object, ...], str] = {}
    tied: dict[str, str] = {}
    for alias in sorted(weights):
        tensor = weights[alias]
        memory = (tensor.data_ptr(), tensor.shape, tensor.stride()) if tensor.numel() else (alias,)
        first = kept.setdefault(memory, alias)
        if first != alias:
            tied[alias] = first
    return {one: weights[one].detach().contiguous() for one in kept.values()}, {"format": "pt", **tied}
