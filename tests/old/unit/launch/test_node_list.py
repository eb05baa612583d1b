"""Hosts on the command line and in files."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import LaunchError
from paceline.launch.node_list import NodeSlots, parse_node_list, read_node_file


def test_names_counts_users_and_addresses() -> None:
    assert parse_node_list("a:8, kim@b.example:4,10.0.0.7,[fd00::3]:2,kim@[fd00::4]") == (
        NodeSlots("a", 8),
        NodeSlots("kim@b.example", 4),
        NodeSlots("10.0.0.7", None),
        NodeSlots("fd00::3", 2),
        NodeSlots("kim@fd00::4", None),
    )


def test_a_file_in_every_manner(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_bytes(b"# a comment\r\n\r\n  gpu1 slots=8  # another\r\nkim@gpu2:4\n\tgpu3\n[fd00::3] slots=2")
    assert read_node_file(path) == (
        NodeSlots("gpu1", 8),
        NodeSlots("kim@gpu2", 4),
        NodeSlots("gpu3", None),
        NodeSlots("fd00::3", 2),
    )


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("a slots=0", "'0' should be the number of workers on a"),
        ("a slots=eight", "'eight' should be"),
        ("a slots=\u0663", "should be the number"),
        ("a:", "'' should be"),
        ("a:-1", "'-1' should be"),
        ("a:8 slots=8", "once"),
        ("a slots=8 slots=9", "once"),
        ("a 8", "'8' should be slots=N"),
        ("a slot=8", "'slot=8' should be slots=N"),
        ("a port=2222", "~/.ssh/config"),
        ("a -p2222", "~/.ssh/config"),
        ("-oProxyCommand=x", "is not the name of a node"),
        ("a;reboot", "is not the name of a node"),
        ("@a", "a user's name"),
        ("-x@a", "a user's name"),
        ("fd00::3", "in brackets, as in [fd00::3]"),
        ("[fd00:3]", "should be an IPv6 address"),
        ("[fd00::3", "is not the name of a node"),
    ],
)
def test_a_bad_line_is_named(line: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text(f"# nodes\n{line}\n")
    with pytest.raises(LaunchError) as caught:
        read_node_file(path)
    assert words in str(caught.value)
    assert str(caught.value).startswith(f"{path}, line 2: ")


def test_a_node_named_twice(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("gpu1:2\nkim@GPU1:2\n")
    with pytest.raises(LaunchError, match=r"line 2: kim@GPU1 was named before \(.*line 1\)"):
        read_node_file(path)
    with pytest.raises(LaunchError, match=r"entry 3: a was named before \(hosts, entry 1\)"):
        parse_node_list("a,b,a")


def test_nothing_named(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="entry 1: '' is not the name"):
        parse_node_list("")
    with pytest.raises(LaunchError, match="entry 2"):
        parse_node_list("a,,b")
    (tmp_path / "hosts").write_text("# nobody\n\n")
    with pytest.raises(LaunchError, match="names no node"):
        read_node_file(tmp_path / "hosts")
    with pytest.raises(LaunchError, match="cannot be read"):
        read_node_file(tmp_path / "absent")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(LaunchError, match="cannot be read"):
        read_node_file(tmp_path / "binary")


@given(st.text(max_size=40) | st.text("ab:[]@=,.-#1 \tslot", max_size=30))
def test_any_text_is_nodes_or_one_sentence(text: str) -> None:
    try:
        nodes = parse_node_list(text)
    except LaunchError as error:
        assert "\n" not in str(error)
    else:
        assert nodes
        assert not any(node.address.startswith("-") or set(node.address) & set(" ;$`'\"\\|&<>\n") for node in nodes)
