"""Pictures of every page: wide and narrow, light and dark, and on paper.

    python -m tests.old.browser.pictures FOLDER [--only plan] [--site runs/docs]

The pages are made of the samples that the tests use. Beside the pictures, the size of each page and the number of its
printed pages are written to sizes.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Literal

from paceline.plan.forecast import counts_between, forecast
from paceline.plan.inputs import ForecastRequest
from paceline.plan.pick import pick
from paceline.report.comm_page import render_comm_page
from paceline.report.page import render_page
from paceline.report.plan_page import render_plan_page
from paceline.report.study import analyse
from paceline.report.topology_svg import draw_topology
from paceline.spec import Cluster, Job
from paceline.workflows.step_times import fit_step_times
from tests.data import topologies
from tests.kit.chromium import Browser, open_browser
from tests.old.browser.conftest import WAIT_UNTIL_DRAWN
from tests.old.live_runs import make_live_run, write_status
from tests.old.sample_clusters import cpu_cluster, gpu_cluster
from tests.old.sample_records import sample_grown_records, sample_job, sample_study_records
from tests.old.sample_timings import sample_timings

SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
WIDTHS = (1400, 360)
_MOST_WAITS = 10
"""Of 20 s each, for a page that is drawn on a busy machine."""
SITE_PAGES = ("index.html", "own-model.html")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", help="pages whose name begins with this")
    parser.add_argument("--site", type=Path, help="the documentation site, built")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    pages = _write_pages(options.folder)
    if options.site is not None:
        pages |= {f"site-{Path(name).stem}": options.site / name for name in SITE_PAGES}
    addresses = {name: page.resolve().as_uri() for name, page in pages.items()}
    lines = ["| page | KB | printed pages |", "|---|---|---|"]
    wants_live = any(name.startswith(options.only) for name in ("watch", "compare"))
    served: AbstractContextManager[dict[str, str]] = _watched(options.folder) if wants_live else nullcontext({})
    with served as live, open_browser(options.folder / "profile") as browser:
        for name, address in (addresses | live).items():
            if not name.startswith(options.only):
                continue
            num_printed = _take(browser, name, address, options.folder)
            size = f"{pages[name].stat().st_size / 1000:.0f}" if name in pages else "served"
            lines.append(f"| {name} | {size} | {num_printed} |")
            print(lines[-1], flush=True)
    (options.folder / "sizes.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _take(browser: Browser, name: str, address: str, folder: Path) -> int:
    """The pictures of one page; returns how many pages it prints on."""
    for width in WIDTHS:
        for scheme in SCHEMES:
            browser.look(width=width, scheme=scheme)
            browser.visit(address)
            if "site-" not in name and not address.endswith(".svg"):
                assert any(browser.run(WAIT_UNTIL_DRAWN) for _ in range(_MOST_WAITS)), browser.log("browser")
            browser.screenshot(folder / f"{name}-{width}-{scheme}.png")
    browser.look(width=1400)
    paper = browser.print()
    (folder / f"{name}.pdf").write_bytes(paper)
    return len(re.findall(rb"/Type\s*/Page\b", paper))


def _write_pages(folder: Path) -> dict[str, Path]:
    job = Job(global_batch_size=1024, virtual_shards=1024)
    run = ForecastRequest(price_per_device_hour=2.5, currency="EUR")
    target = ForecastRequest(price_per_device_hour=2.5, currency="EUR", noise_scale=3000, target_samples=1e8)
    documents = {
        "study": render_page(analyse(sample_grown_records(), grow="batch", tolerance=0.01)),
        "study-bitwise": render_page(
            analyse(sample_study_records(job=sample_job(parity="bitwise")), grow="none", tolerance=0.01)
        ),
        "study-two": render_page(analyse(sample_study_records((1, 2), (0,)), grow="none", tolerance=0.01)),
        "plan": render_plan_page(forecast(job, _sized(gpu_cluster()), [1, 2, 3, 4, 8, 16], run)),
        "plan-many": render_plan_page(forecast(job, gpu_cluster(), counts_between(1, 1024), target)),
        "plan-shards": render_plan_page(
            forecast(Job(global_batch_size=64, virtual_shards=4), _sized(cpu_cluster(4)), [1, 2, 3, 4, 8], run)
        ),
        "comm": render_comm_page(sample_timings()),
        "fit": _fitted(folder),
    }
    paths = {}
    for name, text in documents.items():
        paths[name] = folder / f"{name}.html"
        paths[name].write_text(text, encoding="utf-8")
    node = topologies.load("dgx1").nodes[0]
    paths["topology"] = folder / "topology.svg"
    paths["topology"].write_text(draw_topology(node, pick(node, 4).ring.devices), encoding="utf-8")
    return paths


def _sized(cluster: Cluster) -> Cluster:
    """The cluster whose probe saw the job's data set, so that time and price of a whole run are known."""
    return dataclasses.replace(
        cluster, timings=tuple(dataclasses.replace(timing, num_samples=5_000_000) for timing in cluster.timings)
    )


def _fitted(folder: Path) -> str:
    """The page of forecasts from measured steps alone."""
    head = "num_nodes,devices_per_node,micro_batch_size"
    observed, asked = folder / "observed.csv", folder / "asked.csv"
    observed.write_text(f"{head},step_time_s\n1,1,64,0.310\n1,2,64,0.331\n1,4,64,0.352\n", encoding="utf-8")
    asked.write_text(f"{head}\n1,8,64\n2,8,64\n4,8,64\n", encoding="utf-8")
    return fit_step_times(observed, asked).page()


@contextmanager
def _watched(folder: Path) -> Iterator[dict[str, str]]:
    """Addresses at which `paceline watch` shows one run, and compares two."""
    runs = folder / f"runs-{time.time_ns()}"
    folders = [make_live_run(runs / name, seed=seed) for seed, name in enumerate(("first", "second"))]
    for one in folders:
        write_status(one, 120, at=time.time() + 3600)  # they shall not look silent
    servers = []
    try:
        addresses = {}
        for name, shown in (("watch", folders[:1]), ("compare", folders)):
            command = [sys.executable, "-m", "paceline", "watch", *map(str, shown)]
            servers.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            assert servers[-1].stdout is not None
            line = servers[-1].stdout.readline()
            addresses[name] = next(word for word in line.split() if word.startswith("http://"))
        yield addresses
    finally:
        for server in servers:
            server.terminate()
            server.wait(timeout=30)


if __name__ == "__main__":
    main()
