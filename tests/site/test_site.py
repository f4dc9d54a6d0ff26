"""The documentation as a site: it is built, and Chromium shows it well, offline.

mkdocs itself refuses a link that leads nowhere, and a page that is in no menu.
"""

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import chromium, open_page
from environments import named_python
from paths import ROOT
from playwright.sync_api import Browser

pytestmark = pytest.mark.browser

CONSTRAINTS = ROOT / "constraints.txt"
# One page of each kind.
LOOKED_AT = [
    *("index.html", "options.html", "optimizers.html", "training.html", "reference/commands.html"),
    *("reference/hvdtrain.torch.html", "repository/examples/torch_loop.py.html"),
    "repository/CHANGELOG.html",
]
# How much wider than the window the page is, and what makes it so, or is a table that scrolls.
OVERFLOW = """() => {
  const width = document.documentElement.clientWidth;
  const scroller = (element) =>
    element && getComputedStyle(element).overflowX === 'visible'
      ? scroller(element.parentElement) : element;
  const wide = [...document.querySelectorAll('article *')].filter(
    (element) => element.getBoundingClientRect().right > width + 1 && !scroller(element)
  );
  const boxes = [...document.querySelectorAll('article table')].map(scroller).filter(Boolean);
  wide.push(...boxes.filter((box) => box.scrollWidth > box.clientWidth + 1));
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


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    build_site(folder)
    return folder


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


def test_pages_have_no_faults_and_load_nothing_from_a_network(site: Path, browser: Browser) -> None:
    for name in LOOKED_AT:
        with open_page(browser, site / name) as opened:
            assert opened.faults == [], name
            assert all(url.startswith(site.as_uri()) for url in opened.requests), name


@pytest.mark.parametrize("width", [390, 1280])
def test_every_page_and_its_tables_fit(width: int, site: Path, browser: Browser) -> None:
    # Results of `compare` are pages of their own, and that for what is not found names a server.
    paths = [p for p in site.rglob("*.html") if p.parent.name != "compare" and p.name != "404.html"]
    assert len(paths) > 60
    with open_page(browser, site / "index.html", width) as opened:
        for path in sorted(paths):
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
