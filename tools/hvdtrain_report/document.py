"""A page of HTML that needs nothing but itself: its parts, its policy, its file."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from hvdtrain import __version__
from hvdtrain.errors import UsageError
from hvdtrain.files import replacing


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
