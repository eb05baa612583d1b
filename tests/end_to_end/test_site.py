"""`make docs` builds a site without a broken link, and its search answers what users ask in the first result."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.kit.chromium import open_browser
from tests.kit.markdown import ROOT
from tests.kit.packages import need

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800), pytest.mark.budget(processor_s=300)]

QUESTIONS = {
    "resume on fewer GPUs": "questions/resume-on-fewer-gpus.html",
    "out of memory": "questions/out-of-memory.html",
    "accuracy drops with more GPUs": "questions/accuracy-drops-with-more-gpus.html",
    "rented GPUs": "tutorials/rented-gpus.html",
    "fine-tune transformers": "tutorials/fine-tune.html",
    "image folder": "tutorials/image-folder.html",
    "padded texts": "tutorials/padded-texts.html",
    "GRPO": "tutorials/preferences-and-rewards.html",
    "slow network": "tutorials/slow-network.html",
}
"""What is asked, and the page that should come first."""
FIRST_RESULT = """
    return new Promise((resolve) => {
        const last = Date.now() + 120000;
        const look = () => {
            const first = document.querySelector("#search-results li a");
            first || Date.now() > last ? resolve(first?.getAttribute("href") ?? "nothing") : setTimeout(look, 20);
        };
        look();
    });
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tree = tmp_path_factory.mktemp("site") / "tree"  # building writes the generated pages beside the others
    shutil.copytree(ROOT / "docs", tree / "docs", ignore=shutil.ignore_patterns("generated", "_build", "__pycache__"))
    for name in ("CONTRIBUTING.md", "CHANGELOG.md", "README.md"):
        shutil.copy(ROOT / name, tree / name)
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", "docs", "site"]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return tree / "site"


def test_every_page_and_the_whole_interface_are_on_the_site(site: Path) -> None:
    built = {path.relative_to(site).with_suffix("") for path in site.rglob("*.html")}
    written = {path.relative_to(ROOT / "docs").with_suffix("") for path in (ROOT / "docs").rglob("*.md")}
    assert written <= built
    python = (site / "reference" / "generated" / "python.html").read_text(encoding="utf-8")
    assert 'id="paceline.init"' in python and 'id="paceline.train"' in python


def test_the_search_answers_what_users_ask_in_the_first_result(site: Path, tmp_path: Path) -> None:
    need("chromium", "chromedriver")
    found = {}
    with open_browser(tmp_path) as browser:
        for question in QUESTIONS:
            browser.visit(f"{(site / 'search.html').as_uri()}?q={quote(question)}")
            found[question] = str(browser.run(FIRST_RESULT)).partition("#")[0]
    assert found == QUESTIONS
