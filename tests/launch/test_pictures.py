"""The pictures of README show what a run and its report look like now."""

from __future__ import annotations

import io
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import pytest
from browser import chromium, open_page
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
RUN = DOCS / "pictures" / "run.svg"
SHORT = ("hvdtrain", "run", "-np", "2", "--", "train", "digits", "--epochs", "4")
MOST_BYTES = 150_000
REDRAW = "run docs/pictures.py"
SVG = "{http://www.w3.org/2000/svg}"
VALUES = "# samples/s lr # loss #, accuracy #%"

# The texts that are visible at a moment in milliseconds, and their y; -1: as the picture is.
SHOWN = """(at) => {
  for (const each of at < 0 ? [] : document.getAnimations()) {
    each.pause();
    each.currentTime = at;
  }
  return [...document.querySelectorAll('text')]
    .filter((text) => getComputedStyle(text).visibility === 'visible')
    .map((text) => [Number(text.getAttribute('y')), text.textContent]);
}"""


class Drawn(NamedTuple):
    """A run of now: its directory, what it printed, the picture of it, and one of all moments."""

    directory: Path
    printed: str
    svg: str
    moments: str


@pytest.fixture(scope="module")
def script() -> Iterator[dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(DOCS))
        yield runpy.run_path(str(DOCS / "pictures.py"))


@pytest.fixture(scope="module")
def drawn(script: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Drawn:
    directory = tmp_path_factory.mktemp("drawn")
    words = (*SHORT, "--log-every", "5")
    written = script["record"](words, directory)
    # However fast it trains, and in however large parts its lines come, each is there for a moment.
    lines = [(at, line) for at, text in written for line in text.splitlines(keepends=True)]
    every = script["frames"](words, lines, every=True)
    svg, moments = (
        script["draw"](frames, script["COLUMNS"], script["TITLE"])
        for frames in (script["frames"](words, written), every)
    )
    return Drawn(directory, "".join(text for _, text in written), svg, moments)


def rows(svg: str, passing: bool) -> list[str]:
    """Return the rows of the last frame, or those that pass before it."""
    found: dict[tuple[int, int], str] = {}
    for number, group in enumerate(ElementTree.fromstring(svg).iter(f"{SVG}g")):
        if (group.get("class") == "w") is passing:
            for text in group.iter(f"{SVG}text"):
                key = int(text.get("y", "")), number
                found[key] = f"{found.get(key, '')} {text.text}".strip()
    return [found[key] for key in sorted(found)]


def masked(lines: list[str]) -> set[str]:
    """Return what is the same in all runs: the names in the header, the words of other lines.

    What is wider than the terminal goes on in the next row, from where its numbers let it.
    """
    text = re.sub(r"^(?!epoch )(\w+)  .*", r"header: \1", "\n".join(lines), flags=re.MULTILINE)
    text = re.sub(r"\b[0-9a-f]{16}\b|\d[\d.:]*", "#", text)
    found = {re.sub(r" +", " ", line)[:60] for line in text.splitlines()}
    return {line for line in found if len(line) > 20 or line.startswith("header: ")}


def test_a_drawing_shows_the_run(drawn: Drawn) -> None:
    last = rows(drawn.svg, passing=False)
    assert last[0] == f"$ python -m {' '.join((*SHORT, '--log-every', '5'))}"
    accuracy = re.findall(r"test accuracy \d+\.\d+%, loss \d\.\d+ after 4 epochs", drawn.printed)
    assert len(accuracy) == 1
    assert last.count(accuracy[0]) == 1
    assert len([line for line in last if re.match(r"epoch [1-4]/4  train loss", line)]) == 4
    assert last[-1].startswith("$")
    assert rows(drawn.moments, passing=False) == last
    passing = rows(drawn.moments, passing=True)
    assert any(re.match(r"epoch [1-4]/4 +\d+/45", row) for row in passing), passing
    assert VALUES in masked(passing)
    names = re.findall(r"animation-name:(k\d+)", drawn.svg)
    assert sorted(names) == sorted(re.findall(r"@keyframes (k\d+)\{", drawn.svg))
    assert len(names) > 10
    assert sys.prefix not in drawn.svg


def test_the_picture_shows_what_is_printed_now(drawn: Drawn) -> None:
    svg = RUN.read_text(encoding="utf-8")
    ours, now = (masked(rows(each, passing=False)[1:]) for each in (svg, drawn.svg))
    assert ours == now, REDRAW
    assert VALUES in masked(rows(svg, passing=True)), REDRAW
    assert rows(svg, passing=False)[0] == "$ python -m hvdtrain run -np 2"
    assert not re.search(r">[^<]*(?<![\w.])/\w", svg)  # a path of the machine that drew it


@pytest.mark.parametrize("page", ["README.md", "docs/report.md"])
def test_pages_show_the_pictures(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    names = set(re.findall(r"[\w/.-]*pictures/[\w.-]+\.(?:svg|png)", text))
    for name in names:
        assert 0 < ((ROOT / page).parent / name).stat().st_size < MOST_BYTES, name
    shown = {Path(name).name for name in names}
    assert shown == ({path.name for path in RUN.parent.iterdir()} if page == "README.md" else shown)
    for accuracy in re.findall(r"!\[A terminal.* (\d+\.\d+%)", text):
        assert f"test accuracy {accuracy}," in RUN.read_text(encoding="utf-8")


@pytest.mark.browser
def test_nothing_is_drawn_over_another_row(drawn: Drawn, tmp_path: Path) -> None:
    (tmp_path / "fresh.svg").write_text(drawn.svg, encoding="utf-8")
    with chromium() as browser:
        for path in (RUN, tmp_path / "fresh.svg"):
            with open_page(browser, path) as opened:
                for at in range(0, 15_000, 500):
                    shown = opened.page.evaluate(SHOWN, at)
                    lines = [y for y, text in shown if re.match(r"\$|epoch|\d+ samples", text)]
                    assert len(set(lines)) == len(lines), (at, shown)
                end = [text for _, text in opened.page.evaluate(SHOWN, 10_000_000)]
            with open_page(browser, path, reduced_motion="reduce") as opened:
                still = [text for _, text in opened.page.evaluate(SHOWN, -1)]
                assert still == end
                assert any(text.startswith("test accuracy") for text in still)
                assert (opened.faults, opened.requests) == ([], [])


@pytest.mark.browser
def test_the_report_looks_as_in_its_pictures(script: dict[str, Any], drawn: Drawn) -> None:
    (run,) = (drawn.directory / "runs").iterdir()
    for name, png in script["photograph"](run).items():
        pictures = (png, RUN.with_name(name).read_bytes())
        now, ours = (Image.open(io.BytesIO(each)) for each in pictures)
        assert ours.info["seen"] == now.info["seen"], REDRAW
        assert ours.width == now.width
        assert abs(ours.height - now.height) < 0.1 * now.height, REDRAW
