"""The page templates beside this file."""

from __future__ import annotations

from collections.abc import Callable
from importlib import resources

from jinja2 import Environment, FunctionLoader, StrictUndefined, Template


def read(name: str) -> str:
    """A file of this package as text."""
    return (resources.files("paceline.report") / name).read_text(encoding="utf-8")


def template(name: str, **filters: Callable[[str], str]) -> Template:
    """The template of that name; what it names and is not given is an error, what it is given is escaped."""
    environment = Environment(
        loader=FunctionLoader(read), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(filters)
    return environment.get_template(name)
