"""NCCL's own picture of a node."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import ClusterError
from paceline.hardware.nccl_xml import parse_nccl_xml
from tests.data.topologies import load, text_of

PCI = 'link_speed="16.0 GT/s PCIe" link_width="16"'
TWO_GPUS = f"""
<system version="1">
  <cpu numaid="0" affinity="00000003">
    <pci busid="0000:01:00.0" {PCI}>
      <pci busid="0000:02:00.0" {PCI}><gpu dev="0" sm="80"><nvlink target="0000:03:00.0" count="4" tclass="0x030200"/></gpu></pci>
      <pci busid="0000:03:00.0" {PCI}><gpu dev="1" sm="80"><nvlink target="0000:02:00.0" count="4" tclass="0x030200"/></gpu></pci>
    </pci>
  </cpu>
  <cpu numaid="1" affinity="0000000c"><nic><net name="eth0" speed="10000"/></nic></cpu>
</system>
"""  # noqa: E501


def test_direct_links_agree_with_the_matrix_of_the_same_machine() -> None:
    matrix, dump = load("dgx1").nodes[0], load("dgx1_4gpu").nodes[0]
    between_gpus = [link for link in dump.links if "NIC0" not in link.ends]
    assert len(between_gpus) == 6
    assert all(matrix.link(*link.ends) == link for link in between_gpus)
    assert [link.label for link in dump.links if "NIC0" in link.ends] == ["PIX", "PIX", "PHB", "PHB"]
    assert dump.peripherals[0].bytes_per_s == 100e9 / 8
    assert dump.devices[3].pci_bus_id == "0000:0b:00.0"
    assert dump.devices[0].cpus == (*range(20), *range(40, 60))


def test_switches_join_all_gpus() -> None:
    node = load("dgx_a100").nodes[0]
    gpu_links = [link for link in node.links if "NIC" not in link.ends[1]]
    assert {(link.label, link.bytes_per_s) for link in gpu_links} == {("NV12", 300e9)}
    assert [device.numa_node for device in node.devices] == [3, 3, 1, 1, 7, 7, 5, 5]
    assert node.devices[0].cpus == (*range(48, 64), *range(176, 192))
    links = {link.ends: link.label for link in node.links}
    assert links["GPU0", "NIC1"] == "PXB"
    assert links["GPU7", "NIC8"] == "PHB"
    assert links["GPU0", "NIC8"] == "SYS"


def test_a_card_without_pci_hangs_on_its_processor() -> None:
    node = parse_nccl_xml(TWO_GPUS)
    assert [(link.ends, link.label) for link in node.links] == [
        (("GPU0", "GPU1"), "NV4"),
        (("GPU0", "NIC0"), "SYS"),
        (("GPU1", "NIC0"), "SYS"),
    ]
    without_nvlink = TWO_GPUS.replace("nvlink", "c2c").replace('<gpu dev="0"', '<gpu dev="5"')
    assert [link.label for link in parse_nccl_xml(without_nvlink).links] == ["PIX", "SYS", "SYS"]
    assert [device.index for device in parse_nccl_xml(without_nvlink).devices] == [1, 5]
    rccl = parse_nccl_xml(TWO_GPUS.replace("nvlink", "xgmi"))
    assert rccl.links[0].label == "XGMI"


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("system", "topology", ["<topology>", "<system>"]),
        ("</system>", "", ["XML"]),
        ('count="4"', 'count="3"', ["GPU 0", "3 links", "GPU 1", "4"]),
        ('count="4"', 'count="many"', ["nvlink", "count='many'"]),
        ('dev="0"', 'dev="1"', ["two <gpu dev=1>"]),
        ('dev="0"', 'dev="-1"', ["dev='-1'"]),
        ('dev="0"', "", ["dev=''"]),
        ('numaid="0"', 'numaid="none"', ["numaid='none'"]),
        ('affinity="00000003"', 'affinity="all"', ["affinity", "'all'"]),
        ('busid="0000:01:00.0"', "", ["busid"]),
        ('speed="10000"', 'speed="fast"', ["speed='fast'"]),
        ("gpu", "tpu", ["no <gpu>"]),
        ("<system", '<!DOCTYPE system [<!ENTITY a "b">]><system', ["document type"]),
        ("<system", "<!doctype system><system", ["document type"]),
    ],
)
def test_a_broken_dump_is_one_sentence(old: str, new: str, words: list[str]) -> None:
    assert old in TWO_GPUS
    is_tag = old in ("system", "gpu")
    with pytest.raises(ClusterError) as caught:
        parse_nccl_xml(TWO_GPUS.replace(old, new, -1 if is_tag else 1))
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_deep_tree_is_no_recursion() -> None:
    depth = 3000
    deep = "<system>" + '<pci busid="0000:01:00.0">' * depth + '<gpu dev="0"/>' + "</pci>" * depth + "</system>"
    assert len(parse_nccl_xml(deep).devices) == 1


@given(st.data())
@settings(deadline=None)
def test_no_damage_is_a_traceback(data: st.DataObject) -> None:
    text = text_of(data.draw(st.sampled_from(["dgx1_4gpu", "dgx_a100"])))
    start = data.draw(st.integers(0, len(text)))
    end = start + data.draw(st.integers(0, 30))
    text = text[:start] + data.draw(st.sampled_from(["", '"', "<gpu", "-", "9" * 20, "\0", "\ud800"])) + text[end:]
    with contextlib.suppress(ClusterError):
        assert parse_nccl_xml(text).devices
