"""The doctor's checks as functions of facts: what is wrong is a warning or an error with what to do; nothing else is.

A row of a table is the facts of a node, the name of the check, and what its finding says.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import paceline
from paceline.hardware.checks.between_nodes import check_nodes
from paceline.hardware.checks.engine import Finding
from paceline.hardware.checks.gpu_facts import GpuFacts, GpusFacts, collect_gpus, count_xids
from paceline.hardware.checks.load_facts import CpuTimes, cpu_times, load_of
from paceline.hardware.checks.network_facts import Interface, Lookup, NetworkFacts
from paceline.hardware.checks.node_checks import check_node
from paceline.hardware.checks.node_facts import NodeFacts
from paceline.hardware.checks.pcie_facts import PcieFacts, acs_bridges
from paceline.hardware.checks.reachability import ReachTest
from paceline.hardware.checks.storage_facts import StorageFacts, collect_storage
from paceline.hardware.checks.survey import Survey
from paceline.hardware.checks.system_facts import ProcessLimit, SystemFacts, quota_cores
from paceline.spec import MachineLoad
from tests.unit.hardware.fake_nvml import HEALTHY, FakeNvml, NVMLError

VERSIONS = {"torch": "2.9.0+cu126", "CUDA": "12.6", "paceline": "0.1.0", "python": "3.11.7", "NCCL": "2.27.5"}
CUDA_12 = SystemFacts(versions=VERSIONS)


def findings_of(check: str, **facts: Any) -> list[Finding]:
    """What one check finds on a node of which nothing but `facts` is known."""
    return [finding for finding in check_node(NodeFacts("here", **facts)) if finding.check == check]


def assert_says(findings: list[Finding], level: str, words: list[str]) -> None:
    """There is one finding, of this level, and what it says and advises has the words."""
    (finding,) = findings
    assert finding.level == level, finding
    for word in words:
        assert word in f"{finding.what} | {finding.fix}", finding
    assert bool(finding.fix) == (level != "ok"), finding
    assert finding.what.endswith(".")


# --- GPUs ---


def about_gpus(gpus: GpusFacts, system: SystemFacts = CUDA_12) -> list[Finding]:
    checks = ("gpu", "driver", "torch and GPUs", "peer")
    return [one for one in check_node(NodeFacts("here", gpus=gpus, system=system)) if one.check.startswith(checks)]


def test_gpus_in_good_health_are_all_fine() -> None:
    nvml = FakeNvml(4, HEALTHY)
    facts = collect_gpus(nvml, num_on_bus=4)
    assert nvml.num_open == 0
    assert (facts.driver, len(facts.gpus), facts.gpus[1].name) == ("570.124.06", 4, "NVIDIA H100 80GB HBM3")
    found = about_gpus(dataclasses.replace(facts, xids={}, torch_sees=4))
    assert {finding.level for finding in found} == {"ok"} and len(found) >= 6


@pytest.mark.parametrize(
    ("question", "answer", "level", "words"),
    [
        ("nvmlDeviceGetTotalEccErrors", 2, "error", ["GPU 0", "2 uncorrectable", "--gpu-reset -i 0"]),
        ("nvmlDeviceGetRemappedRows", [0, 1, 1, 0], "error", ["GPU 0", "reset"]),
        ("nvmlDeviceGetRemappedRows", [0, 1, 1, 1], "error", ["GPU 0", "no spare"]),
        ("nvmlDeviceGetRetiredPagesPendingStatus", 1, "error", ["reset"]),
        ("nvmlDeviceGetRetiredPages", list(range(30)), "error", ["60 memory pages"]),  # 30 of either cause
        ("nvmlDeviceGetEccMode", [0, 0], "warning", ["correct memory errors", "-e 1"]),
        ("nvmlDeviceGetCurrentClocksThrottleReasons", 0x20, "warning", ["too hot"]),
        ("nvmlDeviceGetCurrentClocksThrottleReasons", 0x80, "warning", ["power"]),
        ("nvmlDeviceGetCurrentClocksThrottleReasons", 0x02, "warning", ["clocks", "held down"]),
        ("nvmlDeviceGetPowerManagementLimit", 300_000, "warning", ["300 W", "700 W", "-pl 700"]),
        ("nvmlDeviceGetCurrPcieLinkWidth", 8, "warning", ["8 of its 16", "PCIe"]),
        ("nvmlDeviceGetPersistenceMode", 0, "warning", ["-pm 1"]),
        ("nvmlDeviceGetComputeMode", 2, "error", ["compute mode", "-c DEFAULT"]),
        ("nvmlDeviceGetMigMode", [1, 1], "warning", ["MIG"]),
        ("nvmlSystemGetDriverVersion", "470.57", "error", ["470.57", "12.6", "525"]),
    ],
)
def test_one_thing_wrong_with_a_gpu_is_the_one_finding(
    question: str, answer: Any, level: str, words: list[str]
) -> None:
    facts = collect_gpus(FakeNvml(1, HEALTHY | {question: answer}), num_on_bus=1)
    assert_says([finding for finding in about_gpus(facts) if finding.level != "ok"], level, words)


@pytest.mark.parametrize("reasons", [0x0, 0x1, 0x4, 0x10, 0x100])
def test_idle_and_power_capped_gpus_are_fine(reasons: int) -> None:
    facts = collect_gpus(FakeNvml(1, HEALTHY | {"nvmlDeviceGetCurrentClocksThrottleReasons": reasons}), num_on_bus=1)
    assert {finding.level for finding in about_gpus(facts)} == {"ok"}


def test_a_gpu_that_answers_nothing_is_not_reported() -> None:
    facts = collect_gpus(FakeNvml(2, {}), num_on_bus=2)
    assert facts.gpus == (GpuFacts(0), GpuFacts(1)) and facts.p2p is None
    assert {finding.level for finding in about_gpus(facts)} == {"ok"}


GPU = GpusFacts(driver="570.1", gpus=(GpuFacts(0),), num_on_bus=1)


@pytest.mark.parametrize(
    ("check", "facts", "level", "words"),
    [
        ("gpu driver", {"gpus": GpusFacts(driver="570", num_on_bus=8, gpus=(GpuFacts(0),) * 7)}, "error", ["8 ", "7"]),
        ("gpu driver", {"gpus": GpusFacts(problem="Driver Not Loaded", num_on_bus=2)}, "error", ["2 ", "Not Loaded"]),
        ("gpu driver", {"gpus": GpusFacts(problem="Driver Not Loaded")}, "ok", ["no NVIDIA GPU"]),
        ("driver and CUDA", {"gpus": GPU, "system": CUDA_12}, "ok", ["570.1", "12.6"]),
        (
            "driver and CUDA",
            {"gpus": GPU, "system": SystemFacts(versions={"torch": "2.9.0+cpu"})},
            "error",
            ["2.9.0+cpu", "CPU"],
        ),
        ("torch and GPUs", {"gpus": dataclasses.replace(GPU, torch_sees=0)}, "error", ["none of 1"]),
        ("torch and GPUs", {"gpus": dataclasses.replace(GPU, torch_sees=1)}, "ok", ["1"]),
        ("gpu errors", {"gpus": dataclasses.replace(GPU, xids={"79": 2, "31": 2})}, "warning", ["Xid 79", "bus"]),
        ("gpu errors", {"gpus": dataclasses.replace(GPU, xids={"31": 2})}, "ok", []),  # a program's own doing
        (
            "peer-to-peer",
            {"gpus": dataclasses.replace(GPU, p2p={"0-1": 0, "0-2": 3, "1-2": 3})},
            "warning",
            ["0-2 and 1-2", "PCIe", "--pick"],
        ),
        ("peer-to-peer", {"gpus": dataclasses.replace(GPU, p2p={"0-1": 4})}, "warning", ["0-1", "disabled"]),
        ("peer-to-peer", {"gpus": dataclasses.replace(GPU, p2p={"0-1": 0})}, "ok", ["1"]),
        # --- PCIe ---
        ("PCIe ACS", {"pcie": PcieFacts(("00:01.0",), num_gpus=2)}, "warning", ["00:01.0", "setpci"]),
        ("PCIe ACS", {"pcie": PcieFacts((), num_gpus=2)}, "ok", []),
        ("PCIe ACS", {"pcie": PcieFacts(num_gpus=2)}, "warning", ["lspci"]),
        ("IOMMU", {"pcie": PcieFacts((), "intel_iommu=on", ("dmar0",), num_gpus=2)}, "warning", ["intel_iommu=off"]),
        ("IOMMU", {"pcie": PcieFacts((), "intel_iommu=on iommu=pt", ("dmar0",), num_gpus=2)}, "ok", []),
        ("IOMMU", {"pcie": PcieFacts((), "", (), num_gpus=2)}, "ok", []),
        (
            "IOMMU",
            {"pcie": PcieFacts((), "", ("ivhd0",), {"0000:3b:00.0": "DMA-FQ"}, num_gpus=2)},
            "warning",
            ["0000:3b:00.0", "amd_iommu=off"],
        ),
        ("IOMMU", {"pcie": PcieFacts((), "", ("ivhd0",), {"0000:3b:00.0": "identity"}, num_gpus=2)}, "ok", []),
        # --- processor and limits ---
        ("torch", {"system": SystemFacts()}, "error", ["pip install torch"]),
        ("torch", {"system": CUDA_12}, "ok", ["2.9.0+cu126", "3.11.7"]),
        ("cpu load", {"system": SystemFacts(load=MachineLoad(8, 0.3, 0.0))}, "ok", []),
        ("cpu load", {"system": SystemFacts(load=MachineLoad(8, 3.0, 0.0))}, "warning", ["3.0 of 8", "top"]),
        ("cpu load", {"system": SystemFacts(load=MachineLoad(8, 0.0, 2.0))}, "warning", ["2.0 of 8", "virtual"]),
        ("cpu quota", {"system": SystemFacts(num_cores=64, quota_cores=4.0)}, "warning", ["4 ", "64", "0-3"]),
        ("cpu quota", {"system": SystemFacts(num_cores=64, quota_cores=0.5)}, "warning", ["0.5", "0-0"]),
        ("cpu quota", {"system": SystemFacts(num_cores=4)}, "ok", ["4"]),
        ("hyper-threads", {"system": SystemFacts(num_cores=64, threads_per_core=2)}, "warning", ["32", "64"]),
        ("hyper-threads", {"system": SystemFacts(num_cores=64, threads_per_core=2), "gpus": GPU}, "ok", []),
        ("cpu governor", {"system": SystemFacts(governor="powersave")}, "warning", ["powersave", "performance"]),
        ("cpu governor", {"system": SystemFacts(governor="powersave", scaling_driver="intel_pstate")}, "ok", []),
        (
            "ulimit nofile",
            {"system": SystemFacts(limits={"nofile": ProcessLimit(1024, 1024)})},
            "warning",
            ["1024", "limits.conf"],
        ),
        (
            "ulimit nofile",
            {"system": SystemFacts(limits={"nofile": ProcessLimit(1024, 524288)})},
            "warning",
            ["ulimit -n 524288"],
        ),
        (
            "ulimit nofile",
            {"system": SystemFacts(limits={"nofile": ProcessLimit(1024, None)})},
            "warning",
            ["ulimit -n 4096"],
        ),
        ("ulimit nofile", {"system": SystemFacts(limits={"nofile": ProcessLimit(65536, 65536)})}, "ok", ["65536"]),
        ("ulimit nproc", {"system": SystemFacts(limits={"nproc": ProcessLimit(1024, 1024)})}, "warning", ["1024"]),
        ("ulimit memlock", {"system": SystemFacts(limits={"memlock": ProcessLimit(65536, 65536)})}, "ok", []),
        (
            "ulimit memlock",
            {
                "system": SystemFacts(limits={"memlock": ProcessLimit(65536, 65536)}),
                "network": NetworkFacts(rdma_ports={"mlx5_0/1": "ACTIVE"}),
            },
            "error",
            ["64 KiB", "memlock"],
        ),
        # --- storage ---
        ("/dev/shm", {"storage": StorageFacts(2**26, 2**26)}, "warning", ["Bus error", "--shm-size"]),
        ("/dev/shm", {"storage": StorageFacts(2**26, 2**20)}, "error", ["1 MiB", "64 MiB", "--shm-size"]),
        ("/dev/shm", {"storage": StorageFacts(2**36, 2**20)}, "error", ["ls -lS /dev/shm"]),
        ("/dev/shm", {"storage": StorageFacts(2**36, 2**35)}, "ok", ["32 GiB"]),
        ("/dev/shm", {"storage": StorageFacts()}, "warning", ["no /dev/shm"]),
        ("run folder", {"storage": StorageFacts(folder="/runs", free_bytes=2**20)}, "error", ["/runs", "1 MiB"]),
        ("run folder", {"storage": StorageFacts(folder="/runs", free_bytes=2**32)}, "warning", ["/runs", "4 GiB"]),
        ("run folder", {"storage": StorageFacts(folder="/runs", free_bytes=2**40)}, "ok", ["/runs"]),
        ("run folder", {"storage": StorageFacts(folder="/runs", is_writable=False)}, "error", ["/runs", "--out"]),
        ("run folder", {"storage": StorageFacts(folder="/a/b", obstacle="/a")}, "error", ["/a is not a folder"]),
    ],
)
def test_facts_of_one_node(check: str, facts: dict[str, Any], level: str, words: list[str]) -> None:
    assert_says(findings_of(check, **facts), level, words)


def test_several_problems_of_one_check_are_all_named() -> None:
    both = SystemFacts(load=MachineLoad(8, 3.0, 2.0))
    assert [finding.level for finding in findings_of("cpu load", system=both)] == ["warning", "warning"]
    hot = GpuFacts(0, throttle_reasons=0x20 | 0x02, power_limit_w=300.0, default_power_limit_w=700.0)
    assert len(findings_of("gpu speed", gpus=dataclasses.replace(GPU, gpus=(hot,)))) == 3


@pytest.mark.parametrize(
    "pcie",
    [
        PcieFacts(("00:01.0",), iommus=("dmar0",), num_gpus=1),
        PcieFacts(("00:01.0",), iommus=("dmar0",), num_gpus=2, is_virtual=True),
    ],
)
def test_one_gpu_or_a_virtual_machine_has_no_problem_on_the_bus(pcie: PcieFacts) -> None:
    found = [
        finding for finding in check_node(NodeFacts("here", pcie=pcie)) if finding.check.startswith(("PCIe", "IOMMU"))
    ]
    assert [finding.level for finding in found] == ["ok"]


# --- network ---

ETH = Interface("eth0", True, 1500, ("10.0.0.1",))
DOCKER, LOOPBACK = Interface("docker0", True, 1500), Interface("lo", True, 65536)
PEER = (Lookup("gpu2", ("10.0.0.2",)),)


@pytest.mark.parametrize(
    ("check", "facts", "level", "words"),
    [
        # The name that Debian gives 127.0.1.1 is a trap between nodes only.
        ("own name", {"own_name": Lookup("gpu1", ("127.0.1.1",))}, "ok", []),
        ("own name", {"own_name": Lookup("gpu1", ("127.0.1.1",)), "peers": PEER}, "error", ["127.0.1.1", "10.0.0.1"]),
        ("own name", {"own_name": Lookup("gpu1", problem="not known")}, "warning", ["gpu1", "10.0.0.1"]),
        ("own name", {"own_name": Lookup("gpu1", problem="not known"), "peers": PEER}, "error", ["gpu1"]),
        (
            "own name",
            {"own_name": Lookup("gpu1", ("10.0.0.1",), 0.01, 5.02), "peers": PEER},
            "warning",
            ["5.0 s", "/etc/hosts"],
        ),
        ("way to gpu2", {"peers": PEER, "routes": {"gpu2": "eth0"}}, "ok", ["eth0", "gpu2"]),
        ("way to gpu2", {"peers": PEER, "routes": {"gpu2": ""}}, "error", ["ip route get 10.0.0.2"]),
        ("way to gpu2", {"peers": PEER, "routes": {"gpu2": "lo"}}, "error", ["this node itself"]),
        ("way to gpu2", {"peers": PEER, "routes": {"gpu2": "docker0"}}, "error", ["docker0", "containers"]),
        ("way to gpu2", {"peers": (Lookup("gpu2", problem="not known"),)}, "error", ["gpu2", "not known"]),
        ("interface", {"variables": {}}, "ok", []),
        ("interface", {"variables": {"GLOO_SOCKET_IFNAME": "eth0"}, "peers": PEER}, "ok", ["GLOO_SOCKET_IFNAME"]),
        ("interface", {"variables": {"GLOO_SOCKET_IFNAME": "lo"}}, "ok", []),
        ("interface", {"variables": {"NCCL_SOCKET_IFNAME": "eth"}, "peers": PEER}, "ok", []),
        ("interface", {"variables": {"NCCL_SOCKET_IFNAME": "^docker,lo"}, "peers": PEER}, "ok", []),
        ("GLOO_SOCKET_IFNAME", {"variables": {"GLOO_SOCKET_IFNAME": "eth1"}}, "error", ["eth1", "eth0"]),
        ("GLOO_SOCKET_IFNAME", {"variables": {"GLOO_SOCKET_IFNAME": "lo"}, "peers": PEER}, "error", ["lo"]),
        ("NCCL_SOCKET_IFNAME", {"variables": {"NCCL_SOCKET_IFNAME": "=eth"}, "peers": PEER}, "error", ["=eth"]),
        ("NCCL_SOCKET_IFNAME", {"variables": {"NCCL_SOCKET_IFNAME": "^eth"}, "peers": PEER}, "error", ["^eth"]),
        ("NCCL_SOCKET_IFNAME", {"variables": {"NCCL_SOCKET_IFNAME": "docker0"}, "peers": PEER}, "error", ["docker0"]),
        ("RDMA ports", {"rdma_ports": {"mlx5_0/1": "ACTIVE"}}, "ok", ["1"]),
        (
            "RDMA ports",
            {"rdma_ports": {"mlx5_0/1": "ACTIVE", "mlx5_1/1": "DOWN"}},
            "warning",
            ["1 of 2", "mlx5_1/1", "NCCL_IB_HCA=^mlx5_1"],
        ),
        ("free ports", {"num_ports": 28232}, "ok", ["29500"]),
        ("free ports", {"num_ports": 28232, "is_torchrun_port_free": False}, "warning", ["29500", "paceline launch"]),
        ("free ports", {"num_ports": 100}, "warning", ["100", "ip_local_port_range"]),
    ],
)
def test_facts_of_the_network(check: str, facts: dict[str, Any], level: str, words: list[str]) -> None:
    network = NetworkFacts(interfaces=(DOCKER, ETH, LOOPBACK), **facts)
    assert_says(findings_of(check, network=network), level, words)


# --- several nodes ---


def node(name: str, marker: str = "M", mtu: int = 1500, gpus: GpusFacts | None = None, **versions: str) -> NodeFacts:
    return NodeFacts(
        name,
        system=SystemFacts(versions=VERSIONS | versions),
        storage=StorageFacts(folder="/shared/runs", free_bytes=2**40, marker=marker),
        network=NetworkFacts(interfaces=(Interface("eth0", True, mtu, ("10.0.0.1",)),), routes={"other": "eth0"}),
        gpus=gpus or GpusFacts(),
    )


REACHES = (ReachTest("a", "b", rtt_s=0.001, skew_s=0.002), ReachTest("b", "a", rtt_s=0.001, skew_s=-0.002))


@pytest.mark.parametrize(
    ("other", "reaches", "level", "check", "words"),
    [
        (node("b", torch="2.8.0"), REACHES, "error", "same versions", ["torch", "2.9.0+cu126 on a", "2.8.0 on b"]),
        (node("b", python="3.12.1"), REACHES, "error", "same versions", ["python", "3.11 on a", "3.12 on b"]),
        (node("a"), REACHES, "error", "host names", ["a and b"]),
        (node("b", mtu=9000), REACHES, "warning", "MTU", ["1500 on eth0 of a", "9000 on eth0 of b", "mtu 1500"]),
        (node("b", marker=""), REACHES, "warning", "shared folder", ["b ", "/shared/runs"]),
        (node("b", gpus=GpusFacts(gpus=(GpuFacts(0, "T4"),))), REACHES, "warning", "same GPUs", ["b has 1 x T4"]),
        (
            node("b"),
            (REACHES[0], ReachTest("b", "a", problem="timed out")),
            "error",
            "firewall",
            ["b ", "a: timed out"],
        ),
        (node("b"), (ReachTest("a", "b", rtt_s=0.1, skew_s=-30),), "warning", "clocks", ["b is 30.0 s behind", "a."]),
    ],
)
def test_one_thing_that_differs_between_nodes_is_the_one_finding(
    other: NodeFacts, reaches: tuple[ReachTest, ...], level: str, check: str, words: list[str]
) -> None:
    found = [one for one in check_nodes(Survey({"a": node("a"), "b": other}, reaches, "M")) if one.level != "ok"]
    assert_says(found, level, words)
    assert found[0].check == check


@pytest.mark.parametrize("reaches", [REACHES, (ReachTest("a", "b", rtt_s=60, skew_s=29),)])
def test_nodes_alike_are_fine(reaches: tuple[ReachTest, ...]) -> None:
    """Patch releases of Python may differ, and a clock over a slow line proves nothing."""
    found = check_nodes(Survey({"a": node("a"), "b": node("b", python="3.11.9")}, reaches, "M"))
    assert {finding.level for finding in found} == {"ok"} and len(found) >= 6


# --- where facts come from ---


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
    assert quota_cores(own, tmp_path) == cores


LSPCI = """\
00:01.0 PCI bridge: Intel Corporation Sky Lake-E PCI Express Root Port A (rev 04) (prog-if 00 [Normal decode])
\tCapabilities: [110 v1] Access Control Services
\t\tACSCap:\tSrcValid+ TransBlk+ ReqRedir+ CmpltRedir+ UpstreamFwd+ EgressCtrl- DirectTrans-
\t\tACSCtl:\tSrcValid{acs} TransBlk- ReqRedir{acs} CmpltRedir{acs} UpstreamFwd{acs} EgressCtrl- DirectTrans-

3b:00.0 3D controller: NVIDIA Corporation GH100 [H100 SXM5 80GB] (rev a1)
\tCapabilities: [d0 v1] Access Control Services
\t\tACSCtl:\tSrcValid+ TransBlk-
"""


@pytest.mark.parametrize(
    ("listing", "bridges"),
    [
        (LSPCI.format(acs="+"), ("00:01.0",)),
        (LSPCI.format(acs="-"), ()),
        ("00:01.0 PCI bridge: x\n\tCapabilities: <access denied>\n", None),
        (None, None),
    ],
)
def test_access_control_counts_at_bridges_that_switch_it_on(
    listing: str | None, bridges: tuple[str, ...] | None
) -> None:
    assert acs_bridges(listing) == bridges


def test_xids_of_the_kernel_log_are_counted() -> None:
    log = "[1.0] NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.\n[2.0] NVRM: Xid (PCI:0): 31, x\n"
    assert count_xids(log * 2) == {"79": 2, "31": 2}
    assert count_xids("nothing") == {}


def test_a_driver_that_does_not_answer_says_why() -> None:
    facts = collect_gpus(FakeNvml(0, {"nvmlInit": NVMLError("Driver Not Loaded")}), 2)
    assert (facts.gpus, facts.problem, facts.num_on_bus) == ((), "Driver Not Loaded", 2)


def test_a_run_folder_that_is_not_there_yet_is_judged_by_the_one_above(tmp_path: Path) -> None:
    facts = collect_storage(tmp_path / "not" / "yet", shm=tmp_path)
    assert (facts.folder, facts.is_writable, facts.obstacle) == (str(tmp_path / "not" / "yet"), True, "")
    assert facts.free_bytes and facts.shm_bytes
    (tmp_path / "file").touch()
    assert collect_storage(tmp_path / "file" / "runs").obstacle == str(tmp_path / "file")


@given(st.integers(0, 500), st.integers(0, 500), st.integers(0, 500))
def test_the_load_of_others_is_what_all_did_less_what_we_did(busy: int, own: int, stolen: int) -> None:
    def spent(own_s: float) -> CpuTimes:
        return CpuTimes("a", (0, 1), 10.0, own_s, own + busy / 100, stolen / 100)

    load = load_of([spent(own / 2), spent(own / 2)])  # two workers on the same cores see each other
    assert load is not None and load.num_cores == 2
    assert (load.other_cores, load.stolen_cores) == pytest.approx((busy / 1000, stolen / 1000))


def test_the_most_disturbed_node_counts_and_a_slow_gpu_of_any(tmp_path: Path) -> None:
    quiet = CpuTimes("a", (0, 1), 10.0, 1.0, 1.0, 0.0, throttled="GPU 3 of a is too hot")
    load = load_of([quiet, CpuTimes("b", (0,), 10.0, 1.0, 7.0, 0.0)])
    assert load is not None
    assert (load.num_cores, load.other_cores, load.throttled) == (1, 0.6, ("GPU 3 of a is too hot",))
    assert load_of([]) is None


def test_processor_times_are_those_of_the_cores_that_may_be_used(tmp_path: Path) -> None:
    core, per_s = min(os.sched_getaffinity(0)), os.sysconf("SC_CLK_TCK")
    stat = tmp_path / "stat"
    stat.write_text(
        f"cpu 9 9 9 9 9 9 9 9 0 0\ncpu{core} 100 200 300 5000 60 7 8 50 0 0\ncpu99999 9 9 9 9 9 9 9 9 0 0\n"
    )
    found = cpu_times(stat)
    assert found is not None
    assert (found.busy_s, found.stolen_s) == pytest.approx((600 / per_s, 50 / per_s))
    assert cpu_times(tmp_path / "missing") is None


def test_facts_travel_as_json() -> None:
    facts = NodeFacts("here", system=CUDA_12, network=NetworkFacts(peers=PEER), gpus=GPU, pcie=PcieFacts(("00:01.0",)))
    assert NodeFacts.from_mapping(json.loads(json.dumps(facts.to_mapping()))) == facts


def test_this_machine_is_judged_in_sentences_with_advice_where_something_is_wrong(tmp_path: Path) -> None:
    found = paceline.doctor(folder=tmp_path)
    assert {finding.check for finding in found} >= {"torch", "/dev/shm", "run folder", "ulimit nofile"}
    assert all(finding.what.endswith(".") and finding.level in ("ok", "warning", "error") for finding in found)
    assert all(bool(finding.fix) == (finding.level != "ok") for finding in found)


def test_every_query_of_the_stand_in_exists_in_the_library() -> None:
    pynvml = importlib.import_module("pynvml")
    assert [name for name in HEALTHY if not hasattr(pynvml, name)] == []
