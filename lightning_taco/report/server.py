"""A live page: served to this machine only, and read anew from the logs whenever they have grown."""

from __future__ import annotations

import errno
import hashlib
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from lightning_taco.report.content import Report
from lightning_taco.report.page import as_json, page_of
from lightning_taco.report.reading import ReportError

ADDRESS = "127.0.0.1"
POLL_SECONDS = 2.0


class LiveReport:
    """The content of a report, made again only when a log has grown. Several requests may ask at once.

    Args:
        report: what to show.
        poll_seconds: how often a page asks.
    """

    def __init__(self, report: Report, poll_seconds: float = POLL_SECONDS) -> None:
        self._report, self._poll_seconds = report, poll_seconds
        self._lock = threading.Lock()
        self._content: dict[str, Any] = {}
        self._json = b""
        self._tag = ""

    def page(self) -> bytes:
        """The page, with what there is now."""
        with self._lock:
            self._refresh()
            return page_of(self._content).encode("utf-8", errors="replace")

    def json(self) -> tuple[bytes, str]:
        """The content, and a tag that changes with it."""
        with self._lock:
            self._refresh()
            return self._json, self._tag

    def _refresh(self) -> None:
        readers = [reader for reader in (self._report.run, self._report.baseline) if reader is not None]
        try:
            changed = [reader.update() for reader in readers]
        except ReportError:
            changed = []  # the folder is gone, or not for us any more: the last state stays
        if any(changed) or not self._content:
            self._content = {**self._report.content(), "poll_seconds": self._poll_seconds}
            self._json = as_json(self._content).encode()
            self._tag = f'"{hashlib.sha256(self._json).hexdigest()[:32]}"'


class LiveServer(ThreadingHTTPServer):
    """Serves a page and its numbers on 127.0.0.1.

    Args:
        live: what is served.
        port: 0 for any that is free.

    Raises:
        ReportError: when the port cannot be had.
    """

    daemon_threads = True
    allow_reuse_address = True  # a server that has just ended keeps no port from the next one

    def __init__(self, live: LiveReport, port: int) -> None:
        self.live = live
        try:
            super().__init__((ADDRESS, port), _Handler)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise ReportError(
                    f"Port {port} is in use; choose another with --port, or any free one with --port 0."
                ) from error
            raise ReportError(f"Port {port} cannot be used ({error.strerror}); choose another with --port.") from error

    @property
    def url(self) -> str:
        """Where the page is."""
        return f"http://{ADDRESS}:{self.server_address[1]}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a browser that goes away in the middle of an answer."""


class _Handler(BaseHTTPRequestHandler):
    server: LiveServer

    def do_GET(self) -> None:
        """Answer with the page or its numbers."""
        host = (self.headers.get("Host") or "").rpartition(":")[0]
        if host not in (ADDRESS, "localhost"):  # a web site whose name was made to point here
            self._answer(HTTPStatus.FORBIDDEN, b"This server answers to 127.0.0.1 only.", "text/plain")
        elif self.path in ("/", "/index.html"):
            self._answer(HTTPStatus.OK, self.server.live.page(), "text/html; charset=utf-8")
        elif self.path == "/data.json":
            content, tag = self.server.live.json()
            if self.headers.get("If-None-Match") == tag:
                self._answer(HTTPStatus.NOT_MODIFIED, b"", "application/json", tag)
            else:
                self._answer(HTTPStatus.OK, content, "application/json", tag)
        else:
            self._answer(HTTPStatus.NOT_FOUND, b"There is / and /data.json.", "text/plain")

    def _answer(self, status: HTTPStatus, body: bytes, kind: str, tag: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        if tag:
            self.send_header("ETag", tag)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """A request every two seconds is no news."""
