"""The driver's library, from a fake of it."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.hardware.nvml import Gpus, busy, gpu_use, read_gpus, short_bus_id
from paceline.spec.run_status import GpuUse


class FakeNvml:
    """Answers as pynvml does for four GPUs; a question in `mute` has no answer.

    GPUs 0 and 1 are joined by two NVLinks, and 0 has one more to a GPU that this container does not show. 2 and 3 have
    four links each to a switch.
    """

    class NVMLError(Exception):
        pass

    NVML_NVLINK_MAX_LINKS = 6
    nvmlMemory_v2 = 2  # noqa: N815

    def __init__(self, mute: set[str] | None = None) -> None:
        self.mute = mute or set()
        self.is_open = False
        self.links: dict[int, list[tuple[str, int]]] = {
            0: [("00000000:07:00.0", 0), ("00000000:07:00.0", 0), ("00000000:85:00.0", 0)],
            1: [("00000000:06:00.0", 0), ("00000000:06:00.0", 0)],
            2: [("00000000:C4:00.0", 2)] * 4,
            3: [("00000000:C4:00.0", 2)] * 3 + [("", 255)],
        }

    def __getattr__(self, name: str) -> Any:
        answers: dict[str, Any] = {
            "nvmlInit": self._open,
            "nvmlShutdown": self._close,
            "nvmlDeviceGetCount": lambda: 4,
            "nvmlDeviceGetHandleByIndex": lambda index: ("GPU", index),
            "nvmlDeviceGetName": lambda handle: f"NVIDIA A100 {handle[1]}",
            "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle[1]}".encode(),
            "nvmlDeviceGetPciInfo": lambda handle: SimpleNamespace(busId=f"00000000:0{6 + handle[1]}:00.0"),
            "nvmlDeviceGetMemoryInfo": lambda handle, version=None: SimpleNamespace(
                total=40 * 2**30, used=(31 * 2**30 if handle[1] == 1 else 0) + (0 if version else 2**29)
            ),
            "nvmlDeviceGetUtilizationRates": lambda handle: SimpleNamespace(gpu=62 if handle[1] == 1 else 0),
            "nvmlDeviceGetComputeRunningProcesses": lambda handle: (
                [SimpleNamespace(pid=100, usedGpuMemory=3 * 2**30)] if handle[1] == 1 else []
            ),
            "nvmlDeviceGetMigMode": lambda handle: [1 if handle[1] == 3 else 0, 0],
            "nvmlDeviceGetNvLinkState": lambda handle, link: int(link < len(self.links[handle[1]])),
            "nvmlDeviceGetNvLinkRemoteDeviceType": lambda handle, link: self.links[handle[1]][link][1],
            "nvmlDeviceGetNvLinkRemotePciInfo": self._remote,
            "nvmlDeviceGetTopologyCommonAncestor": lambda one, other: 20 if one[1] + other[1] == 3 else 50,
        }
        if name not in answers:
            raise AttributeError(name)
        if name in self.mute:
            return self._refuse
        return answers[name]

    def _refuse(self, *_: Any) -> Any:
        raise self.NVMLError("Not Supported")

    def _remote(self, handle: tuple[str, int], link: int) -> Any:
        bus_id = self.links[handle[1]][link][0]
        return SimpleNamespace(busId=bus_id) if bus_id else self._refuse()

    def _open(self) -> None:
        self.is_open = True

    def _close(self) -> None:
        self.is_open = False


def test_what_processes_use_of_gpus() -> None:
    assert gpu_use(FakeNvml()) == {100: GpuUse(1, 3 * 2**30, 0.62)}
    assert gpu_use(FakeNvml({"nvmlDeviceGetUtilizationRates"})) == {100: GpuUse(1, 3 * 2**30, None)}
    assert gpu_use(FakeNvml({"nvmlDeviceGetComputeRunningProcesses"})) == {}
    assert gpu_use(FakeNvml({"nvmlInit"})) == {}


def test_all_answers() -> None:
    fake = FakeNvml()
    gpus = read_gpus(fake)
    assert not fake.is_open
    assert [device.name for device in gpus.devices] == [f"NVIDIA A100 {i}" for i in range(4)]
    assert [device.uuid for device in gpus.devices] == ["GPU-0", "GPU-1", "GPU-2", "GPU-3"]
    assert [device.pci_bus_id for device in gpus.devices] == [f"0000:0{i}:00.0" for i in (6, 7, 8, 9)]
    assert {device.memory_bytes for device in gpus.devices} == {40 * 2**30}
    assert [device.busy for device in gpus.devices] == ["", "62 % busy, 31.0 GiB in use", "", ""]
    assert gpus.labels == {(0, 1): "NV2", (2, 3): "NV4", (0, 3): "PXB", (1, 2): "PXB", (0, 2): "SYS", (1, 3): "SYS"}
    assert gpus.notes == ("GPU3 is in MIG mode: its slices have no links to other GPUs.",)


@pytest.mark.parametrize(
    "mute",
    [
        "nvmlDeviceGetName",
        "nvmlDeviceGetUUID",
        "nvmlDeviceGetPciInfo",
        "nvmlDeviceGetMemoryInfo",
        "nvmlDeviceGetUtilizationRates",
        "nvmlDeviceGetMigMode",
        "nvmlDeviceGetNvLinkState",
        "nvmlDeviceGetNvLinkRemoteDeviceType",
        "nvmlDeviceGetNvLinkRemotePciInfo",
        "nvmlDeviceGetTopologyCommonAncestor",
        "nvmlShutdown",
    ],
)
def test_one_question_without_an_answer_spoils_no_other(mute: str) -> None:
    whole, gpus = read_gpus(FakeNvml()), read_gpus(FakeNvml({mute}))
    assert [device.index for device in gpus.devices] == [0, 1, 2, 3]
    same = [
        getattr(one, name) == getattr(other, name)
        for one, other in zip(whole.devices, gpus.devices, strict=True)
        for name in ("name", "uuid", "pci_bus_id", "memory_bytes", "busy")
    ]
    assert same.count(False) <= 5  # one field of four GPUs; memory is also half of one sentence
    if mute == "nvmlDeviceGetNvLinkState":
        assert gpus.labels[0, 1] == "SYS"
    if mute == "nvmlDeviceGetMemoryInfo":
        assert gpus.devices[1].busy == "62 % busy"


@pytest.mark.parametrize("mute", ["nvmlInit", "nvmlDeviceGetCount"])
def test_a_driver_that_does_not_answer(mute: str) -> None:
    assert read_gpus(FakeNvml({mute})).devices == ()


def test_gpus_that_cannot_be_opened_are_named() -> None:
    gpus = read_gpus(FakeNvml({"nvmlDeviceGetHandleByIndex"}))
    assert gpus.devices == ()
    assert len(gpus.notes) == 4 and "GPU2" in gpus.notes[2]


def test_without_the_python_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert read_gpus() == Gpus()


def test_with_the_real_module_where_there_is_no_driver() -> None:
    pynvml = pytest.importorskip("pynvml")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        assert read_gpus() == Gpus()
    else:
        pynvml.nvmlShutdown()
        assert read_gpus().devices


@pytest.mark.parametrize(
    ("percent", "used_bytes", "sentence"),
    [
        (0, 0, ""),
        (9, 2**30 - 1, ""),
        (None, None, ""),
        (10, 0, "10 % busy, 0.0 GiB in use"),
        (0, 2**30, "0 % busy, 1.0 GiB in use"),
        (None, 3 * 2**30, "3.0 GiB in use"),
        (50, None, "50 % busy"),
    ],
)
def test_busy(percent: int | None, used_bytes: int | None, sentence: str) -> None:
    assert busy(percent, used_bytes) == sentence


def test_bus_ids_as_sysfs_has_them() -> None:
    assert short_bus_id("00000000:3B:00.0") == "0000:3b:00.0"
    assert short_bus_id("0000:3b:00.0") == "0000:3b:00.0"
    assert short_bus_id("00010000:3B:00.0") == "00010000:3b:00.0"
    assert short_bus_id("00000001:3B:00.0") == "0001:3b:00.0"
    assert short_bus_id("") == ""
