"""A headless Chromium driven through chromedriver's W3C protocol with the standard library alone."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

START_S, REQUEST_S = 60, 240

_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


class Browser:
    """One browser session; `open_browser` ends it."""

    def __init__(self, address: str, profile: Path) -> None:
        self._address = address
        options = {"args": [*_FLAGS, f"--user-data-dir={profile}"], "binary": shutil.which("chromium")}
        wanted = {
            "browserName": "chrome",
            "goog:chromeOptions": options,
            "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
        }
        session = self._call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self._session = f"/session/{session['sessionId']}"

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self._address + path, data=data, method=method, headers={"Content-Type": "application/json"}
        )
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=REQUEST_S) as reply:
            return json.load(reply)["value"]

    def quit(self) -> None:
        self._call("DELETE", self._session)

    def cdp(self, command: str, **params: Any) -> Any:
        """A Chrome DevTools Protocol command."""
        return self._call("POST", f"{self._session}/goog/cdp/execute", {"cmd": command, "params": params})

    def look(self, *, width: int, height: int = 900, scheme: Literal["light", "dark"] = "light") -> None:
        """The size of the window and the colour scheme the user prefers, from now on."""
        self.cdp(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        self.cdp("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def open(self, page: Path) -> None:
        self.visit(page.resolve().as_uri())

    def visit(self, address: str) -> None:
        self._call("POST", f"{self._session}/url", {"url": address})

    def run(self, script: str) -> Any:
        """What the body of a function `script` returns; a promise is waited for."""
        return self._call("POST", f"{self._session}/execute/sync", {"script": script, "args": []})

    def log(self, kind: Literal["browser", "performance"]) -> list[dict[str, Any]]:
        """Entries since the last call."""
        entries: list[dict[str, Any]] = self._call("POST", f"{self._session}/se/log", {"type": kind})
        return entries

    def requested_urls(self) -> list[str]:
        """Every address the browser asked for since the last call, the page itself included."""
        messages = (json.loads(entry["message"])["message"] for entry in self.log("performance"))
        return [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]

    def print(self) -> bytes:
        """The page on A4 paper, as PDF."""
        printed = self.cdp("Page.printToPDF", paperWidth=8.27, paperHeight=11.69, printBackground=True)
        return base64.b64decode(printed["data"])


@contextmanager
def open_browser(profile: Path) -> Iterator[Browser]:
    """A browser with a profile of its own, ended with its driver when the block ends."""
    driver = subprocess.Popen(
        [shutil.which("chromedriver") or "chromedriver", "--port=0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        browser = Browser(f"http://127.0.0.1:{_port(driver)}", profile)
        try:
            yield browser
        finally:
            browser.quit()
    finally:
        driver.terminate()
        try:
            driver.wait(timeout=10)
        except subprocess.TimeoutExpired:
            driver.kill()
            driver.wait()
        if driver.stdout is not None:
            driver.stdout.close()


def _port(driver: subprocess.Popen[str]) -> int:
    """The port chromedriver says it listens on; `START_S` is how long it may take to say so."""
    assert driver.stdout is not None
    watchdog = threading.Timer(START_S, driver.kill)  # a killed driver closes its output, which ends the loop
    watchdog.start()
    try:
        for line in driver.stdout:
            if found := re.search(r"started successfully on port (\d+)", line):
                return int(found.group(1))
    finally:
        watchdog.cancel()
    raise RuntimeError("chromedriver did not start")
