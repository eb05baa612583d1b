"""The device itself: what torch does on it, what it refuses, and what the host is seen to do."""

from __future__ import annotations

import copy
import ctypes
import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.kit.sim_gpu.observing import Observer
from tests.kit.sim_gpu.workers import run_on_gpus

pytestmark = pytest.mark.sim_gpu

_MIB = 2**20
GPU = "cuda:0"


def test_layers_compute_what_they_compute_on_the_cpu(simulated_gpu: Path) -> None:
    run_on_gpus(simulated_gpu, _layers, 1)


def _layers(native: Any) -> None:
    torch.manual_seed(0)
    image = torch.randn(2, 4, 8, 8)
    cases: list[tuple[nn.Module, Tensor]] = [
        (nn.Linear(8, 4), torch.randn(2, 8)),
        (nn.Conv2d(4, 6, 3, padding=1), image),
        (nn.Conv2d(4, 4, 3, groups=4), image),
        (nn.BatchNorm2d(4), image),
        (nn.GroupNorm(2, 4), image),
        (nn.LayerNorm(8), image),
        (nn.MaxPool2d(2), image),
        (nn.AdaptiveAvgPool2d(1), image),
        (nn.Sequential(nn.Flatten(), nn.GELU(), nn.SiLU(), nn.Hardswish()), image),
        (nn.Embedding(10, 4), torch.arange(6)),
        (nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), torch.randn(2, 5, 8)),
    ]
    for layer, given in cases:
        there = copy.deepcopy(layer).to(GPU)
        here_out, there_out = layer(given), there(given.to(GPU))
        assert there_out.device == torch.device(GPU)
        torch.testing.assert_close(there_out.cpu(), here_out)
        if any(True for _ in layer.parameters()):
            here_out.square().sum().backward()
            there_out.square().sum().backward()
        for mine, theirs in zip(layer.parameters(), there.parameters(), strict=True):
            assert mine.grad is not None and theirs.grad is not None
            torch.testing.assert_close(theirs.grad.cpu(), mine.grad)
    query = torch.randn(2, 2, 5, 8)
    on_gpu = query.to(GPU)
    attended = F.scaled_dot_product_attention(on_gpu, on_gpu, on_gpu, is_causal=True)
    torch.testing.assert_close(attended.cpu(), F.scaled_dot_product_attention(query, query, query, is_causal=True))


def test_optimizers_precisions_and_random_numbers(simulated_gpu: Path) -> None:
    run_on_gpus(simulated_gpu, _training_parts, 1)


def _training_parts(native: Any) -> None:
    optimizers: list[Any] = [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW]
    for make in optimizers:
        for options in ({}, {"foreach": True}, {"fused": True}):
            weights = []
            for device in ("cpu", GPU):
                torch.manual_seed(1)
                layer = nn.Linear(8, 8).to(device)
                optimizer = make(layer.parameters(), lr=0.1, **options)
                for _ in range(2):
                    optimizer.zero_grad()
                    layer(torch.ones(2, 8, device=device)).square().sum().backward()
                    nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
                    optimizer.step()
                weights.append(layer.weight.detach().cpu())
            torch.testing.assert_close(*weights)
    layer = nn.Linear(8, 8).to(GPU)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert layer(torch.randn(2, 8, device=GPU)).dtype == torch.bfloat16
    scaler = torch.amp.GradScaler("cuda", init_scale=4.0)
    sgd = torch.optim.SGD(layer.parameters(), lr=0.1)
    scaler.scale(layer(torch.ones(1, 8, device=GPU)).sum() * float("inf")).backward()
    scaler.step(sgd)
    scaler.update()
    assert scaler.get_scale() == 2.0
    torch.cuda.manual_seed(5)
    first, state = torch.randn(3, device=GPU), torch.cuda.get_rng_state()
    second = F.dropout(torch.ones(1000, device=GPU), 0.5)
    torch.cuda.set_rng_state(state)
    assert torch.equal(F.dropout(torch.ones(1000, device=GPU), 0.5), second)
    torch.cuda.manual_seed(5)
    assert torch.equal(torch.randn(3, device=GPU), first)


def test_what_a_gpu_refuses(simulated_gpu: Path) -> None:
    run_on_gpus(simulated_gpu, _refusals, 1, num_gpus=2)


def _refusals(native: Any) -> None:
    here, there, elsewhere = torch.ones(3), torch.ones(3, device=GPU), torch.ones(3, device="cuda:1")
    forbidden: list[tuple[Callable[[], Any], str]] = [
        (lambda: here + there, "same device"),
        (lambda: there + elsewhere, "same device"),
        (lambda: nn.Linear(3, 3)(there), "same device"),
        (lambda: there.numpy(), "can't convert cuda:0 device type tensor"),
        (lambda: torch.ones(1, device="cuda:2"), "invalid device ordinal"),
        (lambda: there.pin_memory(), "pinned"),
    ]
    for attempt, message in forbidden:
        with pytest.raises((RuntimeError, TypeError), match=message):
            attempt()
    torch.use_deterministic_algorithms(True)
    with pytest.raises(RuntimeError, match="deterministic"):
        there.cumsum(0)


def test_the_host_that_reads_device_memory_dies(simulated_gpu: Path) -> None:
    """As with a kernel on a forgotten CPU pointer, or `ctypes` on a device's."""
    run_on_gpus(simulated_gpu, _address_is_no_hosts, 1)
    script = (
        "import ctypes, pathlib, torch\n"
        "from tests.kit.sim_gpu.torch_cuda import simulate\n"
        f"simulate(pathlib.Path({str(simulated_gpu)!r}), 1)\n"
        "ctypes.string_at(torch.ones(3, device='cuda').data_ptr(), 4)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=Path(__file__).parents[3], timeout=200
    )
    assert done.returncode == -11
    assert "ctypes" in done.stderr  # faulthandler says where


def _address_is_no_hosts(native: Any) -> None:
    made_by_allocator, made_by_kernel = torch.empty(4, device=GPU), torch.ones(4, device=GPU) * 2
    for tensor in (made_by_allocator, made_by_kernel, made_by_kernel[1:]):
        assert tensor.data_ptr() >> 55 & 1
    assert not torch.ones(4).data_ptr() >> 55
    on_host = made_by_kernel.cpu()
    assert ctypes.string_at(on_host.data_ptr(), 4) == bytes(bytearray([0, 0, 0, 0x40]))


def test_memory_is_counted_and_runs_out(simulated_gpu: Path) -> None:
    run_on_gpus(simulated_gpu, _memory, 1, num_gpus=2, memory_bytes=8 * _MIB)


def _memory(native: Any) -> None:
    block = torch.zeros(_MIB, device=GPU)
    assert torch.cuda.memory_allocated(0) == 4 * _MIB
    assert torch.cuda.mem_get_info(0) == (4 * _MIB, 8 * _MIB)
    with pytest.raises(torch.cuda.OutOfMemoryError, match="CUDA out of memory"):
        torch.empty(2 * _MIB, device=GPU)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        torch.cat([block, block])  # a kernel's result
    assert torch.cuda.memory_allocated(0) == 4 * _MIB
    assert torch.empty(2 * _MIB, device="cuda:1").device.index == 1
    del block
    assert torch.cuda.memory_allocated(0) == 0
    assert torch.cuda.max_memory_allocated(0) >= 4 * _MIB
    torch.cuda.set_per_process_memory_fraction(0.5, 0)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        torch.empty(5 * _MIB, dtype=torch.uint8, device=GPU)


def test_saved_tensors_come_back_on_any_device(simulated_gpu: Path) -> None:
    run_on_gpus(simulated_gpu, _saving, 1, num_gpus=2)


def _saving(native: Any) -> None:
    value = torch.arange(6.0, device=GPU).view(2, 3).t()
    file = io.BytesIO()
    torch.save({"value": value, "part": value[1:]}, file)
    for place in (None, "cpu", "cuda:1", torch.device("cuda", 1)):
        file.seek(0)
        loaded = torch.load(file, map_location=place)
        assert loaded["value"].device == torch.device(place or GPU)
        assert torch.equal(loaded["value"].cpu(), value.cpu())
        assert loaded["part"].untyped_storage().data_ptr() == loaded["value"].untyped_storage().data_ptr()
    assert torch.equal(copy.deepcopy(value).cpu(), value.cpu())
    storage = value.untyped_storage()
    storage.resize_(0)
    assert storage.nbytes() == 0
    storage.resize_(24)
    assert storage.nbytes() == 24


def test_the_observer_sees_what_the_host_does(simulated_gpu: Path) -> None:
    run_on_gpus(simulated_gpu, _observing, 1)


def _observing(native: Any) -> None:
    pinned, pageable = torch.ones(4).pin_memory(), torch.ones(4)
    assert pinned.is_pinned() and not pageable.is_pinned()
    value = torch.ones(4, device=GPU)
    with Observer(native) as seen:
        value.view(2, 2).t()
        value.mul_(2)
    assert (seen.count("launch"), seen.count("synchronisation")) == (1, 0)
    with Observer(native) as seen:
        pinned.to(GPU, non_blocking=True)
    assert (seen.count("host_to_device", "pinned"), seen.count("synchronisation")) == (1, 0)
    waits: list[Callable[[], Any]] = [
        lambda: pageable.to(GPU, non_blocking=True),
        lambda: value.cpu(),
        lambda: value.sum().item(),
        lambda: bool(value[0] > 0),
        lambda: value.nonzero(),
        lambda: value[value > 0],
        torch.cuda.synchronize,
        lambda: torch.cuda.current_stream().synchronize(),
    ]
    for act in waits:
        with Observer(native) as seen:
            act()
        assert seen.count("synchronisation") > 0, seen.table("synchronisation")
