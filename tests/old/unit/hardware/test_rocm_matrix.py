"""Tables of rocm-smi --showtopo."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import ClusterError
from paceline.hardware.rocm_matrix import parse_rocm
from tests.data.topologies import load, text_of

PCIE = text_of("amd_pcie_4gpu")


def test_gpus_on_pcie() -> None:
    node = load("amd_pcie_4gpu").nodes[0]
    assert [device.numa_node for device in node.devices] == [0, 1, 3, 2]
    assert {link.label for link in node.links} == {"SYS"}
    same_socket = parse_rocm(PCIE.replace("   3  ", "   2  "))
    assert {link.label for link in same_socket.links} == {"PHB"}
    assert len(same_socket.links) == 6
    across, near = node.links[0].bytes_per_s, same_socket.links[0].bytes_per_s
    assert across and near and across < near


def test_two_links_in_a_row_carry_half_of_one() -> None:
    node = load("amd_mi250").nodes[0]
    assert {link.label for link in node.links} == {"XGMI"}
    direct, indirect = node.link("GPU0", "GPU1"), node.link("GPU0", "GPU3")
    assert direct and indirect and direct.bytes_per_s and indirect.bytes_per_s
    assert direct.bytes_per_s == 2 * indirect.bytes_per_s


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("Link Type between", "Kind between", ["link types"]),
        ("PCIE         PCIE         PCIE", "PCIE         PCIE", ["Row GPU0", "Link Type", "3 cells for 4 columns"]),
        ("0            PCIE", "0            QPI ", ["Row GPU0", "column GPU1", "'QPI'"]),
        ("0            PCIE", "0            XGMI", ["GPU0", "GPU1", "XGMI", "PCIE", "both directions"]),
        ("GPU1   PCIE", "GPU9   PCIE", ["row GPU9"]),
        ("GPU1   PCIE", "GPU0   PCIE", ["two rows GPU0"]),
        ("GPU1   PCIE", "CPU1   PCIE", ["column GPU1", "no row"]),
        ("0            52", "0            far", ["Row GPU0", "Weight", "'far'"]),
        ("       GPU0         GPU1", "       GPU1         GPU0", ["columns"]),
    ],
)
def test_a_broken_table_is_one_sentence(old: str, new: str, words: list[str]) -> None:
    assert old in PCIE
    with pytest.raises(ClusterError) as caught:
        parse_rocm(PCIE.replace(old, new, 1))
    assert all(word in str(caught.value) for word in words), caught.value


@given(st.data())
@settings(deadline=None)
def test_no_damage_is_a_traceback(data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(PCIE)))
    end = start + data.draw(st.integers(0, 200))
    text = PCIE[:start] + data.draw(st.sampled_from(["", "\n", "GPU0", "0 ", "XGMI", "==="])) + PCIE[end:]
    with contextlib.suppress(ClusterError):
        assert parse_rocm(text).devices
