"""What the doctor says about facts of every kind: recorded outputs, and a stand-in for the GPU library."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.hardware.checks import (
    between_nodes,
    gpu_facts,
    gpu_table,
    load_facts,
    network_table,
    pcie_facts,
    system_facts,
    system_table,
)
from paceline.hardware.checks import network_facts as network
from paceline.hardware.checks.between_nodes import check_nodes
from paceline.hardware.checks.engine import Check, Finding, error, filled_in, warning, words
from paceline.hardware.checks.gpu_facts import GpuFacts, GpusFacts, collect_gpus
from paceline.hardware.checks.network_facts import Interface, Lookup, NetworkFacts
from paceline.hardware.checks.node_checks import check_node
from paceline.hardware.checks.node_facts import NodeFacts, node_facts
from paceline.hardware.checks.pcie_facts import PcieFacts
from paceline.hardware.checks.reachability import ReachTest, answer_until, try_to_reach
from paceline.hardware.checks.storage_facts import StorageFacts, collect_storage
from paceline.hardware.checks.survey import Survey
from paceline.hardware.checks.system_facts import ProcessLimit, SystemFacts
from paceline.spec import MachineLoad

CUDA_12 = {"torch": "2.9.0+cu126", "CUDA": "12.6", "paceline": "0.1.0", "python": "3.11.7", "NCCL": "2.27.5"}


def levels(findings: list[Finding]) -> list[str]:
    return [finding.level for finding in findings]


def only(findings: list[Finding], level: str, *patterns: str) -> Finding:
    """The one finding there is, which has the level and whose sentences have the patterns."""
    (finding,) = findings
    assert finding.level == level
    for pattern in patterns:
        assert re.search(pattern, f"{finding.what} | {finding.fix}"), finding
    return finding


def found(check: str, **facts: Any) -> list[Finding]:
    """What one check finds on a node of which nothing but `facts` is known."""
    return [finding for finding in check_node(NodeFacts("here", **facts)) if finding.check == check]


# --- the engine ---


def test_a_check_names_every_problem_until_one_hides_the_others() -> None:
    check = Check[dict[str, int], complex](
        "numbers of {numbers}",
        lambda facts: [complex(n) for n in facts.values()] or None,
        "All {0} are fine.".format,
        warning(lambda n: n.real > 1, "{real:g} is large.", "halve it", hides_others=False),
        error(lambda n: n.real > 2, "{real:g} is too large.", lambda n: f"take {n.real / 2:g}"),
        error(lambda n: n.real > 2, "never said", ""),
        named="number {real:g}",
    )

    class Facts(dict[str, int]):
        numbers = "mine"

    assert check.findings(Facts()) == []
    assert check.findings(Facts(a=1)) == [Finding("ok", "numbers of mine", "All {'a': 1} are fine.")]
    assert check.findings(Facts(a=1, b=2, c=4)) == [
        Finding("warning", "number 2", "2 is large.", "halve it"),
        Finding("warning", "number 4", "4 is large.", "halve it"),
        Finding("error", "number 4", "4 is too large.", "take 2"),
    ]


# --- processors ---


def test_the_load_of_the_processors_is_what_others_and_the_host_take(tmp_path: Path) -> None:
    idle = MachineLoad(8, other_cores=0.3, stolen_cores=0.0)
    only(found("cpu load", system=SystemFacts(load=idle)), "ok")
    busy = dataclasses.replace(idle, other_cores=3.0)
    only(found("cpu load", system=SystemFacts(load=busy)), "warning", r"use 3\.0 of 8 cores", "top")
    stolen = dataclasses.replace(busy, stolen_cores=2.0)
    assert levels(found("cpu load", system=SystemFacts(load=stolen))) == ["warning", "warning"]
    assert found("cpu load", system=SystemFacts(load=None)) == []


def test_the_load_is_what_the_kernel_counts_meanwhile(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    cores, ticks = sorted(os.sched_getaffinity(0)), os.sysconf("SC_CLK_TCK")

    def write(busy_s: float, stolen_s: float) -> None:
        rows = [f"cpu{core} {busy_s * ticks:.0f} 0 0 0 0 0 0 {stolen_s * ticks:.0f} 0 0" for core in cores]
        stat.write_text("\n".join(rows) + "\n", encoding="utf-8")

    write(10, 5)
    before = load_facts.cpu_times(stat)
    write(13, 6)
    after = load_facts.cpu_times(stat)
    assert before is not None and after is not None
    assert after.busy_s - before.busy_s == pytest.approx(3 * len(cores))
    assert after.stolen_s - before.stolen_s == pytest.approx(len(cores))
    still = load_facts.collect_load(0.01, stat)
    assert still == MachineLoad(len(cores), 0.0, 0.0)
    assert load_facts.collect_load(0.01, tmp_path / "nothing") is None


# --- GPUs ---


class NVMLError(Exception):
    pass


class FakeNvml:
    """As pynvml: functions by name; what is not in `answers` is not supported."""

    NVMLError = NVMLError

    def __init__(self, num_gpus: int, **answers: Any) -> None:
        self._num_gpus = num_gpus
        self._answers = answers
        self.num_open = 0

    def nvmlInit(self) -> None:  # noqa: N802 - the library's own names
        self.num_open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.num_open -= 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return self._num_gpus

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def answer(*arguments: Any) -> Any:
            if name not in self._answers:
                raise NVMLError("Not Supported")
            value = self._answers[name]
            return value(*arguments) if callable(value) else value

        return answer


HEALTHY: dict[str, Any] = {
    "nvmlSystemGetDriverVersion": b"570.124.06",
    "nvmlDeviceGetName": "NVIDIA H100 80GB HBM3",
    "nvmlDeviceGetEccMode": [1, 1],
    "nvmlDeviceGetTotalEccErrors": 0,
    "nvmlDeviceGetRemappedRows": [0, 0, 0, 0],
    "nvmlDeviceGetCurrentClocksThrottleReasons": 1,
    "nvmlDeviceGetPowerManagementLimit": 700000,
    "nvmlDeviceGetPowerManagementDefaultLimit": 700000,
    "nvmlDeviceGetCurrPcieLinkWidth": 16,
    "nvmlDeviceGetMaxPcieLinkWidth": 16,
    "nvmlDeviceGetPersistenceMode": 1,
    "nvmlDeviceGetComputeMode": 0,
    "nvmlDeviceGetMigMode": [0, 0],
    "nvmlDeviceGetP2PStatus": 0,
}


GPU_CHECKS = {check.name for check in gpu_table.GPU_CHECKS}


def about_gpus(gpus: GpusFacts, versions: dict[str, str] = CUDA_12) -> list[Finding]:
    findings = check_node(NodeFacts("here", gpus=gpus, system=SystemFacts(versions=versions)))
    return [finding for finding in findings if finding.check in GPU_CHECKS]


def test_healthy_gpus_are_all_fine() -> None:
    nvml = FakeNvml(4, **HEALTHY)
    facts = collect_gpus(nvml, num_on_bus=4)
    assert nvml.num_open == 0
    assert (facts.driver, len(facts.gpus), facts.gpus[1].name) == ("570.124.06", 4, "NVIDIA H100 80GB HBM3")
    assert facts.p2p == dict.fromkeys(("0-1", "0-2", "0-3", "1-2", "1-3", "2-3"), 0)
    assert levels(about_gpus(dataclasses.replace(facts, xids={}, torch_sees=4))) == ["ok"] * 8


@pytest.mark.parametrize(
    ("question", "answer", "level", "pattern"),
    [
        ("nvmlDeviceGetTotalEccErrors", 2, "error", r"GPU 0 had 2 uncorrectable memory errors.*--gpu-reset -i 0"),
        ("nvmlDeviceGetRemappedRows", [0, 1, 1, 0], "error", "GPU 0 has broken memory that its next reset"),
        ("nvmlDeviceGetRemappedRows", [0, 1, 1, 1], "error", "no spare memory row"),
        ("nvmlDeviceGetRetiredPagesPendingStatus", 1, "error", "next reset"),
        ("nvmlDeviceGetRetiredPages", list(range(30)), "error", "retired 60 memory pages"),  # 30 of either cause
        ("nvmlDeviceGetEccMode", [0, 0], "warning", "could correct memory errors, but does not"),
        ("nvmlDeviceGetCurrentClocksThrottleReasons", 0x60, "warning", "too hot and it is so hot"),
        ("nvmlDeviceGetCurrentClocksThrottleReasons", 0x02, "warning", "clocks of GPU 0 are held down"),
        ("nvmlDeviceGetPowerManagementLimit", 300000, "warning", "300 W, less than its usual 700 W.*-pl 700"),
        ("nvmlDeviceGetCurrPcieLinkWidth", 8, "warning", "8 of its 16 PCIe lanes"),
        ("nvmlDeviceGetPersistenceMode", 0, "warning", "-pm 1"),
        ("nvmlDeviceGetComputeMode", 2, "error", "lets no program in"),
        ("nvmlDeviceGetMigMode", [1, 1], "warning", "MIG"),
        ("nvmlSystemGetDriverVersion", "470.57", "error", "too old for torch's CUDA 12.6, which needs 525"),
    ],
)
def test_one_thing_wrong_with_a_gpu_is_the_one_finding(question: str, answer: Any, level: str, pattern: str) -> None:
    facts = collect_gpus(FakeNvml(1, **{**HEALTHY, question: answer}), num_on_bus=1)
    only([f for f in about_gpus(facts) if f.level != "ok"], level, pattern)


@pytest.mark.parametrize("reasons", [0x0, 0x1, 0x4, 0x10, 0x100])
def test_idle_and_power_capped_gpus_are_fine(reasons: int) -> None:
    only(found("gpu speed", gpus=GpusFacts(gpus=(GpuFacts(0, throttle_reasons=reasons),))), "ok")


def test_a_gpu_that_tells_nothing_of_itself_is_not_accused() -> None:
    facts = collect_gpus(FakeNvml(2), num_on_bus=2)
    assert facts.gpus[0] == GpuFacts(0)
    assert facts.p2p is None
    assert set(levels(about_gpus(facts))) == {"ok"}


def test_pairs_without_peer_access_are_named() -> None:
    status = {(0, 1): 0, (0, 2): 3, (1, 2): 3}
    answers = {**HEALTHY, "nvmlDeviceGetP2PStatus": lambda one, other, _kind: status[one, other]}
    gpus = collect_gpus(FakeNvml(3, **answers))
    only(
        found("peer-to-peer", gpus=gpus),
        "warning",
        "GPUs 0-2 and 1-2 cannot reach",
        "places on the PCIe",
        "topo --pick",
    )


def test_a_driver_that_does_not_answer_is_an_error_only_where_there_are_gpus() -> None:
    nvml = FakeNvml(0)
    nvml.nvmlInit = lambda: (_ for _ in ()).throw(NVMLError("Driver Not Loaded"))  # type: ignore[method-assign]
    only(about_gpus(collect_gpus(nvml), {}), "ok", "no NVIDIA GPU")
    only(about_gpus(collect_gpus(nvml, 2), {}), "error", "2 NVIDIA GPUs are on the PCI bus.*Driver Not")


def test_one_gpu_fallen_off_the_bus() -> None:
    gpus = GpusFacts(driver="570", num_on_bus=8, gpus=(GpuFacts(0),) * 7)
    only(found("gpu driver", gpus=gpus), "error", "8 NVIDIA GPUs are on the PCI bus, but the driver knows 7")


def test_torch_without_cuda_is_an_error_beside_gpus() -> None:
    gpus = GpusFacts(driver="570.1", gpus=(GpuFacts(0),) * 8, torch_sees=0)
    system = SystemFacts(versions={"torch": "2.9.0+cpu"})
    only(found("driver and CUDA", gpus=gpus, system=system), "error", r"torch 2.9.0\+cpu.*CPU alone")
    only(found("torch and GPUs", gpus=gpus), "error", "none of 8")


def test_xids_are_counted_and_only_hardware_is_accused() -> None:
    log = (
        "[1.0] NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.\n[2.0] NVRM: Xid (PCI:0): 31, x\n" * 2
    )
    assert gpu_facts.count_xids(log) == {"79": 2, "31": 2}

    def of(xids: dict[str, int] | None) -> list[Finding]:
        return found("gpu errors", gpus=GpusFacts(gpus=(GpuFacts(0),), xids=xids))

    only(of({"79": 2, "31": 2}), "warning", r"boot: Xid 79 \(fallen off the bus\)\.")
    only(of({"31": 2}), "ok")
    assert of(None) == []


def test_the_stand_in_speaks_as_the_library_does() -> None:
    pynvml = pytest.importorskip("pynvml")
    source = Path(gpu_facts.__file__).read_text()
    asked = set(re.findall(r'"(nvml[A-Z]\w+)"', source)) | {name for name in vars(FakeNvml) if name.startswith("nvml")}
    assert len(asked) > 15
    assert [name for name in {*asked, *HEALTHY} if not hasattr(pynvml, name)] == []
    assert gpu_facts.UNCORRECTED == pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
    assert gpu_facts.VOLATILE == pynvml.NVML_VOLATILE_ECC
    assert gpu_facts.PROHIBITED == pynvml.NVML_COMPUTEMODE_PROHIBITED
    assert len(gpu_facts.RETIREMENT_CAUSES) == pynvml.NVML_PAGE_RETIREMENT_CAUSE_COUNT
    assert [*gpu_table.THROTTLING, gpu_table.HELD_CLOCKS] == [
        pynvml.nvmlClocksThrottleReasonHwSlowdown,
        pynvml.nvmlClocksThrottleReasonSwThermalSlowdown,
        pynvml.nvmlClocksThrottleReasonHwThermalSlowdown,
        pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown,
        pynvml.nvmlClocksThrottleReasonApplicationsClocksSetting,
    ]
    assert [*gpu_table.P2P] == [
        pynvml.NVML_P2P_STATUS_CHIPSET_NOT_SUPPORTED,
        pynvml.NVML_P2P_STATUS_GPU_NOT_SUPPORTED,
        pynvml.NVML_P2P_STATUS_IOH_TOPOLOGY_NOT_SUPPORTED,
        pynvml.NVML_P2P_STATUS_DISABLED_BY_REGKEY,
        pynvml.NVML_P2P_STATUS_NOT_SUPPORTED,
        pynvml.NVML_P2P_STATUS_UNKNOWN,
    ]


# --- PCIe ---

LSPCI = """\
00:01.0 PCI bridge: Intel Corporation Sky Lake-E PCI Express Root Port A (rev 04) (prog-if 00 [Normal decode])
\tControl: I/O+ Mem+ BusMaster+
\tCapabilities: [110 v1] Access Control Services
\t\tACSCap:\tSrcValid+ TransBlk+ ReqRedir+ CmpltRedir+ UpstreamFwd+ EgressCtrl- DirectTrans-
\t\tACSCtl:\tSrcValid{acs} TransBlk- ReqRedir{acs} CmpltRedir{acs} UpstreamFwd{acs} EgressCtrl- DirectTrans-

3b:00.0 3D controller: NVIDIA Corporation GH100 [H100 SXM5 80GB] (rev a1)
\tCapabilities: [d0 v1] Access Control Services
\t\tACSCtl:\tSrcValid+ TransBlk-
"""


def test_access_control_counts_at_bridges_that_switch_it_on() -> None:
    assert pcie_facts.acs_bridges(LSPCI.format(acs="+")) == ("00:01.0",)
    assert pcie_facts.acs_bridges(LSPCI.format(acs="-")) == ()
    assert pcie_facts.acs_bridges("00:01.0 PCI bridge: x\n\tCapabilities: <access denied>\n") is None
    assert pcie_facts.acs_bridges(None) is None
    only(
        found("PCIe ACS", pcie=PcieFacts(("00:01.0",), num_gpus=2)),
        "warning",
        r"setpci -s 00:01.0 ECAP_ACS\+0x6.w=0000",
    )
    only(found("PCIe ACS", pcie=PcieFacts(num_gpus=2)), "warning", "cannot be seen")


@pytest.mark.parametrize(
    ("arguments", "iommus", "domains", "level"),
    [
        ("quiet intel_iommu=on", ["dmar0"], {}, "warning"),
        ("quiet intel_iommu=on iommu=pt", ["dmar0"], {}, "ok"),
        ("quiet intel_iommu=on", [], {}, "ok"),  # switched off in the BIOS
        ("quiet", ["ivhd0"], {"0000:3b:00.0": "identity"}, "ok"),
        ("quiet", ["ivhd0"], {"0000:3b:00.0": "DMA-FQ"}, "warning"),
    ],
)
def test_address_translation(arguments: str, iommus: list[str], domains: dict[str, str], level: str) -> None:
    facts = PcieFacts(None, arguments, tuple(iommus), domains, num_gpus=2)
    finding = only(found("IOMMU", pcie=facts), level)
    assert level == "ok" or ("amd_iommu=off" if "ivhd0" in iommus else "intel_iommu=off") in finding.fix


def test_one_gpu_or_a_virtual_machine_has_no_such_trap() -> None:
    trapped = PcieFacts(acs_bridges=("00:01.0",), iommus=("dmar0",), num_gpus=2)

    def of(pcie: PcieFacts) -> list[Finding]:
        return [finding for check in gpu_table.PCIE_CHECKS for finding in found(check.name, pcie=pcie)]

    assert levels(of(trapped)) == ["warning", "warning"]
    only(of(dataclasses.replace(trapped, num_gpus=1)), "ok")
    only(of(dataclasses.replace(trapped, is_virtual=True)), "ok")


def test_gpus_are_found_in_sysfs(tmp_path: Path) -> None:
    for name, vendor, kind in (("a", "0x10de", "0x030200"), ("b", "0x10de", "0x040300"), ("c", "0x8086", "0x030000")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "vendor").write_text(f"{vendor}\n")
        (tmp_path / name / "class").write_text(f"{kind}\n")
    assert [gpu.name for gpu in pcie_facts.nvidia_gpus(tmp_path)] == ["a"]


# --- system ---


@pytest.mark.parametrize(
    ("own", "files", "cores"),
    [
        ("0::/job/me", {"job/cpu.max": "200000 100000", "job/me/cpu.max": "max 100000"}, 2.0),
        ("0::/job/me", {"job/me/cpu.max": "50000 100000", "job/cpu.max": "200000 100000"}, 0.5),
        ("0::/elsewhere", {"cpu.max": "150000 100000"}, 1.5),
        ("0::/", {"cpu.max": "max 100000"}, None),
        ("4:cpu,cpuacct:/me\n0::/", {"cpu/me/cpu.cfs_quota_us": "300000", "cpu/me/cpu.cfs_period_us": "100000"}, 3.0),
        ("4:cpu:/me", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ("", {}, None),
    ],
)
def test_the_quota_of_control_groups(own: str, files: dict[str, str], cores: float | None, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert system_facts.quota_cores(own, tmp_path) == cores


def test_processor_time_less_than_what_is_visible() -> None:
    def quota(num_cores: int, quota_cores: float | None) -> list[Finding]:
        return found("cpu quota", system=SystemFacts(num_cores=num_cores, quota_cores=quota_cores))

    only(quota(64, 4.0), "warning", "time of 4 cores, but 64 are visible", "taskset -c 0-3")
    only(quota(64, 0.5), "warning", "taskset -c 0-0")
    only(quota(4, None), "ok")
    shared = SystemFacts(num_cores=64, threads_per_core=2)
    only(found("hyper-threads", system=shared), "warning", "at most 32 workers")
    only(found("hyper-threads", system=shared, gpus=GpusFacts(gpus=(GpuFacts(0),))), "ok")
    slow = SystemFacts(governor="powersave", scaling_driver="acpi-cpufreq")
    only(found("cpu governor", system=slow), "warning", "cpupower")
    only(found("cpu governor", system=dataclasses.replace(slow, scaling_driver="intel_pstate")), "ok")


@pytest.mark.parametrize(
    ("limit", "level", "fix"),
    [
        (ProcessLimit(1024, 1024), "warning", "limits.conf"),
        (ProcessLimit(1024, 524288), "warning", "^ulimit -n 524288"),
        (ProcessLimit(1024, None), "warning", "^ulimit -n 4096"),
        (ProcessLimit(65536, 65536), "ok", ""),
        (ProcessLimit(None, None), "ok", ""),
    ],
)
def test_open_files(limit: ProcessLimit, level: str, fix: str) -> None:
    finding = only(found("ulimit nofile", system=SystemFacts(limits={"nofile": limit})), level)
    assert re.search(fix, finding.fix)


def test_locked_memory_matters_to_rdma_alone() -> None:
    def of(limit: ProcessLimit, **rdma_ports: str) -> list[Finding]:
        system, ports = SystemFacts(limits={"memlock": limit}), NetworkFacts(rdma_ports=rdma_ports)
        return found("ulimit memlock", system=system, network=ports)

    only(of(ProcessLimit(65536, 65536)), "ok")
    only(of(ProcessLimit(65536, 65536), mlx5_0="ACTIVE"), "error", "64 KiB", "memlock=-1")
    only(of(ProcessLimit(65536, None), mlx5_0="ACTIVE"), "error", "ulimit -l unlimited")
    only(of(ProcessLimit(None, None), mlx5_0="ACTIVE"), "ok")


@given(st.text(max_size=40))
def test_whatever_the_kernel_lists_is_counted_or_zero(text: str) -> None:
    assert system_facts.count_cpus(text) >= 0


def test_siblings_are_counted() -> None:
    assert [system_facts.count_cpus(text) for text in ("0", "0,64", "0-1", "")] == [1, 2, 2, 0]


def test_this_python_has_versions_of_what_trains() -> None:
    import torch

    versions = system_facts.collect_versions()
    assert versions["torch"] == torch.__version__
    assert versions.get("CUDA") == torch.version.cuda


# --- storage ---


@pytest.mark.parametrize(
    ("total", "free", "level", "pattern"),
    [
        (64 * 2**20, 64 * 2**20, "warning", "Bus error.*--shm-size"),
        (64 * 2**20, 2**20, "error", r"1 MiB free of 64 MiB.*--shm-size"),
        (64 * 2**30, 2**20, "error", "ls -lS /dev/shm"),
        (64 * 2**30, 32 * 2**30, "ok", "32 GiB"),
        (None, None, "warning", "no /dev/shm"),
    ],
)
def test_shared_memory(total: int | None, free: int | None, level: str, pattern: str) -> None:
    only(found("/dev/shm", storage=StorageFacts(total, free)), level, pattern)


def test_the_run_folder(tmp_path: Path) -> None:
    facts = collect_storage(tmp_path / "not" / "yet", shm=tmp_path)
    assert (facts.folder, facts.is_writable) == (str(tmp_path / "not" / "yet"), True)
    assert facts.free_bytes

    def of(free_bytes: int, is_writable: bool = True) -> list[Finding]:
        storage = StorageFacts(folder="/runs", is_writable=is_writable, free_bytes=free_bytes)
        return found("run folder", storage=storage)

    only(of(2**20), "error", "1 MiB free")
    only(of(2**32), "warning")
    only(of(2**40), "ok")
    only(of(2**40, is_writable=False), "error", "--out")


# --- network ---

ETH = Interface("eth0", True, 1500, ("10.0.0.1",))


def of_network(check: str, num_nodes: int = 1, **facts: Any) -> list[Finding]:
    peers = tuple(Lookup(f"peer{number}", ("10.0.0.9",)) for number in range(1, num_nodes))
    return found(check, network=NetworkFacts(interfaces=(ETH,), **{"peers": peers, **facts}))


def test_the_own_name_that_means_loopback_is_a_trap_between_nodes_only() -> None:
    trapped = Lookup("gpu1", ("127.0.1.1",))
    only(of_network("own name", own_name=trapped), "ok")
    only(of_network("own name", 2, own_name=trapped), "error", "replace 127.0.1.1 by 10.0.0.1")
    nameless = Lookup("gpu1", problem="Name or service not known")
    only(of_network("own name", own_name=nameless), "warning", "10.0.0.1 gpu1")
    only(of_network("own name", 2, own_name=nameless), "error")


def test_slow_lookups_are_named_one_by_one() -> None:
    slow = Lookup("gpu1", ("10.0.0.1",), forward_s=0.01, reverse_s=5.02)
    only(of_network("own name", 2, own_name=slow), "warning", "5.0 s to find the name of 10.0.0.1", "/etc/hosts")
    both = dataclasses.replace(slow, forward_s=10.0)
    assert levels(of_network("own name", 2, own_name=both)) == ["warning", "warning"]
    assert levels(of_network("way to gpu1", peers=(both,))) == ["warning", "warning", "error"]


@pytest.mark.parametrize(
    ("interface", "level", "pattern"),
    [
        ("eth0", "ok", "eth0 leads to gpu2"),
        ("", "error", "ip route get 10.0.0.2"),
        ("lo", "error", "means this node itself"),
        ("docker0", "error", "network of containers"),
    ],
)
def test_the_way_to_a_peer(interface: str, level: str, pattern: str) -> None:
    peers = (Lookup("gpu2", ("10.0.0.2",)),)
    only(of_network("way to gpu2", peers=peers, routes={"gpu2": interface}), level, pattern)


def test_a_peer_without_an_address() -> None:
    peers = (Lookup("gpu2", problem="Name or service not known"),)
    only(of_network("way to gpu2", peers=peers), "error", "not known.*echo 'ADDRESS gpu2'")


@pytest.mark.parametrize(
    ("variables", "num_nodes", "level"),
    [
        ({}, 2, "ok"),
        ({"GLOO_SOCKET_IFNAME": "eth0"}, 2, "ok"),
        ({"GLOO_SOCKET_IFNAME": "eth1"}, 1, "error"),
        ({"GLOO_SOCKET_IFNAME": "lo"}, 1, "ok"),
        ({"GLOO_SOCKET_IFNAME": "lo"}, 2, "error"),
        ({"NCCL_SOCKET_IFNAME": "eth"}, 2, "ok"),
        ({"NCCL_SOCKET_IFNAME": "=eth"}, 2, "error"),
        ({"NCCL_SOCKET_IFNAME": "^docker,lo"}, 2, "ok"),
        ({"NCCL_SOCKET_IFNAME": "^eth"}, 2, "error"),
        ({"NCCL_SOCKET_IFNAME": "docker0"}, 2, "error"),
    ],
)
def test_interfaces_that_the_environment_names(variables: dict[str, str], num_nodes: int, level: str) -> None:
    interfaces = tuple(Interface(name, True, 1500) for name in ("docker0", "eth0", "lo"))
    peers = (Lookup("other", ("10.0.0.9",)),) if num_nodes > 1 else ()
    facts = NetworkFacts(interfaces, variables, peers=peers)
    name = "interface" if level == "ok" else next(iter(variables))
    only(found(name, network=facts), level)


@given(
    st.text(st.sampled_from("^=,eth0lo"), max_size=8),
    st.lists(st.sampled_from(["eth0", "eth1", "lo", "tun"]), unique=True),
)
def test_what_nccl_means_is_some_of_the_interfaces(value: str, names: list[str]) -> None:
    chosen = network.chosen_interfaces("NCCL_SOCKET_IFNAME", value, names)
    assert [name for name in names if name in chosen] == chosen
    if not value.startswith("^"):
        assert not set(chosen) & set(network.chosen_interfaces("NCCL_SOCKET_IFNAME", "^" + value, names))


def test_rdma_ports_from_sysfs(tmp_path: Path) -> None:
    for card, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN")):
        (tmp_path / card / "ports/1").mkdir(parents=True)
        (tmp_path / card / "ports/1/state").write_text(state + "\n")
    ports = network._rdma_ports(tmp_path)
    assert ports == {"mlx5_0/1": "ACTIVE", "mlx5_1/1": "DOWN"}
    only(
        of_network("RDMA ports", rdma_ports=ports),
        "warning",
        "1 of 2 RDMA ports carry nothing: mlx5_1/1",
        r"NCCL_IB_HCA=\^mlx5_1$",
    )


def test_a_port_in_use_is_noticed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert not network.is_free(taken.getsockname()[1])
    only(of_network("free ports", num_ports=28232, is_torchrun_port_free=False), "warning", "29500", "paceline launch")
    only(of_network("free ports", num_ports=100), "warning", "ip_local_port_range")
    assert levels(of_network("free ports", num_ports=100, is_torchrun_port_free=False)) == ["warning", "warning"]


def test_a_silent_name_server_is_left_behind() -> None:
    answers = threading.Event()
    seconds, answer = network._timed(lambda: answers.wait(30), 0.05)
    answers.set()
    assert isinstance(answer, OSError)
    assert 0.05 <= seconds < 20


def test_lookups_and_routes_on_this_machine() -> None:
    found = network.look_up("kim@127.0.0.1")
    assert (found.name, found.addresses) == ("kim@127.0.0.1", ("127.0.0.1",))
    assert network.route(found.addresses, []) == "lo"


# --- several nodes ---


def node(name: str, marker: str = "M", mtu: int = 1500, **versions: str) -> NodeFacts:
    interface = Interface("eth0", True, mtu, ("10.0.0.1",))
    return NodeFacts(
        name,
        system=SystemFacts(versions={**CUDA_12, **versions}),
        storage=StorageFacts(folder="/shared/runs", free_bytes=2**40, marker=marker),
        network=NetworkFacts(interfaces=(interface,), routes={"other": "eth0"}),
    )


REACHES = (ReachTest("a", "b", rtt_s=0.001, skew_s=0.002), ReachTest("b", "a", rtt_s=0.001, skew_s=-0.002))


def between(check: str, *reaches: ReachTest) -> list[Finding]:
    return [
        finding
        for finding in check_nodes(Survey({"a": node("a"), "b": node("b")}, reaches, "M"))
        if finding.check == check
    ]


def test_nodes_alike_are_fine() -> None:
    findings = check_nodes(Survey({"a": node("a"), "b": node("b", python="3.11.9")}, REACHES, "M"))
    assert set(levels(findings)) == {"ok"}
    assert len({finding.check for finding in findings}) == len(findings) == 7


@pytest.mark.parametrize(
    ("other", "level", "check", "pattern"),
    [
        (node("b", torch="2.8.0"), "error", "same versions", "torch is 2.9.0.cu126 on a, but 2.8.0 on b"),
        (node("b", python="3.12.1"), "error", "same versions", "python is 3.11 on a, but 3.12 on b"),
        (node("a"), "error", "host names", "a and b all call themselves a"),
        (node("b", mtu=9000), "warning", "MTU", "1500 on eth0 of a and 9000 on eth0 of b.*mtu 1500"),
        (node("b", marker=""), "warning", "shared folder", "b cannot see what this node writes into /shared/runs"),
        (dataclasses.replace(node("b"), gpus=GpusFacts(gpus=(GpuFacts(0, "T4"),))), "warning", "same GPUs", "1 x T4"),
    ],
)
def test_one_node_that_differs(other: NodeFacts, level: str, check: str, pattern: str) -> None:
    findings = [f for f in check_nodes(Survey({"a": node("a"), "b": other}, REACHES, "M")) if f.level != "ok"]
    assert only(findings, level, pattern).check == check


def test_closed_ports_and_wrong_clocks() -> None:
    closed = ReachTest("b", "a", problem="timed out")
    only(between("firewall", REACHES[0], closed), "error", "b cannot connect to a port of a: timed out", "on a,")
    behind = ReachTest("a", "b", rtt_s=0.1, skew_s=-30)
    only(between("clocks", behind, closed), "warning", "b is 30.0 s behind that of a")
    only(between("clocks", ReachTest("a", "b", rtt_s=60, skew_s=29)), "ok")  # slow lines prove nothing
    assert between("clocks", closed) == []


class _Listening:
    """`answer_until` in a thread, on loopback, until the pipe is closed."""

    def __enter__(self) -> int:
        read, write = os.pipe()
        self._asked, self._end = os.fdopen(read), os.fdopen(write, "w")
        said, out = os.pipe()
        self._out = os.fdopen(out, "w")
        self._thread = threading.Thread(target=answer_until, args=(self._asked, "127.0.0.1", self._out))
        self._thread.start()
        with os.fdopen(said) as lines:
            return int(json.loads(lines.readline())["port"])

    def __exit__(self, *_: object) -> None:
        self._end.close()
        self._thread.join(10)
        assert not self._thread.is_alive()
        self._asked.close()
        self._out.close()


def test_a_listening_node_answers_with_its_clock_and_ends_when_asked() -> None:
    with _Listening() as port:
        with socket.create_connection(("127.0.0.1", port)):
            pass  # somebody who connects and goes does not end it
        reach, nothing = try_to_reach([("b", "127.0.0.1", port), ("c", "127.0.0.1", 1)])
    assert (reach.target, reach.problem) == ("b", "")
    assert reach.rtt_s > 0
    assert abs(reach.skew_s) < 1  # one machine, one clock
    assert "refused" in nothing.problem
    assert "refused" in try_to_reach([("b", "127.0.0.1", port)])[0].problem


def test_a_clock_that_is_ahead_is_measured() -> None:
    def answer(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection:
            while connection.recv(1):
                connection.sendall(f"{time.time() + 40!r}\n".encode())

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=answer, args=(server,))
        thread.start()
        (reach,) = try_to_reach([("b", "127.0.0.1", server.getsockname()[1])])
        thread.join(10)
    assert reach.skew_s == pytest.approx(40, abs=5)


def test_something_else_on_the_port_is_a_problem_not_a_crash() -> None:
    def answer(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection:
            connection.recv(1)
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n")

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=answer, args=(server,))
        thread.start()
        (reach,) = try_to_reach([("b", "127.0.0.1", server.getsockname()[1])])
        thread.join(10)
    assert "HTTP" in reach.problem


# --- all together ---


def test_facts_of_this_machine_travel_as_json_and_can_be_judged(tmp_path: Path) -> None:
    (tmp_path / "mark").write_text("seen")
    facts = node_facts([], {}, folder=tmp_path, marker=tmp_path / "mark", peers=["127.0.0.1"])
    assert NodeFacts.from_mapping(json.loads(json.dumps(facts.to_mapping()))) == facts
    assert facts.storage.marker == "seen"
    assert facts.network.routes == {"127.0.0.1": "lo"}
    findings = check_node(facts)
    assert all(finding.what.endswith(".") for finding in findings)
    assert all(bool(finding.fix) == (finding.level != "ok") for finding in findings)


def test_a_node_of_which_nothing_is_known_is_judged_without_a_traceback() -> None:
    assert {finding.check for finding in check_node(NodeFacts("bare"))} >= {"torch", "/dev/shm"}


def test_every_sentence_names_facts_that_there_are() -> None:
    """Templates are not seen by a type checker: each is filled in for facts with every fault."""
    checks: list[Check[Any, Any]] = [
        *(*gpu_table.GPU_CHECKS, *gpu_table.PCIE_CHECKS, *system_table.SYSTEM_CHECKS),
        *(*system_table.STORAGE_CHECKS, *network_table.NETWORK_CHECKS),
        network_table.OWN_NAME_CHECK,
        network_table.PEER_NAME_CHECK,
    ]
    name = network_table.NodeName(Lookup("a", ("b",)), "c")
    subjects = (
        GpuFacts(0, uncorrected_errors=1, retired_pages=60, power_limit_w=1.0, default_power_limit_w=2.0),
        GpusFacts(),
        PcieFacts(acs_bridges=("a",)),
        SystemFacts(quota_cores=1.0),
        StorageFacts(),
        NetworkFacts(own_name=name.lookup),
        ProcessLimit(1, 1),
        name,
        network_table._Variable("a", "b", ["c"], "d", True),
        gpu_table._NoPeerAccess("a", "b", True),
        gpu_table._Driver("570", "2.9", "12.6"),
        between_nodes._Different("a", "b", "c", "d"),
        between_nodes._Mtu(1, "a"),
        MachineLoad(8, 3.0, 2.0),
        REACHES[0],
    )
    templates = [
        template
        for check in (*checks, *between_nodes.CHECKS_BETWEEN_NODES)
        for problem in check.problems
        for template in (problem.what, problem.fix)
        if isinstance(template, str)
    ]
    assert len(templates) > 60
    for template in templates:
        assert any(_fits(template, subject) for subject in subjects), template


def _fits(template: str, subject: object) -> bool:
    try:
        return bool(filled_in(template, subject))
    except AttributeError:
        return False


def test_words() -> None:
    assert [words(list("abcde"[:n])) for n in (0, 1, 2, 3, 5)] == [
        "",
        "a",
        "a and b",
        "a, b and c",
        "a, b, c and 2 more",
    ]


def test_an_address_of_another_node_cannot_be_listened_on() -> None:
    with pytest.raises(OSError, match=r"assign|address"):
        answer_until(io.StringIO(), "203.0.113.1", io.StringIO())
