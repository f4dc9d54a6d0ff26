"""Debian's Chromium, which tests look at pages with, and what they ask of a page."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

REQUIRED = "HVDTRAIN_TEST_CHROMIUM"
PATIENCE_MILLISECONDS = 180_000  # of playwright, which would give up after 30 seconds


@dataclass
class Opened:
    page: Page
    faults: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


@contextmanager
def chromium() -> Iterator[Browser]:
    """Start the browser; skip the test where there is none, or fail it where REQUIRED is 1."""
    path = shutil.which("chromium")
    if path is None:
        reason = "no chromium here: apt-get install chromium"
        if os.environ.get(REQUIRED) == "1":
            pytest.fail(f"{REQUIRED}=1, but {reason}")
        pytest.skip(reason)
    with sync_playwright() as playwright:
        # Root has no sandbox.
        browser = playwright.chromium.launch(
            executable_path=path, args=["--no-sandbox"], timeout=PATIENCE_MILLISECONDS
        )
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def open_page(browser: Browser, path: Path, width: int = 1200, **options: Any) -> Iterator[Opened]:
    context = browser.new_context(viewport={"width": width, "height": 900}, **options)
    context.set_default_timeout(PATIENCE_MILLISECONDS)
    try:
        opened = Opened(context.new_page())
        address = path.absolute().as_uri()

        def asked(url: str) -> None:
            if url != address and not url.startswith("data:"):
                opened.requests.append(url)

        opened.page.on("request", lambda request: asked(request.url))
        opened.page.on("pageerror", lambda error: opened.faults.append(str(error)))
        opened.page.on(
            "console", lambda said: opened.faults.append(said.text) if said.type != "log" else None
        )
        opened.page.goto(address)
        yield opened
    finally:
        context.close()
