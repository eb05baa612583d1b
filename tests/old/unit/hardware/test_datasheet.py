"""Bandwidth by label: the published figures, and an order that a nearer link never breaks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.hardware.datasheet import PcieLanes, link_bytes_per_s


@pytest.mark.parametrize(
    ("name", "label", "gb_per_s"),
    [
        ("Tesla P100-SXM2-16GB", "NV4", 80),  # white papers: 160 GB/s in both directions together
        ("Tesla V100-SXM2-32GB", "NV6", 150),
        ("NVIDIA A100-SXM4-40GB", "NV12", 300),
        ("NVIDIA A800-SXM4-80GB", "NV8", 200),
        ("NVIDIA A30", "NV4", 100),
        ("NVIDIA RTX A6000", "NV4", 56.25),
        ("NVIDIA GeForce RTX 3090", "NV4", 56.25),
        ("NVIDIA A40", "NV4", 56.25),
        ("NVIDIA H100 80GB HBM3", "NV18", 450),
        ("NVIDIA H100 PCIe", "NV12", 300),
        ("NVIDIA H800", "NV8", 200),
        ("NVIDIA H200", "NV18", 450),
        ("NVIDIA GH200 480GB", "NV18", 450),
        ("NVIDIA B200", "NV18", 900),
        ("NVIDIA GB200", "NV18", 900),
        ("NVIDIA B300 SXM6 AC", "NV18", 900),
        ("", "NV2", 50),
        ("Some GPU of tomorrow", "NV2", 50),
        ("Tesla V100-PCIE-16GB", "PXB", 12),
        ("Tesla T4", "PHB", 10),
        ("Tesla V100-PCIE-16GB", "SYS", 6),
        ("NVIDIA L40S", "PIX", 24),
        ("NVIDIA GeForce RTX 4090", "SYS", 10),
        ("NVIDIA RTX 6000 Ada Generation", "NODE", 20),
        ("NVIDIA H200", "PIX", 48),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "PHB", 40),
        ("NVIDIA B200", "SYS", 22),
    ],
)
def test_published_figures(name: str, label: str, gb_per_s: float) -> None:
    assert link_bytes_per_s(label, [name]) == pytest.approx(gb_per_s * 1e9)


def test_no_figure() -> None:
    assert link_bytes_per_s("X") is None
    assert link_bytes_per_s("") is None


def test_the_slower_end_decides() -> None:
    assert link_bytes_per_s("NV2", ["Tesla V100", "Tesla P100"]) == 40e9
    assert link_bytes_per_s("PIX", ["NVIDIA H100", "Tesla T4"]) == 12e9
    assert link_bytes_per_s("PIX", ["NVIDIA H100"], [PcieLanes(32.0), PcieLanes(16.0, 4)]) == 6e9
    assert link_bytes_per_s("NV2", ["Tesla V100"], [PcieLanes(8.0, 1)]) == 50e9


def test_lanes_before_generation_3_lose_a_fifth_to_coding() -> None:
    assert PcieLanes(5.0).bytes_per_s == pytest.approx(6e9)


@given(st.sampled_from([2.5, 5.0, 8.0, 16.0, 32.0, 64.0]), st.sampled_from([1, 2, 4, 8, 16]))
def test_a_nearer_link_is_never_slower(speed_gt_per_s: float, num_lanes: int) -> None:
    lanes = [PcieLanes(speed_gt_per_s, num_lanes)]
    rates = [link_bytes_per_s(label, lanes=lanes) or 0 for label in ("PIX", "PXB", "PHB", "NODE", "SYS")]
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] > 0
