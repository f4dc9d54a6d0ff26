"""The page of runs in progress, served on this machine alone."""

from __future__ import annotations

import html
import secrets
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from hvdtrain.errors import UsageError
from hvdtrain.topology import LOOPBACK

_RELOAD_SECONDS = 15


def serve(make_page: Callable[[], str], port: int, say: Callable[[str], None]) -> None:
    """Serve a page, made anew each time it is loaded, until Ctrl-C.

    Args:
        make_page: returns the HTML; a UsageError is shown in its place.
        port: port to listen on, only on the loopback device; 0: a free one.
        say: called with the address, which other users of the machine cannot guess.
    """
    place = f"/{secrets.token_urlsafe(16)}"

    class Handler(BaseHTTPRequestHandler):
        """Answers with the page at its place."""

        def do_GET(self) -> None:
            """Answer a browser."""
            if not secrets.compare_digest(self.path.encode(), place.encode()):
                self.send_error(HTTPStatus.NOT_FOUND)
                return
            try:
                page = make_page()
            except UsageError as error:  # such as a run that has no metrics yet
                page = f"<!doctype html><title>hvdtrain</title><p>{html.escape(str(error))}"
            body = page.encode()
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("Referrer-Policy", "no-referrer")
            self.send_header("Refresh", str(_RELOAD_SECONDS))
            with suppress(ConnectionError):  # the browser has left
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Write no line for each request: it would have the address."""

    try:
        server = ThreadingHTTPServer((LOOPBACK, port), Handler)
    except OSError as error:
        raise UsageError(f"--port {port}: {error.strerror}: name another") from error
    with server, suppress(KeyboardInterrupt):
        say(f"http://{LOOPBACK}:{server.server_port}{place}")
        server.serve_forever()
