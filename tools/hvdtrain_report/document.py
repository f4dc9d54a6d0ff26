"""A page of HTML that needs nothing but itself: its parts, its policy, its file, and its server."""

from __future__ import annotations

import base64
import hashlib
import html
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from typing import Any

from hvdtrain import __version__
from hvdtrain.errors import UsageError
from hvdtrain.files import replacing
from hvdtrain.topology import LOOPBACK


def asset(name: str) -> str:
    """Return the text of a style sheet, a script or a template of the reports."""
    return files("hvdtrain_report").joinpath("assets", name).read_text(encoding="utf-8")


def policy(styles: Sequence[str], scripts: Sequence[str]) -> str:
    """Return a Content-Security-Policy that allows these styles and scripts, and no requests."""

    def hashes(texts: Sequence[str]) -> str:
        digests = (hashlib.sha256(text.encode()).digest() for text in texts)
        return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)

    return (
        f"default-src 'none'; style-src {hashes(styles)}; script-src {hashes(scripts)}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )


def require_jinja(command: str) -> None:
    """Check that a page can be made."""
    try:
        import jinja2  # noqa: F401
    except ImportError as error:
        raise UsageError(f"{command} needs Jinja2: pip install 'hvdtrain[report]'") from error


def own_script(*names: str) -> str:
    """Return scripts of the reports as one, which leaves no name behind."""
    return "(() => {\n'use strict';\n" + "".join(map(asset, names)) + "})();\n"


def render(template: str, style: str, scripts: Sequence[str], **content: Any) -> str:
    """Return the page of a template that fills layout.html."""
    from jinja2 import DictLoader, Environment, StrictUndefined
    from markupsafe import Markup

    loader = DictLoader({"layout.html": asset("layout.html"), "page.html": template})
    page = Environment(
        loader=loader,
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    ).get_template("page.html")
    return page.render(
        style=Markup(style),
        scripts=list(map(Markup, scripts)),
        policy=policy([style], scripts),
        version=__version__,
        **content,
    )


def write_document(path: Path, text: str) -> int:
    """Write a page atomically, and return its size in bytes."""
    page = text.encode()
    try:
        with replacing(path) as file:
            file.write(page)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error
    return len(page)


_RELOAD_SECONDS = 15


def serve(make_page: Callable[[], str], port: int, say: Callable[[str], None]) -> None:
    """Serve a page on the loopback device, made anew each time it is loaded, until Ctrl-C.

    A UsageError is shown in its place. Port 0 is a free one. Other users cannot guess the address.
    """
    place = f"/{secrets.token_urlsafe(16)}"

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
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
