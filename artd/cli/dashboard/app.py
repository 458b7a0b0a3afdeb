"""The dashboard's web application: static files, JSON under /api, server-sent events, /metrics, /healthz and /readyz.

It reads the data folder and writes nothing. JSON answers have the shapes of `views`; errors are {"error", "next"}.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from artd.cli import show
from artd.cli.outcome import NOT_FOUND, USAGE, CliError
from artd.cli.status.snapshot import take

from . import prometheus, views
from .auth import Guard
from .live import Watcher

STATIC = Path(__file__).with_name("static")
MOST = (1 << 63) - 1
"""The largest id that an SQLite column stores."""
STATUS = {NOT_FOUND: 404, USAGE: 400}


def make_app(data: Path, token: str) -> Starlette:
    """Return the application over the data folder `data`; whoever reads it needs `token`."""
    watcher = Watcher(data)

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watcher.run)
            yield
            tasks.cancel_scope.cancel()
        watcher.close()

    async def read(work: Callable[..., Any], *args: Any) -> Response:
        return _json(await anyio.to_thread.run_sync(work, data, *args))

    async def overview(_request: Request) -> Response:
        return await read(views.overview)

    async def runs(_request: Request) -> Response:
        return await read(views.runs)

    async def curves(request: Request) -> Response:
        return await read(views.curves, request.path_params["run"], request.query_params.getlist("name"))

    async def timeline(request: Request) -> Response:
        return await read(views.timeline, request.path_params["run"], _number(request, "limit", 20, 100))

    async def table(request: Request) -> Response:
        return await read(views.table, request.path_params["what"], _page(request))

    async def trajectory(request: Request) -> Response:
        return await read(views.trajectory, min(request.path_params["id"], MOST))

    async def live(_request: Request) -> Response:
        return StreamingResponse(watcher.stream(), media_type="text/event-stream")

    async def metrics(_request: Request) -> Response:
        return Response(await anyio.to_thread.run_sync(prometheus.render, data), media_type=prometheus.TYPE)

    async def health(request: Request) -> Response:
        found = await anyio.to_thread.run_sync(take, data)
        served = found.run is not None and found.run["served"] >= 0
        well = found.health == "ok" if request.url.path == "/healthz" else found.daemon.running and served
        told = {"health": found.health, "problems": [problem.what for problem in found.problems]}
        return _json(told, 200 if well else 503)

    return Starlette(
        routes=[
            Route("/", lambda _request: FileResponse(STATIC / "index.html")),
            Route("/api/overview", overview),
            Route("/api/runs", runs),
            Route("/api/runs/{run}/metrics", curves),
            Route("/api/runs/{run}/timeline", timeline),
            Route("/api/tables/{what}", table),
            Route("/api/trajectories/{id:int}", trajectory),
            Route("/api/live", live),
            Route("/metrics", metrics),
            Route("/healthz", health),
            Route("/readyz", health),
            Mount("/static", StaticFiles(directory=STATIC)),
        ],
        middleware=[Middleware(Guard, token=token)],
        exception_handlers={CliError: _explain, HTTPException: _explain_http},
        lifespan=lifespan,
    )


def _json(value: Any, status: int = 200) -> Response:
    """Answer JSON in which control characters are escaped; a number that is not finite is null, which JSON can say."""
    return Response(show.to_json(_finite(value)), status, media_type="application/json")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, list | tuple) else value


async def _explain(_request: Request, error: Exception) -> Response:
    assert isinstance(error, CliError)
    return _json({"error": str(error), "next": error.next}, STATUS.get(error.code, 503))


async def _explain_http(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _json({"error": error.detail, "next": ""}, error.status_code)


def _number(request: Request, name: str, default: int | None, most: int) -> Any:
    """Return a whole number of the query, at most `most`. Raises CliError(USAGE)."""
    text = request.query_params.get(name, "")
    if not text:
        return default
    if not text.isdecimal() or len(text) > 19:
        raise CliError(USAGE, f"{name}={text!r} is not a whole number")
    return min(int(text), most)


def _page(request: Request) -> dict[str, Any]:
    """Return the fields of `pages.Page` that the query gives."""
    asked = request.query_params
    return {
        "run": asked.get("run", ""),
        "states": tuple(asked.getlist("state")),
        "split": asked.get("split", ""),
        "before": _number(request, "before", None, MOST),
        "after": _number(request, "after", None, MOST),
        "limit": _number(request, "limit", 100, views.ROWS),
    }
