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
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.hardware.checks import (
    Finding,
    NodeFacts,
    ReachTest,
    check_node,
    check_nodes,
    node_facts,
    nodes,
    pcie,
    system,
    try_to_reach,
)
from paceline.hardware.checks import gpu as gpu_checks
from paceline.hardware.checks import network_checks as network
from paceline.hardware.checks import storage_checks as storage
from paceline.hardware.checks.finding import size_text, words
from paceline.hardware.checks.gpu import GpuFacts, GpusFacts, collect_gpus
from paceline.hardware.checks.network_checks import Interface, Lookup, NetworkFacts
from paceline.hardware.checks.reachability import answer_until
from paceline.hardware.checks.storage_checks import StorageFacts
from paceline.hardware.checks.system import Limit, SystemFacts

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
    "nvmlSystemGetCudaDriverVersion": 12080,
    "nvmlDeviceGetName": "NVIDIA H100 80GB HBM3",
    "nvmlDeviceGetUUID": lambda gpu: f"GPU-{gpu}",
    "nvmlDeviceGetPciInfo": lambda gpu: SimpleNamespace(busId=f"00000000:{gpu + 26:02X}:00.0".encode()),
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


def test_healthy_gpus_are_all_fine() -> None:
    nvml = FakeNvml(4, **HEALTHY)
    facts = collect_gpus(nvml, num_on_bus=4)
    assert nvml.num_open == 0
    assert (facts.driver, facts.driver_cuda, len(facts.gpus)) == ("570.124.06", "12.8", 4)
    assert facts.gpus[1].pci_bus_id == "0000:1b:00.0"
    assert facts.p2p == dict.fromkeys(("0-1", "0-2", "0-3", "1-2", "1-3", "2-3"), 0)
    findings = gpu_checks.check_gpus(dataclasses.replace(facts, xids={}, torch_sees=4), CUDA_12)
    assert levels(findings) == ["ok"] * 8


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
    only([f for f in gpu_checks.check_gpus(facts, CUDA_12) if f.level != "ok"], level, pattern)


@pytest.mark.parametrize("reasons", [0x0, 0x1, 0x4, 0x10, 0x100])
def test_idle_and_power_capped_gpus_are_fine(reasons: int) -> None:
    assert gpu_checks.check_speed(GpuFacts(0, throttle_reasons=reasons)) == []


def test_a_gpu_that_tells_nothing_of_itself_is_not_accused() -> None:
    facts = collect_gpus(FakeNvml(2), num_on_bus=2)
    assert facts.gpus[0] == GpuFacts(0)
    assert facts.p2p is None
    assert set(levels(gpu_checks.check_gpus(facts, CUDA_12))) == {"ok"}


def test_pairs_without_peer_access_are_named() -> None:
    status = {(0, 1): 0, (0, 2): 3, (1, 2): 3}
    answers = {**HEALTHY, "nvmlDeviceGetP2PStatus": lambda one, other, _kind: status[one, other]}
    p2p = collect_gpus(FakeNvml(3, **answers)).p2p
    only(gpu_checks.check_p2p(p2p), "warning", "GPUs 0-2 and 1-2 cannot reach", "places on the PCIe", "topo --pick")


def test_a_driver_that_does_not_answer_is_an_error_only_where_there_are_gpus() -> None:
    nvml = FakeNvml(0)
    nvml.nvmlInit = lambda: (_ for _ in ()).throw(NVMLError("Driver Not Loaded"))  # type: ignore[method-assign]
    only(gpu_checks.check_gpus(collect_gpus(nvml), {}), "ok", "no NVIDIA GPU")
    only(gpu_checks.check_gpus(collect_gpus(nvml, 2), {}), "error", "2 NVIDIA GPUs are on the PCI bus.*Driver Not")


def test_one_gpu_fallen_off_the_bus() -> None:
    findings = gpu_checks.check_driver_answers(GpusFacts(driver="570", num_on_bus=8, gpus=(GpuFacts(0),) * 7))
    only(findings, "error", "8 NVIDIA GPUs are on the PCI bus, but the driver knows 7")


def test_torch_without_cuda_is_an_error_beside_gpus() -> None:
    only(gpu_checks.check_driver_version("570.1", {"torch": "2.9.0+cpu"}), "error", r"torch 2.9.0\+cpu.*CPU alone")
    only(gpu_checks.check_torch_sees(0, 8), "error", "none of 8")


def test_xids_are_counted_and_only_hardware_is_accused() -> None:
    log = (
        "[1.0] NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.\n[2.0] NVRM: Xid (PCI:0): 31, x\n" * 2
    )
    assert gpu_checks.count_xids(log) == {"79": 2, "31": 2}
    only(gpu_checks.check_xids({"79": 2, "31": 2}), "warning", r"boot: Xid 79 \(fallen off the bus\)\.")
    only(gpu_checks.check_xids({"31": 2}), "ok")
    assert gpu_checks.check_xids(None) == []


def test_the_stand_in_speaks_as_the_library_does() -> None:
    pynvml = pytest.importorskip("pynvml")
    source = Path(gpu_checks.__file__).read_text()
    asked = set(re.findall(r'"(nvml[A-Z]\w+)"', source)) | {name for name in vars(FakeNvml) if name.startswith("nvml")}
    assert len(asked) > 15
    assert [name for name in {*asked, *HEALTHY} if not hasattr(pynvml, name)] == []
    assert gpu_checks.UNCORRECTED == pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
    assert gpu_checks.VOLATILE == pynvml.NVML_VOLATILE_ECC
    assert gpu_checks.PROHIBITED == pynvml.NVML_COMPUTEMODE_PROHIBITED
    assert len(gpu_checks.RETIREMENT_CAUSES) == pynvml.NVML_PAGE_RETIREMENT_CAUSE_COUNT
    assert [*gpu_checks.THROTTLING, gpu_checks.HELD_CLOCKS] == [
        pynvml.nvmlClocksThrottleReasonHwSlowdown,
        pynvml.nvmlClocksThrottleReasonSwThermalSlowdown,
        pynvml.nvmlClocksThrottleReasonHwThermalSlowdown,
        pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown,
        pynvml.nvmlClocksThrottleReasonApplicationsClocksSetting,
    ]
    assert [*gpu_checks.P2P] == [
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
    assert pcie.acs_bridges(LSPCI.format(acs="+")) == ("00:01.0",)
    assert pcie.acs_bridges(LSPCI.format(acs="-")) == ()
    assert pcie.acs_bridges("00:01.0 PCI bridge: x\n\tCapabilities: <access denied>\n") is None
    assert pcie.acs_bridges(None) is None
    only(pcie.check_acs(("00:01.0",)), "warning", r"setpci -s 00:01.0 ECAP_ACS\+0x6.w=0000")
    only(pcie.check_acs(None), "warning", "cannot be seen")


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
    finding = only(pcie.check_iommu(arguments, iommus, domains), level)
    assert level == "ok" or ("amd_iommu=off" if "ivhd0" in iommus else "intel_iommu=off") in finding.fix


def test_one_gpu_or_a_virtual_machine_has_no_such_trap() -> None:
    trapped = pcie.PcieFacts(acs_bridges=("00:01.0",), iommus=("dmar0",), num_gpus=2)
    assert levels(pcie.check_pcie(trapped)) == ["warning", "warning"]
    only(pcie.check_pcie(dataclasses.replace(trapped, num_gpus=1)), "ok")
    only(pcie.check_pcie(dataclasses.replace(trapped, is_virtual=True)), "ok")


def test_gpus_are_found_in_sysfs(tmp_path: Path) -> None:
    for name, vendor, kind in (("a", "0x10de", "0x030200"), ("b", "0x10de", "0x040300"), ("c", "0x8086", "0x030000")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "vendor").write_text(f"{vendor}\n")
        (tmp_path / name / "class").write_text(f"{kind}\n")
    assert [gpu.name for gpu in pcie.nvidia_gpus(tmp_path)] == ["a"]


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
    assert system.quota_cores(own, tmp_path) == cores


def test_processor_time_less_than_what_is_visible() -> None:
    only(system.check_quota(64, 4.0), "warning", "time of 4 cores, but 64 are visible", "taskset -c 0-3")
    only(system.check_quota(64, 0.5), "warning", "taskset -c 0-0")
    only(system.check_quota(4, None), "ok")
    only(system.check_threads_per_core(64, 2, has_gpus=False), "warning", "at most 32 workers")
    only(system.check_threads_per_core(64, 2, has_gpus=True), "ok")
    only(system.check_governor("powersave", "acpi-cpufreq"), "warning", "cpupower")
    only(system.check_governor("powersave", "intel_pstate"), "ok")


@pytest.mark.parametrize(
    ("limit", "level", "fix"),
    [
        (Limit(1024, 1024), "warning", "limits.conf"),
        (Limit(1024, 524288), "warning", "^ulimit -n 524288"),
        (Limit(1024, None), "warning", "^ulimit -n 4096"),
        (Limit(65536, 65536), "ok", ""),
        (Limit(None, None), "ok", ""),
    ],
)
def test_open_files(limit: Limit, level: str, fix: str) -> None:
    finding = only(system.check_open_files(limit), level)
    assert re.search(fix, finding.fix)


def test_locked_memory_matters_to_rdma_alone() -> None:
    only(system.check_locked_memory(Limit(65536, 65536), has_rdma=False), "ok")
    only(system.check_locked_memory(Limit(65536, 65536), has_rdma=True), "error", "64 KiB", "memlock=-1")
    only(system.check_locked_memory(Limit(None, None), has_rdma=True), "ok")


@given(st.text(max_size=40))
def test_whatever_the_kernel_lists_is_counted_or_zero(text: str) -> None:
    assert system.count_cpus(text) >= 0


def test_siblings_are_counted() -> None:
    assert [system.count_cpus(text) for text in ("0", "0,64", "0-1", "")] == [1, 2, 2, 0]


def test_this_python_has_versions_of_what_trains() -> None:
    import torch

    versions = system.collect_versions()
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
    only(storage.check_shared_memory(total, free), level, pattern)


def test_the_run_folder(tmp_path: Path) -> None:
    facts = storage.collect_storage(tmp_path / "not" / "yet", shm=tmp_path)
    assert (facts.folder, facts.is_writable) == (str(tmp_path / "not" / "yet"), True)
    assert facts.free_bytes
    only(storage.check_folder("/runs", is_writable=True, free_bytes=2**20), "error", "1 MiB free")
    only(storage.check_folder("/runs", is_writable=True, free_bytes=2**32), "warning")
    only(storage.check_folder("/runs", is_writable=False, free_bytes=2**40), "error", "--out")


# --- network ---

ETH = Interface("eth0", True, 1500, 25e9, ("10.0.0.1",))


def test_the_own_name_that_means_loopback_is_a_trap_between_nodes_only() -> None:
    trapped = Lookup("gpu1", ("127.0.1.1",))
    only(network.check_own_name(trapped, [ETH]), "ok")
    only(network.check_own_name(trapped, [ETH], 2), "error", "replace 127.0.1.1 by 10.0.0.1")
    nameless = Lookup("gpu1", problem="Name or service not known")
    only(network.check_own_name(nameless, [ETH]), "warning", "10.0.0.1 gpu1")
    only(network.check_own_name(nameless, [ETH], 2), "error")


def test_slow_lookups_are_named_one_by_one() -> None:
    slow = Lookup("gpu1", ("10.0.0.1",), forward_s=0.01, reverse_s=5.02)
    only(network.check_own_name(slow, [ETH], 2), "warning", "5.0 s to find the name of 10.0.0.1", "/etc/hosts")
    both = dataclasses.replace(slow, forward_s=10.0)
    assert levels(network.check_own_name(both, [ETH], 2)) == ["warning", "warning"]


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
    only(network.check_peer(Lookup("gpu2", ("10.0.0.2",)), interface), level, pattern)


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
    only(network.check_variables(variables, ["docker0", "eth0", "lo"], num_nodes), level)


@given(
    st.text(st.sampled_from("^=,eth0lo"), max_size=8),
    st.lists(st.sampled_from(["eth0", "eth1", "lo", "tun"]), unique=True),
)
def test_what_nccl_means_is_some_of_the_interfaces(value: str, names: list[str]) -> None:
    chosen = network.matching(value, names)
    assert [name for name in names if name in chosen] == chosen
    if not value.startswith("^"):
        assert not set(chosen) & set(network.matching("^" + value, names))


def test_rdma_ports_from_sysfs(tmp_path: Path) -> None:
    for card, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN")):
        (tmp_path / card / "ports/1").mkdir(parents=True)
        (tmp_path / card / "ports/1/state").write_text(state + "\n")
    ports = network._rdma_ports(tmp_path)
    assert ports == {"mlx5_0/1": "ACTIVE", "mlx5_1/1": "DOWN"}
    only(network.check_rdma(ports), "warning", "1 of 2 RDMA ports carry nothing: mlx5_1/1", r"NCCL_IB_HCA=\^mlx5_1$")


def test_a_port_in_use_is_noticed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert not network.is_free(taken.getsockname()[1])
    only(network.check_ports(28232, is_torchrun_port_free=False), "warning", "29500", "paceline launch")
    only(network.check_ports(100, is_torchrun_port_free=True), "warning", "ip_local_port_range")


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
    interface = Interface("eth0", True, mtu, None, ("10.0.0.1",))
    return NodeFacts(
        name,
        system=SystemFacts(versions={**CUDA_12, **versions}),
        storage=StorageFacts(folder="/shared/runs", free_bytes=2**40, marker=marker),
        network=NetworkFacts(interfaces=(interface,), routes={"other": "eth0"}),
    )


REACHES = [ReachTest("a", "b", rtt_s=0.001, skew_s=0.002), ReachTest("b", "a", rtt_s=0.001, skew_s=-0.002)]


def test_nodes_alike_are_fine() -> None:
    findings = check_nodes({"a": node("a"), "b": node("b", python="3.11.9")}, REACHES, "M")
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
    findings = [f for f in check_nodes({"a": node("a"), "b": other}, REACHES, "M") if f.level != "ok"]
    assert only(findings, level, pattern).check == check


def test_shut_doors_and_wrong_clocks() -> None:
    shut = ReachTest("b", "a", problem="timed out")
    only(nodes.check_reaches([REACHES[0], shut]), "error", "b cannot connect to a port of a: timed out", "on a,")
    only(
        nodes.check_clocks([ReachTest("a", "b", rtt_s=0.1, skew_s=-30), shut]),
        "warning",
        "b is 30.0 s behind that of a",
    )
    only(nodes.check_clocks([ReachTest("a", "b", rtt_s=60, skew_s=29)]), "ok")  # slow lines prove nothing
    assert nodes.check_clocks([shut]) == []


class _Door:
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


def test_a_door_answers_with_its_clock_and_shuts_when_asked() -> None:
    with _Door() as port:
        with socket.create_connection(("127.0.0.1", port)):
            pass  # somebody who knocks and goes does not take the door down
        reach, nothing = try_to_reach("a", [("b", "127.0.0.1", port), ("c", "127.0.0.1", 1)])
    assert (reach.source, reach.target, reach.problem) == ("a", "b", "")
    assert reach.rtt_s > 0
    assert abs(reach.skew_s) < 1  # one machine, one clock
    assert "refused" in nothing.problem
    assert "refused" in try_to_reach("a", [("b", "127.0.0.1", port)])[0].problem


def test_a_clock_that_is_ahead_is_measured() -> None:
    def answer(door: socket.socket) -> None:
        connection, _ = door.accept()
        with connection:
            while connection.recv(1):
                connection.sendall(f"{time.time() + 40!r}\n".encode())

    with socket.create_server(("127.0.0.1", 0)) as door:
        thread = threading.Thread(target=answer, args=(door,))
        thread.start()
        (reach,) = try_to_reach("a", [("b", "127.0.0.1", door.getsockname()[1])])
        thread.join(10)
    assert reach.skew_s == pytest.approx(40, abs=5)


def test_something_else_behind_the_door_is_a_problem_not_a_crash() -> None:
    def answer(door: socket.socket) -> None:
        connection, _ = door.accept()
        with connection:
            connection.recv(1)
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n")

    with socket.create_server(("127.0.0.1", 0)) as door:
        thread = threading.Thread(target=answer, args=(door,))
        thread.start()
        (reach,) = try_to_reach("a", [("b", "127.0.0.1", door.getsockname()[1])])
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


def test_words_and_sizes() -> None:
    assert [words(list("abcde"[:n])) for n in (0, 1, 2, 3, 5)] == [
        "",
        "a",
        "a and b",
        "a, b and c",
        "a, b, c and 2 more",
    ]
    assert [size_text(n) for n in (0, 1023, 2**20, 1.5 * 2**30, 2**40)] == [
        "0 bytes",
        "1023 bytes",
        "1 MiB",
        "1.5 GiB",
        "1.0 TiB",
    ]


def test_an_address_of_another_node_cannot_be_listened_on() -> None:
    with pytest.raises(OSError, match=r"assign|address"):
        answer_until(io.StringIO(), "203.0.113.1", io.StringIO())
