"""The drawings of the concepts are those of their script, and the page shows all of them."""

from __future__ import annotations

import importlib
import xml.etree.ElementTree as ET

from tests.old.docs.blocks import ROOT

drawings = importlib.import_module("docs.drawings")


def test_the_files_are_what_the_script_draws_and_the_page_shows() -> None:
    shown = (ROOT / "docs" / "concepts.md").read_text(encoding="utf-8")
    drawn = {f"{name}.svg": draw().svg() for name, draw in drawings.DRAWINGS.items()}
    assert {path.name: path.read_text(encoding="utf-8") for path in drawings.FOLDER.iterdir()} == drawn
    for name, svg in drawn.items():
        ET.fromstring(svg)
        assert f"](pictures/{name})" in shown
