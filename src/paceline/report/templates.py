"""The page templates beside this file."""

from __future__ import annotations

import base64
import re
from importlib import resources
from importlib.resources.abc import Traversable

from jinja2 import Environment, FunctionLoader, StrictUndefined

from paceline.report import formats
from paceline.report.figure import TEMPLATE


def render(name: str, **values: object) -> str:
    """The page of that template: style, data and plotting library inside, no address outside.

    What it names and is not given is an error, what it is given is escaped.
    """
    page = _environment().get_template(name)
    plotly = base64.b64encode(_path("plotly-basic.min.js.gz").read_bytes()).decode()
    return page.render(f=formats, style=_read("page.css"), plotly_gzip=plotly, template=TEMPLATE, **values)


def render_part(name: str, **values: object) -> str:
    """A part of a page, by itself."""
    return _environment().get_template(name).render(f=formats, **values)


def render_svg(name: str, **values: object) -> str:
    """The drawing of that template, in the same way."""
    return _environment().get_template(name).render(**values) + "\n"


def _environment() -> Environment:
    environment = Environment(
        loader=FunctionLoader(_read), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"tie": _tie, "px": "{:.1f}".format, "short": shortened, "printable": _printable}
    return environment


def _read(name: str) -> str:
    """A file of this package as text."""
    return _path(name).read_text(encoding="utf-8")


def _path(name: str) -> Traversable:
    return resources.files("paceline.report") / name


def _tie(text: str) -> str:
    """Keep a number and its unit on one line; what is escaped already stays so."""
    return type(text)(re.sub(r"(?<=\d) (?=%|devices?\b|points?\b|m?s\b)", "\N{NO-BREAK SPACE}", text))


def shortened(text: str, most: int) -> str:
    """At most so many letters; an ellipsis stands for the rest."""
    return text if len(text) <= most else text[: most - 1] + "\N{HORIZONTAL ELLIPSIS}"


def _printable(text: str) -> str:
    """Fit for XML, which has no place for control characters."""
    return "".join(letter for letter in text if letter.isprintable())
