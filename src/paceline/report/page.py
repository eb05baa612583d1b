"""Pages and drawings from the templates beside this file."""

from __future__ import annotations

import base64
import functools
import re
from dataclasses import asdict
from importlib import resources

from jinja2 import Environment, FunctionLoader, StrictUndefined

from paceline.report import formats
from paceline.words import listing

_FOLDER = resources.files("paceline.report")


def render(name: str, **values: object) -> str:
    """A page, a part of one, or a drawing: style, data and plotting library inside, no address outside.

    What it names and is not given is an error, what it is given is escaped.
    """
    return _environment().get_template(name).render(**values)


@functools.cache
def _environment() -> Environment:
    environment = Environment(
        loader=FunctionLoader(lambda name: (_FOLDER / name).read_text(encoding="utf-8")),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"tie": _tie, "drawing": asdict, "px": "{:.1f}".format, "printable": _printable}
    plotly = base64.b64encode((_FOLDER / "plotly-basic.min.js.gz").read_bytes()).decode()
    environment.globals |= {"f": formats, "plotly_gzip": plotly, "listing": listing}
    return environment


def _tie(text: str) -> str:
    """Keep a number and its unit on one line; what is escaped already stays so."""
    return type(text)(re.sub(r"(?<=\d) (?=%|devices?\b|points?\b|m?s\b)", "\N{NO-BREAK SPACE}", text))


def _printable(text: str) -> str:
    """Fit for XML, which has no place for control characters."""
    return "".join(letter for letter in text if letter.isprintable())
