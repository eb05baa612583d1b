"""`paceline.watch`: a live page of runs, for a browser on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import secrets
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import PacelineError
from paceline.workflows.arguments import checked

if TYPE_CHECKING:
    from paceline.report.live_run import RunFollower

_HOST = "127.0.0.1"


@checked
def watch(runs: Iterable[Path | str] | Path | str, *, port: int = 0, announce: Callable[[str], object] = print) -> None:
    """Serve a page that shows runs side by side while they train, or afterwards, until Ctrl-C.

    Loss, throughput, where a step's time goes, evaluations, every worker's memory and processor time, events, and how
    the jobs of the runs differ. Only this machine can open it, and only with the secret in its address.

    Example: `paceline.watch("runs/mnist-lenet")`.

    Args:
        runs: run folders, or one of them; runs of different jobs too.
        port: port of the page on this machine; 0: any that is free.
        announce: receives the address.

    Raises:
        PacelineError: no such folder, a port that is taken, or no aiohttp.
    """
    from paceline.report.live_run import RunFollower

    folders = [Path(run) for run in ([runs] if isinstance(runs, Path | str) else runs)]
    if not folders:
        raise PacelineError("watch needs at least one run folder, such as runs/mnist-lenet.")
    followers = [RunFollower(folder) for folder in folders]
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(followers, port, announce))


async def _serve(followers: list[RunFollower], port: int, announce: Callable[[str], object]) -> None:
    try:
        from aiohttp import web
    except ImportError:
        raise PacelineError("watch needs aiohttp; pip install 'paceline[watch]'.") from None
    token = secrets.token_urlsafe(24)
    runner = web.AppRunner(_application(followers, token), access_log=None)
    await runner.setup()
    try:
        try:
            site = web.TCPSite(runner, _HOST, port)
            await site.start()
        except OSError as problem:
            raise PacelineError(f"Port {port} cannot be used ({problem.strerror}); choose another one.") from None
        announce(f"http://{_HOST}:{runner.addresses[0][1]}/{token}/")
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()


def _application(followers: list[RunFollower], token: str) -> Any:
    """The page, and what is new on it, below an address that holds the secret `token`."""
    from aiohttp import web

    from paceline.report.live_page import live_update, render_live_page

    def check(request: web.Request) -> None:
        if not hmac.compare_digest(request.match_info["token"].encode(), token.encode()):
            raise web.HTTPNotFound

    async def page(request: web.Request) -> web.Response:
        check(request)
        runs = await asyncio.to_thread(_read, followers)
        return web.Response(text=render_live_page(runs), content_type="text/html", headers=_HEADERS)

    async def now(request: web.Request) -> web.Response:
        check(request)
        runs = await asyncio.to_thread(_read, followers)
        return web.json_response(live_update(runs), headers=_HEADERS)

    application = web.Application()
    application.router.add_get("/{token}/", page)
    application.router.add_get("/{token}/now", now)
    return application


_HEADERS = {"Cache-Control": "no-store", "Referrer-Policy": "no-referrer", "X-Content-Type-Options": "nosniff"}


def _read(followers: list[RunFollower]) -> list[Any]:
    from paceline.hardware.nvml import gpu_use

    gpus = gpu_use()
    return [follower.read(gpus) for follower in followers]
