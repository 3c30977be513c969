"""`Dashboard`: the live page on a port of this machine, for whoever has its address.

Promises: listens on the loopback interface alone; every path begins with a token that is drawn at
the start, so that another user or a page of the browser that guesses the port gets nothing; nothing
is written; the page may load from this server alone (content security policy). Server-sent events
tell the page when there is something new, and the page asks for it.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Self
from urllib.parse import parse_qs, urlsplit

from m2flow.errors import UserError
from m2flow.observe.curve_data import curves_of
from m2flow.observe.dashboard.following import (
    FollowedRun,
    check_holds_a_run,
    differing_keys,
)
from m2flow.observe.formatting import told_apart
from m2flow.observe.jsonl import encode
from m2flow.observe.page import STATIC, style
from m2flow.observe.record import read_run
from m2flow.observe.report import details, render_report

FILES = {
    "": ("index.html", "text/html"),
    "charts.js": ("charts.js", "text/javascript"),
    "dashboard.js": ("dashboard.js", "text/javascript"),
    "dashboard.css": ("dashboard.css", "text/css"),
    "uplot.js": ("uPlot.iife.min.js", "text/javascript"),
    "uplot.css": ("uPlot.min.css", "text/css"),
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
LOOK_EVERY, BEAT_EVERY = 0.5, 10.0
"""Seconds between two looks at the files, and between two signs of life on a quiet connection."""
POINTS = 400
"""Values of a curve where the page does not say how many it can draw."""


class Dashboard:
    """The page of some runs; it answers while its context is entered.

    Args:
        run_dirs: run directories.
        port: to listen on; 0 for any that is free.

    Attributes:
        url: address with the token.

    Raises:
        UserError: a directory is missing or holds no run, or the port is taken.
    """

    def __init__(self, run_dirs: Sequence[Path | str], port: int = 0) -> None:
        self.runs = [FollowedRun(path) for path in run_dirs]
        for run in self.runs:
            check_holds_a_run(run.directory.path)
        self._names = told_apart([run.directory.path.resolve() for run in self.runs])
        try:
            self._server = _DashboardServer(("127.0.0.1", port), _DashboardHandler)
        except OSError as error:
            raise UserError(
                f"cannot listen there: {error.strerror}",
                key="--port",
                value=port,
                expected="a free port",
                hint="leave out --port to take any",
            ) from error
        self._server.dashboard = self
        self.token = secrets.token_urlsafe(16)
        self.stopping = threading.Event()
        self.url = f"http://127.0.0.1:{self._server.server_port}/{self.token}/"
        self._thread: threading.Thread | None = None

    def wait(self) -> None:
        """Return when `close` has been called."""
        while not self.stopping.wait(1.0):  # in pieces, so that Ctrl-C is heard
            pass

    def close(self) -> None:
        """Stop listening, and end the connections that wait for events."""
        self.stopping.set()
        if self._thread is not None:
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()

    def __enter__(self) -> Self:
        serve = self._server.serve_forever
        self._thread = threading.Thread(target=serve, args=(0.2,), name="dashboard", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def data(self, points: int, low: int | None, high: int | None) -> dict[str, object]:
        """What the page draws: the runs, their differing keys, and curves over a range of steps."""
        for run in self.runs:
            run.refresh()
        return {
            "runs": [
                {"name": name, **run.described()}
                for name, run in zip(self._names, self.runs, strict=True)
            ],
            "differing": differing_keys([run.configuration() for run in self.runs]),
            **curves_of([run.rows for run in self.runs], points, low, high),
        }


class _DashboardServer(ThreadingHTTPServer):
    daemon_threads = True
    dashboard: Dashboard


class _DashboardHandler(BaseHTTPRequestHandler):
    server: _DashboardServer
    protocol_version = "HTTP/1.1"
    timeout = 30  # a client that says nothing is let go

    def do_GET(self) -> None:
        try:
            address = urlsplit(self.path)
        except ValueError:  # such as half of an address in brackets
            self._fail(HTTPStatus.BAD_REQUEST, "the address cannot be read")
            return
        token, _, name = address.path.removeprefix("/").partition("/")
        if not secrets.compare_digest(token.encode(), self.server.dashboard.token.encode()):
            self._fail(HTTPStatus.FORBIDDEN, "the address lacks the token that m2flow dash printed")
            return
        query = {key: values[-1] for key, values in parse_qs(address.query).items()}
        try:
            self._answer(name, query)
        except (BrokenPipeError, ConnectionResetError):  # the page was closed meanwhile
            self.close_connection = True
        except UserError as error:  # the run's directory has gone
            self._fail(HTTPStatus.NOT_FOUND, str(error))

    def _answer(self, name: str, query: dict[str, str]) -> None:
        if name in FILES:
            file, kind = FILES[name]
            self._send((STATIC / file).read_bytes(), kind)
        elif name == "report.css":
            self._send(style().encode(), "text/css")
        elif name == "events":
            self._events()
        elif name == "data":
            numbers = [_whole(query.get(key)) for key in ("points", "from", "to")]
            points, low, high = numbers
            content = self.server.dashboard.data(min(points or POINTS, 4000), low, high)
            self._send(encode(content), "application/json")
        elif name in ("details", "report"):
            self._of_a_run(name, _whole(query.get("run")))
        else:
            self._fail(HTTPStatus.NOT_FOUND, "there is no such page")

    def _of_a_run(self, name: str, number: int | None) -> None:
        """The parts of a run's report, or the report itself, which has a policy of its own."""
        runs = self.server.dashboard.runs
        if number is None or not 0 <= number < len(runs):
            self._fail(HTTPStatus.NOT_FOUND, "there is no such run")
            return
        record = read_run(runs[number].directory.path)
        if name == "report":
            page = render_report(record).encode("utf-8", "replace")
            self._send(page, "text/html", policy=None)
        else:
            self._send("\n".join(details(record)).encode("utf-8", "replace"), "text/html")

    def _events(self) -> None:
        """Say that something is new, as often as it is, until the page goes away."""
        dashboard = self.server.dashboard
        self.send_response(HTTPStatus.OK)
        self._headers("text/event-stream", POLICY)
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        seen: object = None
        quiet = 0.0
        while not dashboard.stopping.wait(LOOK_EVERY if seen is not None else 0):
            now = [run.signature() for run in dashboard.runs]
            quiet += LOOK_EVERY
            if now != seen:
                self.wfile.write(b"data: changed\n\n")
            elif quiet >= BEAT_EVERY:
                self.wfile.write(b": still here\n\n")
            else:
                continue
            seen, quiet = now, 0.0

    def _send(self, content: bytes, kind: str, policy: str | None = POLICY) -> None:
        self.send_response(HTTPStatus.OK)
        self._headers(f"{kind}; charset=utf-8", policy)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _fail(self, status: HTTPStatus, reason: str) -> None:
        content = f"{reason}\n".encode()
        self.send_response(status)
        self._headers("text/plain; charset=utf-8", POLICY)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _headers(self, kind: str, policy: str | None) -> None:
        self.send_header("Content-Type", kind)
        self.send_header("Cache-Control", "no-store")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("X-Content-Type-Options", "nosniff")
        if policy is not None:
            self.send_header("Content-Security-Policy", policy)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Requests are no news."""


def _whole(text: str | None) -> int | None:
    """A whole number of a query; None where there is none."""
    try:
        return None if text is None else int(float(text))
    except (ValueError, OverflowError):
        return None
