"""The page: what each run on the volume is doing, behind a password. A small one, until the real one takes its place.

Anyone who guesses its address can reach it, so without a password it shows nothing of the volume. It only reads.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import os
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import uvicorn
from jinja2 import Environment
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route

from bootstrap.volume import Volume, read_json
from bootstrap.volume_probe import disk_warning, find_mount
from entrypoint.curves import PREFIX, Curves
from entrypoint.environment import NOTES, POD_NOTES, PORTS, RUN
from entrypoint.progress import as_clock
from entrypoint.status import Status
from entrypoint.when_done import read_banner

NO_PASSWORD = "Set FLUXPOD_PASSWORD in the pod's environment and restart it: this page then shows its runs.\n"
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}

PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>fluxpod</title>
<meta http-equiv="refresh" content="10">
<style>
  body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 1rem auto; padding: 0 1rem }
  table { border-collapse: collapse } td, th { text-align: left; vertical-align: top; padding: .2rem 1rem .2rem 0 }
  .warning { border-left: .3rem solid #c00; padding-left: .6rem }
</style>
<h1>fluxpod</h1>
{% for warning in warnings %}<p class="warning">{{ warning }}</p>{% endfor %}
{% if runs %}
<table><tr><th>run</th><th>phase</th><th>step</th><th>left</th><th>loss</th><th>message</th><th>updated</th></tr>
{% for name, status in runs %}{% set figures = status.figures %}
<tr><td>{{ name }}</td><td>{{ status.phase }}</td><td>{{ status.step }}/{{ status.steps }}</td>
<td>{% if figures.left_s is not none %}{{ clock(figures.left_s) }}{% endif %}</td>
<td>{% if figures.loss is not none %}{{ "%.4f"|format(figures.loss) }}{% endif %}</td>
<td>{{ status.message }}{% if figures.validation %}<br>{{ figures.validation }}{% endif %}</td>
<td>{{ status.updated }}</td></tr>
{% endfor %}</table>
<p><a href="{{ curves }}/">Curves and samples in TensorBoard</a></p>
{% else %}<p>No run yet. Put a job into {{ jobs }}.</p>{% endif %}
</html>
"""


def make_page(volume: Volume, environ: Mapping[str, str], run: Path = RUN) -> Starlette:
    """The application. ``run``: where start.sh and the pod loop leave what they have to say, lists of strings."""
    password = environ.get("FLUXPOD_PASSWORD") or environ.get("JUPYTER_PASSWORD") or ""
    curves = Curves(volume.runs, environ)
    template = Environment(autoescape=True).from_string(PAGE)

    async def health(_: Request) -> Response:  # in no thread and without the volume, which may hang
        return PlainTextResponse("ok\n", headers=HEADERS)

    def refusal(request: Request) -> Response | None:
        if not password:
            return PlainTextResponse(NO_PASSWORD, headers=HEADERS)
        if not _knows(request, password):
            refused = {**HEADERS, "WWW-Authenticate": 'Basic realm="fluxpod", charset="UTF-8"'}
            return PlainTextResponse("A password is needed; any user name does.\n", 401, headers=refused)
        return None

    def page(request: Request) -> Response:
        if refused := refusal(request):
            return refused
        runs, warnings = read_runs(volume), read_warnings(volume, environ, run)
        return HTMLResponse(
            template.render(runs=runs, warnings=warnings, jobs=volume.jobs, clock=as_clock, curves=PREFIX),
            headers=HEADERS,
        )

    async def tensorboard(request: Request) -> Response:
        if refused := refusal(request):
            return refused
        address = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        body = await request.body()
        found = await run_in_threadpool(curves.ask, request.method, address, request.headers, body)
        return Response(found.body, found.status, found.headers)

    @asynccontextmanager
    async def life(_: Starlette) -> AsyncIterator[None]:
        yield
        curves.close()

    boards = [Route(path, tensorboard, methods=["GET", "POST"]) for path in (PREFIX, f"{PREFIX}/{{path:path}}")]
    return Starlette(routes=[Route("/health", health), Route("/", page), *boards], lifespan=life)


def _knows(request: Request, password: str) -> bool:
    """Whether the request carries the password; comparing takes the same time for any wrong one."""
    scheme, _, value = request.headers.get("Authorization", "").partition(" ")
    try:
        given = base64.b64decode(value, validate=True).partition(b":")[2]
    except (binascii.Error, ValueError):
        return False
    return scheme.lower() == "basic" and hmac.compare_digest(given, os.fsencode(password))


def read_runs(volume: Volume) -> list[tuple[str, Status]]:
    """Every run that has a status, by name."""
    try:
        names = sorted(entry.name for entry in volume.runs.iterdir())
    except OSError:
        return []
    found = []
    for name in names:
        try:
            status = Status.read(volume.run(name).status)
        except OSError:
            continue
        if status:
            found.append((name, status))
    return found


def read_warnings(volume: Volume, environ: Mapping[str, str], run: Path) -> list[str]:
    """What a person should know first: still billing, nothing kept, a pod or an environment that is not as meant."""
    warnings = []
    with suppress(OSError):
        if billing := read_banner(volume, environ):
            warnings.append(f"STILL BILLING: {billing.message}")
    disk = disk_warning(volume.root, find_mount(volume.root))  # known here even if the pod loop does not start
    warnings += [disk] if disk else []
    for notes in (POD_NOTES, NOTES):
        told = _read(run / notes)
        warnings += [str(note) for note in told if not (disk and disk in str(note))] if isinstance(told, list) else []
    return warnings


def _read(path: Path) -> Any | None:
    try:
        return read_json(path)
    except OSError:
        return None


def main() -> int:
    """Serves the page until a signal comes."""
    volume = Volume(Path(os.environ.get("FLUXPOD_VOLUME") or "/workspace"))
    port = int(os.environ.get("FLUXPOD_PAGE_PORT") or PORTS["FLUXPOD_PAGE_PORT"])
    page = make_page(volume, os.environ)
    uvicorn.run(
        page,
        host="0.0.0.0",
        port=port,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=2,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
