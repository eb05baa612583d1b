"""The documentation site builds without a warning, and its search answers what users ask in the first result."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.kit import chromium

ROOT = Path(__file__).parents[3]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1000)]
QUESTIONS = {
    "resume on fewer GPUs": "questions/resume-on-fewer-gpus.html",
    "out of memory": "questions/out-of-memory.html",
    "CUDA out of memory": "questions/out-of-memory.html",
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
        const first = () => document.querySelector("#search-results li a");
        const answer = () => first() ? first().getAttribute("href") : "nothing";
        const observer = new MutationObserver(() => first() && resolve(answer()));
        observer.observe(document.body, { childList: true, subtree: true });
        setTimeout(() => resolve(answer()), first() ? 0 : 20000);
    });
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; no broken link, no page that nothing leads to."""
    tree = tmp_path_factory.mktemp("site") / "tree"  # building writes the generated pages beside the others
    shutil.copytree(ROOT / "docs", tree / "docs", ignore=shutil.ignore_patterns("generated", "_build", "__pycache__"))
    for name in ("CONTRIBUTING.md", "CHANGELOG.md", "README.md"):
        shutil.copy(ROOT / name, tree / name)
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", "docs", "site"]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return tree / "site"


def test_the_site_has_its_pages(site: Path) -> None:
    pages = {str(path.relative_to(site)) for path in site.rglob("*.html")}
    assert {
        "index.html",
        "own-model.html",
        "reference/generated/job-keys.html",
        "glossary.html",
        "tutorials/rented-gpus.html",
    } <= pages
    python = (site / "reference" / "generated" / "python.html").read_text(encoding="utf-8")
    assert 'id="paceline.train"' in python and 'id="paceline.errors.JobError"' in python


@pytest.mark.browser
@pytest.mark.skipif(chromium.missing() is not None, reason=str(chromium.missing()))
def test_the_search_answers_what_users_ask_in_the_first_result(site: Path, tmp_path: Path) -> None:
    found = {}
    with chromium.open_browser(tmp_path) as browser:
        for question in QUESTIONS:
            browser.visit(f"{(site / 'search.html').as_uri()}?q={quote(question)}")
            found[question] = browser.run(FIRST_RESULT).partition("#")[0]
    assert found == QUESTIONS
