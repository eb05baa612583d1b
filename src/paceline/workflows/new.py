"""`paceline.new`: a job file or a script from which users begin their own training."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from string import Template
from typing import Literal, get_args

from paceline.errors import JobError, shown
from paceline.workflows.arguments import checked

StarterName = Literal["images", "text", "tensors", "transformers"]

_FILES: dict[StarterName, str] = {
    "images": "images.toml",
    "text": "text.toml",
    "tensors": "tensors.py",
    "transformers": "transformers.py",
}


@checked
def new(kind: StarterName, data: str | Path, *, out: str | Path | None = None) -> Path:
    """Write a starter and return its path: a complete job file or script that trains on data of yours.

    Example: `paceline.new("images", "photos")`.

    Args:
        kind: "images" (a folder of class folders, a job file), "text" (a text file, a language model, a job file),
            "tensors" (arrays `inputs` and `targets` in an .npz file, a script), "transformers" (a CSV file with the
            columns `text` and `label`, a script that fine-tunes a classifier).
        data: the folder or file to train on.
        out: the file to write (default: train.toml or train.py here).

    Raises:
        JobError: an unknown kind, data that do not exist, or a file that exists already.
    """
    if kind not in get_args(StarterName):
        raise JobError(f"There is no starter {shown(kind)}; choose one of {', '.join(get_args(StarterName))}.")
    name = _FILES[kind]
    if not Path(data).exists():
        raise JobError(f"There is no {shown(str(data))} to train on; give the folder or file with your data.")
    path = Path(f"train{Path(name).suffix}" if out is None else out)
    if path.exists():
        raise JobError(f"{path} exists already, and nothing was written; name another file with out = FILE.")
    template = Template((resources.files("paceline") / "starters" / f"{name}.txt").read_text(encoding="utf-8"))
    # In a TOML or Python text in double quotes, only these two characters need care.
    quoted = str(Path(data).absolute()).replace("\\", "\\\\").replace('"', '\\"')
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(template.substitute(data=quoted, file=path.name), encoding="utf-8")
    return path
