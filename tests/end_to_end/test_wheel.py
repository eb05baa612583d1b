"""What `pip install` brings: a wheel with every file of the package, which trains and writes its page where nothing
else of this checkout is."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from email.parser import Parser
from pathlib import Path

import pytest
import torch

import paceline
from tests.kit.commands import user_environ
from tests.kit.markdown import ROOT

pytestmark = [pytest.mark.timeout(900), pytest.mark.budget(processor_s=60)]

SOURCES = ("pyproject.toml", "README.md", "LICENSE", "src")
BUILD = """
import sys
from setuptools import build_meta
folder = sys.argv[1]  # building changes sys.argv
build_meta.build_sdist(folder)
build_meta.build_wheel(folder)
"""


def run(command: Sequence[str | Path], cwd: Path, **extra: str) -> str:
    """The standard output of a program that must succeed."""
    done = subprocess.run(
        command, cwd=cwd, env=user_environ(**extra), capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with a source distribution and a wheel, built from a copy of the sources."""
    tree, dist = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("dist")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(ROOT / name, tree / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, tree / name)
    run([sys.executable, "-c", BUILD, dist], tree)
    return dist


def test_the_wheel_holds_every_file_of_the_package_and_its_licences(built: Path) -> None:
    package = ROOT / "src" / "paceline"
    files = {path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    (wheel,), (sdist,) = built.glob("*.whl"), built.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata_name,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(metadata_name).decode())
    assert {f"paceline/{path.relative_to(package)}" for path in files} - names == set()
    assert metadata["Version"] == paceline.__version__
    assert metadata["License-Expression"] == "Apache-2.0 AND MIT"  # plotly.js is MIT
    assert any(name.endswith("licenses/LICENSE") for name in names)
    with tarfile.open(sdist) as archive:
        sources = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "src/paceline/__init__.py"} <= sources


def test_the_installed_wheel_trains_and_writes_its_page(built: Path, tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    run([sys.executable, "-m", "venv", "--without-pip", venv], tmp_path)
    python = str(venv / "bin" / "python")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--disable-pip-version-check"]
    run([*pip, "--no-deps", "--no-index", *map(str, built.glob("*.whl"))], tmp_path)
    # Its dependencies come from this environment; a package that is installed there in place is not found by this path.
    (site,) = (venv / "lib").glob("python*/site-packages")
    assert torch.__file__ is not None
    (site / "dependencies.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")

    path = f"{venv / 'bin'}:{os.environ['PATH']}"
    where = run([python, "-c", "import paceline; print(paceline.__file__)"], tmp_path, PATH=path, PYTHONPATH="")
    assert where.startswith(str(venv))

    def installed_paceline(*words: str) -> str:
        return run([venv / "bin" / "paceline", *words], tmp_path, PATH=path, PYTHONPATH="")

    assert installed_paceline("--version").split() == ["paceline", paceline.__version__]
    said = installed_paceline("train", "digits-lenet", "-n", "2", "--max-steps", "3", "--out", "run", "--json")
    assert json.loads(said)["steps"] == 3
    installed_paceline("report", "run", "--out", "page")
    assert "<html" in (tmp_path / "page" / "report.html").read_text(encoding="utf-8")


def test_one_version_everywhere() -> None:
    assert f"version: {paceline.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"## {paceline.__version__} " in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("recipe", ["Dockerfile", "paceline.def"])
def test_an_image_recipe_copies_files_that_exist(recipe: str) -> None:
    text = (ROOT / recipe).read_text(encoding="utf-8")
    for name in ("constraints.txt", *SOURCES):
        assert name in text and (ROOT / name).exists()
