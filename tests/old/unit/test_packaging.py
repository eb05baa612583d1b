"""The wheel and the source distribution hold all that the package needs, and work where nothing else of it is."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import paceline

ROOT = Path(__file__).parents[3]
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "src")
BUILD = """
import sys
from setuptools import build_meta
folder = sys.argv[1]  # building changes sys.argv
build_meta.build_sdist(folder)
build_meta.build_wheel(folder)
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A source distribution and a wheel, built from a copy of the sources."""
    tree, dist = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("dist")
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            shutil.copy(source, tree / name)
    done = subprocess.run(
        [sys.executable, "-c", BUILD, str(dist)], cwd=tree, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (sdist,), (wheel,) = dist.glob("*.tar.gz"), dist.glob("*.whl")
    return sdist, wheel


@pytest.mark.slow
def test_the_wheel_holds_every_file_of_the_package(built: tuple[Path, Path]) -> None:
    _, wheel = built
    package = ROOT / "src" / "paceline"
    expected = {
        f"paceline/{path.relative_to(package)}"
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata_name,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(metadata_name).decode())
    assert expected - names == set()
    assert metadata["Version"] == paceline.__version__
    assert metadata["License-Expression"] == "Apache-2.0 AND MIT"  # plotly.js is MIT
    assert any(name.endswith("licenses/LICENSE") for name in names)


@pytest.mark.slow
def test_the_source_distribution_can_be_built_from(built: tuple[Path, Path]) -> None:
    sdist, _ = built
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "src/paceline/recipes/digits-lenet.toml"} <= names


@pytest.mark.slow
def test_the_installed_wheel_trains_and_writes_its_page(built: tuple[Path, Path], tmp_path: Path) -> None:
    _, wheel = built
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True, timeout=120)
    python = venv / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*install, "--disable-pip-version-check", str(wheel)], check=True, timeout=200)
    # Its dependencies come from this environment. A package that is installed there in place is not found by this path.
    (site,) = (venv / "lib").glob("python*/site-packages")
    (site / "dependencies.pth").write_text(_dependencies() + "\n")

    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment["PATH"] = f"{venv / 'bin'}:{environment['PATH']}"

    def paceline_(*words: str) -> str:
        done = subprocess.run(
            [str(venv / "bin" / "paceline"), *words],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=250,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    where = subprocess.run(
        [str(python), "-c", "import paceline; print(paceline.__file__)"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert where.stdout.startswith(str(venv))
    assert paceline_("--version").split() == ["paceline", paceline.__version__]
    assert "digits-lenet" in paceline_("jobs", "ls")
    said = paceline_("train", "digits-lenet", "-n", "2", "--max-steps", "3", "--out", "run", "--json")
    assert json.loads(said)["steps"] == 3
    paceline_("report", "run", "--out", "page")
    assert "<html" in (tmp_path / "page" / "report.html").read_text(encoding="utf-8")


def _dependencies() -> str:
    """The folder that torch and the other dependencies lie in."""
    import torch

    assert torch.__file__ is not None
    return str(Path(torch.__file__).parents[1])


def test_one_version_everywhere() -> None:
    assert f"version: {paceline.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"## {paceline.__version__} " in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("recipe", ["Dockerfile", "paceline.def"])
def test_image_recipes_copy_files_that_exist(recipe: str) -> None:
    text = (ROOT / recipe).read_text(encoding="utf-8")
    for name in ("constraints.txt", "pyproject.toml", "README.md", "LICENSE", "src"):
        assert name in text
        assert (ROOT / name).exists()
