"""Weights alone in a file."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from paceline.checkpoint.weights import save_weights


def test_a_place_that_cannot_be_written_to_is_an_error_of_the_system(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        save_weights({"weight": torch.zeros(3)}, tmp_path / "missing" / "model.safetensors")


def test_a_full_disk_is_an_error_of_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_tensors: object, path: Path, _metadata: object) -> None:
        path.write_bytes(b"half")
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(sys.modules[save_weights.__module__], "save_file", full)
    with pytest.raises(OSError, match="No space left") as caught:
        save_weights({"weight": torch.zeros(3)}, tmp_path / "model.safetensors")
    assert caught.value.errno == 28 and os.listdir(tmp_path) == []  # noqa: PTH208
