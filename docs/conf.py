"""The documentation site: `make docs` builds it without a network, and warnings are errors."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import generate

import paceline

project = "Paceline"
copyright = "The Paceline developers"
release = paceline.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["_build"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4

smartquotes = False  # quotes in tables belong to values

html_theme = "furo"
html_title = f"Paceline {release}"
html_theme_options = {
    "footer_icons": [],
    "light_css_variables": {"color-brand-primary": "#0b6e4f", "color-brand-content": "#0b6e4f"},
    "dark_css_variables": {"color-brand-primary": "#5fd3a8", "color-brand-content": "#5fd3a8"},
}
html_copy_source = False
html_show_sphinx = False

default_role = "code"  # docstrings write names in single backticks
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_class_signature = "separated"
python_use_unqualified_type_names = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False


def setup(app: Any) -> None:
    """Write the pages that follow from the program before any page is read."""
    app.connect("config-inited", lambda *_: generate.write_pages(Path(app.srcdir) / "reference" / "generated"))
