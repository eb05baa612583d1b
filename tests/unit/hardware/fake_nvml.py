"""A stand-in for pynvml: questions by name and their answers; what has no answer is not supported."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

GIB = 2**30


class NVMLError(Exception):
    pass


@dataclass(frozen=True)
class Handle:
    """What the library gives for a GPU; true, whatever its index."""

    index: int


class FakeNvml:
    """`answers` are values, or functions of the arguments, with the index of a GPU in place of its handle."""

    NVMLError = NVMLError
    NVML_NVLINK_MAX_LINKS = 6
    nvmlMemory_v2 = 2  # noqa: N815 - the library's own names

    def __init__(self, num_gpus: int, answers: dict[str, Any]) -> None:
        self._answers = {"nvmlDeviceGetCount": num_gpus, "nvmlDeviceGetHandleByIndex": Handle} | answers
        self.num_open = 0

    def nvmlInit(self) -> None:  # noqa: N802
        self.num_open += 1
        self._answer("nvmlInit")

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.num_open -= 1
        self._answer("nvmlShutdown")

    def _answer(self, name: str, *arguments: Any) -> Any:
        value = self._answers.get(name, None if name in ("nvmlInit", "nvmlShutdown") else NVMLError("Not Supported"))
        if isinstance(value, Exception):
            raise value
        if not callable(value):
            return value
        return value(*(one.index if isinstance(one, Handle) else one for one in arguments))

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if not name.startswith("nvml"):
            raise AttributeError(name)
        return lambda *arguments, **_: self._answer(name, *arguments)


_REMOTE: dict[int, list[tuple[str, int]]] = {
    0: [("00000000:07:00.0", 0), ("00000000:07:00.0", 0), ("00000000:85:00.0", 0)],
    1: [("00000000:06:00.0", 0), ("00000000:06:00.0", 0)],
    2: [("00000000:C4:00.0", 2)] * 4,
    3: [("00000000:C4:00.0", 2)] * 3 + [("", 255)],
}
"""GPUs 0 and 1 are joined by two NVLinks, and 0 has one more to a GPU that this container does not show; 2 and 3 have
four links each to a switch."""


def _remote(gpu: int, link: int) -> SimpleNamespace:
    bus_id = _REMOTE[gpu][link][0]
    if not bus_id:
        raise NVMLError("Not Supported")
    return SimpleNamespace(busId=bus_id)


FOUR_GPUS: dict[str, Any] = {
    "nvmlDeviceGetName": lambda gpu: f"NVIDIA A100 {gpu}",
    "nvmlDeviceGetUUID": lambda gpu: f"GPU-{gpu}",
    "nvmlDeviceGetPciInfo": lambda gpu: SimpleNamespace(busId=f"00000000:0{6 + gpu}:00.0"),
    "nvmlDeviceGetMemoryInfo": lambda gpu, *_: SimpleNamespace(total=40 * GIB, used=31 * GIB * (gpu == 1)),
    "nvmlDeviceGetUtilizationRates": lambda gpu: SimpleNamespace(gpu=62 * (gpu == 1)),
    "nvmlDeviceGetMigMode": lambda gpu: [int(gpu == 3), 0],
    "nvmlDeviceGetNvLinkState": lambda gpu, link: int(link < len(_REMOTE[gpu])),
    "nvmlDeviceGetNvLinkRemoteDeviceType": lambda gpu, link: _REMOTE[gpu][link][1],
    "nvmlDeviceGetNvLinkRemotePciInfo": _remote,
    "nvmlDeviceGetTopologyCommonAncestor": lambda one, other: 20 if one + other == 3 else 50,
}

HEALTHY: dict[str, Any] = {
    "nvmlSystemGetDriverVersion": "570.124.06",
    "nvmlDeviceGetName": "NVIDIA H100 80GB HBM3",
    "nvmlDeviceGetEccMode": [1, 1],
    "nvmlDeviceGetTotalEccErrors": 0,
    "nvmlDeviceGetRemappedRows": [0, 0, 0, 0],
    "nvmlDeviceGetCurrentClocksThrottleReasons": 1,
    "nvmlDeviceGetPowerManagementLimit": 700_000,
    "nvmlDeviceGetPowerManagementDefaultLimit": 700_000,
    "nvmlDeviceGetCurrPcieLinkWidth": 16,
    "nvmlDeviceGetMaxPcieLinkWidth": 16,
    "nvmlDeviceGetPersistenceMode": 1,
    "nvmlDeviceGetComputeMode": 0,
    "nvmlDeviceGetMigMode": [0, 0],
    "nvmlDeviceGetP2PStatus": 0,
}
"""What a GPU in good health answers."""
