"""Puts the simulated device under `torch.cuda`: torch's Python functions for CUDA call a library that is not there."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib.util
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.cuda.nccl

_GIB = 2**30


def simulate(library: Path, num_devices: int, memory_bytes: int | None = None) -> Any:
    """Give this process `num_devices` simulated GPUs, for good; returns the library's module.

    Call it before anything asks torch for a GPU, and never in a process that runs other tests.

    Args:
        library: what `build.build()` returned.
        memory_bytes: of each GPU; None: 80 GiB, of which the host must have what is used.
    """
    faulthandler.enable()  # the host that reads a device's memory dies, and should say where
    native = _load(library)
    native.set_num_devices(num_devices)
    native.install_hooks()
    for index in range(num_devices):
        native.set_total_bytes(index, memory_bytes or 80 * _GIB)
    _Devices(native).install()
    _Memory(native).install()
    _install_streams(native)
    _install_storages(native)
    _install_missing_kernels()
    from tests.kit.sim_gpu.nccl import install_nccl

    install_nccl(native)
    return native


def _load(library: Path) -> Any:
    spec = importlib.util.spec_from_file_location("simulated_cuda", library)
    assert spec is not None and spec.loader is not None
    native = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(native)
    return native


def replace(where: Any, **names: Any) -> None:
    """Set attributes of a module or a class of torch's."""
    for name, value in names.items():
        setattr(where, name, value)


@dataclass(frozen=True)
class _Properties:
    """As much as is asked of `torch.cuda.get_device_properties`; an A100's."""

    total_memory: int
    name: str = "Simulated GPU"
    major: int = 8
    minor: int = 0
    multi_processor_count: int = 108
    max_threads_per_multi_processor: int = 2048
    regs_per_multiprocessor: int = 65536
    warp_size: int = 32
    uuid: str = "00000000-0000-0000-0000-000000000000"
    gcnArchName: str = ""  # noqa: N815


class _Devices:
    """What `torch.cuda` says of devices."""

    def __init__(self, native: Any) -> None:
        self._native = native

    def index(self, device: Any = None) -> int:
        if isinstance(device, str | torch.device):
            device = torch.device(device).index
        return self._native.current_device() if device is None or device < 0 else int(device)

    def exchange(self, index: int) -> int:
        before: int = self._native.current_device()
        if index >= 0:
            self._native.set_device(index)
        return before

    def set(self, device: Any) -> None:
        self.exchange(self.index(device))

    def install(self) -> None:
        native, index = self._native, self.index
        replace(
            torch.cuda,
            _initialized=True,
            _lazy_init=lambda: None,
            _is_compiled=lambda: True,
            is_initialized=lambda: True,
            is_available=lambda: True,
            device_count=native.num_devices,
            current_device=native.current_device,
            set_device=self.set,
            _exchange_device=self.exchange,
            _maybe_exchange_device=self.exchange,
            device=_device_context(self),
            synchronize=lambda device=None: torch.accelerator.synchronize(index(device)),
            get_device_name=lambda device=None: _Properties.name,
            get_device_capability=lambda device=None: (_Properties.major, _Properties.minor),
            get_device_properties=lambda device=None: _Properties(native.total_bytes(index(device))),
            is_bf16_supported=lambda *args, **options: True,
            is_current_stream_capturing=lambda: False,
            default_generators=tuple(native.default_generators()),
        )
        replace(
            torch._C,
            _cuda_getDeviceCount=native.num_devices,
            _cuda_getDevice=native.current_device,
            _cuda_setDevice=native.set_device,
            _cuda_getCurrentRawStream=lambda index: 0,
        )
        torch.version.cuda = "12.8"
        torch.cuda.nccl.version = lambda: (2, 27, 3)


def _device_context(devices: _Devices) -> type:
    class Device:
        """`torch.cuda.device`."""

        def __init__(self, device: Any) -> None:
            self.idx = -1 if device is None else devices.index(device)
            self.prev_idx = -1

        def __enter__(self) -> None:
            self.prev_idx = devices.exchange(self.idx)

        def __exit__(self, *error: object) -> None:
            devices.exchange(self.prev_idx)

    return Device


class _Memory:
    """What `torch.cuda` says of memory."""

    def __init__(self, native: Any) -> None:
        self._native = native
        self._index = _Devices(native).index

    def _free_and_total(self, device: Any = None) -> tuple[int, int]:
        index = self._index(device)
        return self._native.total_bytes(index) - self._native.allocated_bytes(index), self._native.total_bytes(index)

    def _set_fraction(self, fraction: float, device: Any = None) -> None:
        index = self._index(device)
        self._native.set_limit_bytes(index, int(fraction * self._native.total_bytes(index)))

    def install(self) -> None:
        native, index = self._native, self._index
        functions = {
            "mem_get_info": self._free_and_total,
            "memory_allocated": lambda device=None: native.allocated_bytes(index(device)),
            "memory_reserved": lambda device=None: native.allocated_bytes(index(device)),
            "max_memory_allocated": lambda device=None: native.peak_bytes(index(device)),
            "max_memory_reserved": lambda device=None: native.peak_bytes(index(device)),
            "reset_peak_memory_stats": lambda device=None: native.reset_peak(index(device)),
            "set_per_process_memory_fraction": self._set_fraction,
            "empty_cache": lambda: None,
            "ipc_collect": lambda: None,
        }
        replace(torch.cuda, **functions)
        replace(torch.cuda.memory, **functions)


def _install_streams(native: Any) -> None:
    index = _Devices(native).index

    class Stream(torch.Stream):
        """`torch.cuda.Stream`."""

        def __new__(cls, device: Any = None, priority: int = 0, **stream: Any) -> Stream:
            if "stream_id" in stream:
                return super().__new__(cls, **stream)
            return super().__new__(cls, device=torch.device("cuda", index(device)), priority=priority)

        @property
        def cuda_stream(self) -> int:
            return self.stream_id

        def wait_event(self, event: Any) -> None:
            event.wait(self)

        def wait_stream(self, other: Any) -> None:
            self.wait_event(other.record_event())

        def record_event(self, event: Any = None) -> Any:
            event = event or Event()
            event.record(self)
            return event

    class Event(torch.Event):
        """`torch.cuda.Event`; remembers itself when it was recorded, since torch asks a device with CUDA's timers."""

        def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Event:
            device = torch.device("cuda", native.current_device())
            return super().__new__(cls, device=device, enable_timing=enable_timing)

        def record(self, stream: Any = None) -> None:
            super().record(torch.cuda.current_stream() if stream is None else stream)
            self.recorded_at_s = time.perf_counter()

        def wait(self, stream: Any = None) -> None:
            super().wait(torch.cuda.current_stream() if stream is None else stream)

        def elapsed_time(self, other: Any) -> float:
            return 1e3 * float(other.recorded_at_s - self.recorded_at_s)

    def stream_of(index: int, stream_id: int) -> Stream:
        return Stream(stream_id=stream_id, device_index=index, device_type=1)

    def current_stream(device: Any = None) -> Stream:
        return stream_of(index(device), torch._C._accelerator_getStream(index(device)).stream_id)

    @contextlib.contextmanager
    def on_stream(stream: Any) -> Iterator[None]:
        if stream is None:
            yield
            return
        device, before = native.current_device(), current_stream(stream.device)
        torch._C._accelerator_setStream(stream)
        try:
            yield
        finally:
            torch._C._accelerator_setStream(before)
            native.set_device(device)

    streams: dict[str, Any] = {"Stream": Stream, "Event": Event}
    replace(torch.cuda.streams, **streams)
    replace(
        torch.cuda,
        **streams,
        current_stream=current_stream,
        default_stream=lambda device=None: stream_of(index(device), 0),
        set_stream=torch._C._accelerator_setStream,
        stream=on_stream,
        StreamContext=on_stream,
    )


def _install_storages(native: Any) -> None:
    """Torch's storages know CUDA only where they are compiled for it."""
    storage: Any = torch.UntypedStorage
    resize_elsewhere, move_elsewhere, clone_elsewhere = storage.resize_, storage.to, storage.clone

    def copied(self: Any, device: torch.device, non_blocking: bool = False) -> Any:
        there = torch.empty(self.nbytes(), dtype=torch.uint8, device=device)
        here = torch.empty(0, dtype=torch.uint8, device=self.device).set_(self)
        return there.copy_(here, non_blocking=non_blocking).untyped_storage()

    def to(self: Any, *, device: Any, non_blocking: bool = False) -> Any:
        device = torch.device(device)
        if device.type != "cuda" or self.device == device:
            return move_elsewhere(self, device=device, non_blocking=non_blocking)
        return copied(self, device, non_blocking)

    def clone(self: Any) -> Any:
        return copied(self, self.device) if self.device.type == "cuda" else clone_elsewhere(self)

    def resize_(self: Any, size: int) -> Any:
        if self.device.type != "cuda":
            return resize_elsewhere(self, size)
        native.resize_storage(self, size)
        return self

    replace(storage, resize_=resize_, to=to, clone=clone)


def _install_missing_kernels() -> None:
    select = torch.Tensor.index_select

    def index_select(self: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
        """CUDA's kernel takes unsigned 16-bit numbers; the CPU's does not."""
        if self.dtype != torch.uint16:
            return select(self, dim, index)
        return select(self.view(torch.int16), dim, index).view(torch.uint16)

    replace(torch.Tensor, index_select=index_select)
