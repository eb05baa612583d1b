"""Pages and drawings from the templates beside this file."""

from __future__ import annotations

import base64
import functools
from dataclasses import asdict
from importlib import resources

from jinja2 import Environment, PackageLoader, StrictUndefined

from paceline.report import formats
from paceline.words import listing


def render(name: str, **values: object) -> str:
    """A page or a drawing: style, data and plotting library inside, no address outside.

    A name in it without a value is an error; values are escaped.
    """
    return _environment().get_template(name).render(**values)


@functools.cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("paceline.report", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["drawing"] = asdict
    plotly = resources.files("paceline.report") / "plotly-basic.min.js.gz"
    packed = base64.b64encode(plotly.read_bytes()).decode()
    environment.globals |= {"f": formats, "plotly_gzip": packed, "listing": listing}
    return environment
