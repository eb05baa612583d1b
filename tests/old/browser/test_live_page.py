"""The live page in a real browser, served as `paceline watch` serves it."""

from __future__ import annotations

import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.chromium import Browser
from tests.old.browser.conftest import WAIT_UNTIL_DRAWN
from tests.old.live_runs import make_live_run, write_lines, write_status

pytestmark = pytest.mark.browser

WAIT_FOR_STEP = """
    return new Promise((resolve) => {
        const look = () => document.querySelector("#runs td:nth-of-type(3)").innerText === STEP
            ? resolve(true) : setTimeout(look, 50);
        look();
        setTimeout(() => resolve(false), 20000);
    });
"""


WAIT_UNTIL_IT_FITS = """
    return new Promise((resolve) => {
        const look = () => document.documentElement.scrollWidth <= innerWidth ? resolve(true) : setTimeout(look, 50);
        look();
        setTimeout(() => resolve(false), 20000);
    });
"""


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    found = [make_live_run(tmp_path / name, seed=seed) for seed, name in enumerate(("first", "second"))]
    for folder in found:
        write_status(folder, 120, at=time.time() + 3600)  # a busy machine must not make them look silent
    return found


@pytest.fixture
def address(folders: list[Path]) -> Iterator[str]:
    command = [sys.executable, "-m", "paceline", "watch", *map(str, folders)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            yield next(word for word in line.split() if word.startswith("http://"))
        finally:
            process.terminate()


def test_it_follows_runs_and_asks_only_its_server(browser: Browser, folders: list[Path], address: str) -> None:
    browser.look(width=1400)
    browser.log("browser")
    browser.requested_urls()
    browser.visit(address)
    assert browser.run(WAIT_UNTIL_DRAWN), browser.log("browser")
    assert browser.run(WAIT_FOR_STEP.replace("STEP", '"120"'))
    points = "return document.getElementById('plot-loss').data[0].y.length;"
    assert browser.run(points) == 120
    write_lines(folders[0], [{"step": 121, "loss": 0.1}, {"step": 122, "loss": 0.1}])
    assert browser.run(WAIT_FOR_STEP.replace("STEP", '"122"'))
    assert browser.run(points) == 122
    text = browser.run("return document.body.innerText;")
    for said in ("Workers of first", "Workers of second", "node1", "How their jobs differ", "Epoch 1 ended"):
        assert said in text
    assert all(url.startswith((address, "data:", "blob:")) for url in browser.requested_urls())
    assert browser.log("browser") == []
    browser.look(width=360)
    assert browser.run(WAIT_UNTIL_IT_FITS)


def test_without_the_secret_in_the_address_there_is_nothing(address: str) -> None:
    root = address[: address.rindex("/", 0, -1) + 1]
    for path in ("", "now", "x/", "x/now"):
        with pytest.raises(urllib.error.HTTPError) as found:
            urllib.request.urlopen(root + path, timeout=20)
        assert found.value.code == 404
        found.value.close()
    with urllib.request.urlopen(address + "now", timeout=20) as answer:
        assert answer.headers["Cache-Control"] == "no-store"
