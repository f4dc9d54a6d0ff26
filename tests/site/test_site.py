"""The documentation as a site: all links lead somewhere, and Chromium shows it well, offline."""

import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from browser import chromium, low_contrasts, open_page
from environments import named_python
from paths import ROOT
from playwright.sync_api import Browser

pytestmark = pytest.mark.browser

CONSTRAINTS = ROOT / "constraints.txt"
PHONE = 390
# One page of each kind.
LOOKED_AT = [
    "index.html",
    "options.html",
    "optimizers.html",
    "training.html",
    "reference/commands.html",
    "reference/hvdtrain.torch.html",
    "repository/examples/torch_loop.py.html",
    "repository/CHANGELOG.html",
]
# How much wider than the window the page is, and what makes it so.
OVERFLOW = """() => {
  const width = document.documentElement.clientWidth;
  const scrolls = (element) => {
    for (let at = element; at; at = at.parentElement) {
      if (getComputedStyle(at).overflowX !== 'visible') return true;
    }
    return false;
  };
  const wide = [...document.querySelectorAll('article *')].filter(
    (element) => element.getBoundingClientRect().right > width + 1 && !scrolls(element)
  );
  return [document.documentElement.scrollWidth - width, wide.map((each) => each.outerHTML)];
}"""


def docs_python() -> Path:
    return named_python("HVDTRAIN_DOCS_PYTHON", "mkdocs-material")


def build_site(folder: Path) -> None:
    done = subprocess.run(
        [docs_python(), "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stdout + done.stderr


# Where an element names a file: links, pictures, scripts and styles.
_NAMING = {"a": "href", "img": "src", "script": "src", "link": "href", "iframe": "src"}


@dataclass
class SitePage:
    path: Path
    links: list[str] = field(default_factory=list)
    anchors: set[str] = field(default_factory=set)


class _Reader(HTMLParser):
    def __init__(self, page: SitePage) -> None:
        super().__init__()
        self._page = page

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self._page.anchors |= {given[key] or "" for key in ("id", "name") if key in given}
        # For browsers the address is that of the page itself; there is no site to name.
        if tag in _NAMING and given.get("rel") not in ("canonical", "prev", "next"):
            link = given.get(_NAMING[tag])
            if link is not None:
                self._page.links.append(link)


def read_pages(site: Path) -> dict[Path, SitePage]:
    pages = {}
    for path in sorted(site.rglob("*.html")):
        pages[path] = SitePage(path)
        _Reader(pages[path]).feed(path.read_text(encoding="utf-8"))
    return pages


def broken_links(site: Path, pages: dict[Path, SitePage]) -> Iterator[str]:
    """Yield every link to a file of the site that is not there, and to an anchor that is not."""
    for page in pages.values():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            # The page for what is not found is shown at any address, and names the site's root.
            path = unquote(parts.path)
            base = site if path.startswith("/") else page.path.parent
            target = (base / path.lstrip("/")).resolve() if path else page.path
            if target.is_dir():
                target = target / "index.html"
            anchor = unquote(parts.fragment)
            known = pages.get(target)
            if not target.is_file() or (anchor and known and anchor not in known.anchors):
                yield f"{page.path.relative_to(site)}: {link}"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    build_site(folder)
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, SitePage]:
    # Results of `compare` are pages of their own.
    return {path: page for path, page in read_pages(site).items() if path.parent.name != "compare"}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


def test_what_builds_the_site_is_pinned() -> None:
    """A page that builds today builds next year."""
    code = (
        "from importlib import metadata\n"
        "for each in metadata.distributions(): print(each.name, each.version)"
    )
    done = subprocess.run([docs_python(), "-c", code], capture_output=True, text=True, check=True)
    lines = (line.split() for line in done.stdout.splitlines())
    installed = {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in lines}
    pins = dict(re.findall(r"^([\w-]+)==(\S+)$", CONSTRAINTS.read_text(), re.MULTILINE))
    # The tools that install, and the project itself.
    ours = installed.keys() - {"pip", "setuptools", "hvdtrain"}
    assert {name: installed[name] for name in ours if pins.get(name) != installed[name]} == {}


def test_every_link_leads_somewhere(site: Path, pages: dict[Path, SitePage]) -> None:
    assert len(pages) > 60
    assert list(broken_links(site, pages)) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text('<h1 id="top"><a href="#top">a</a> <a href="b.html#x">b</a>')
    (tmp_path / "b.html").write_text('<a href="c.html">c</a><img src="p.png"><a href="a.html#top">')
    found = list(broken_links(tmp_path, read_pages(tmp_path)))
    assert found == ["a.html: b.html#x", "b.html: c.html", "b.html: p.png"]


def test_every_page_can_be_reached_from_the_first(site: Path, pages: dict[Path, SitePage]) -> None:
    waiting, reached = [site / "index.html"], {site / "404.html"}
    while waiting:
        path = waiting.pop()
        if path not in reached and path in pages:
            reached.add(path)
            links = (link.partition("#")[0] for link in pages[path].links if ":" not in link)
            waiting += [(path.parent / link).resolve() for link in links if link]
    assert set(pages) - reached == set()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_are_readable(site: Path, browser: Browser, scheme: str) -> None:
    for name in LOOKED_AT:
        # Without motion: colours would still be on their way from one scheme to the other.
        how: dict[str, Any] = {"color_scheme": scheme, "reduced_motion": "reduce"}
        with open_page(browser, site / name, **how) as opened:
            shown = opened.page.evaluate("document.body.dataset.mdColorScheme")
            assert shown == {"light": "default", "dark": "slate"}[scheme]
            assert low_contrasts(opened.page) == [], name
            assert opened.faults == [], name
            assert all(url.startswith(site.as_uri()) for url in opened.requests), name


def test_every_page_fits_on_a_phone(
    site: Path, pages: dict[Path, SitePage], browser: Browser
) -> None:
    with open_page(browser, site / "index.html", PHONE) as opened:
        for path in sorted(set(pages) - {site / "404.html"}):  # which names the root of a server
            opened.page.goto(path.as_uri())
            assert opened.page.evaluate(OVERFLOW) == [0, []], path
            assert opened.faults == [], path


def test_search_finds_a_function_without_a_network(site: Path, browser: Browser) -> None:
    with open_page(browser, site / "torch.html", offline=True) as opened:
        opened.page.get_by_role("textbox", name="Search").click()
        opened.page.keyboard.type("DistributedOptimizer")
        result = ".md-search-result__link[href*='#hvdtrain.torch.DistributedOptimizer']"
        opened.page.locator(result).first.click()
        opened.page.wait_for_url(re.compile(r"\?h="))
        assert "DistributedOptimizer" in opened.page.locator("article").inner_text()
        assert opened.faults == []
        assert all(url.startswith(site.as_uri()) for url in opened.requests)
