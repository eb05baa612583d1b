"""The documentation site builds without a warning: no broken link, no page that nothing leads to."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    tree = tmp_path / "tree"  # building writes the generated pages beside the others
    shutil.copytree(ROOT / "docs", tree / "docs", ignore=shutil.ignore_patterns("generated", "_build", "__pycache__"))
    for name in ("CONTRIBUTING.md", "CHANGELOG.md", "README.md"):
        shutil.copy(ROOT / name, tree / name)
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", "docs", "site"]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = {str(path.relative_to(tree / "site")) for path in (tree / "site").rglob("*.html")}
    assert {"index.html", "own-model.html", "reference/generated/job-keys.html", "glossary.html"} <= pages
    python = (tree / "site" / "reference" / "generated" / "python.html").read_text(encoding="utf-8")
    assert 'id="paceline.train"' in python and 'id="paceline.errors.JobError"' in python
