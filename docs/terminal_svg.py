"""Draws what a terminal shows over time as an animated SVG, which needs no script."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby
from typing import NamedTuple

__all__ = ["Cell", "Frame", "draw"]

_COLUMN, _ROW, _SIZE = 7.8, 18, 13  # pixels
_MARGIN, _BAR = 16, 34  # around the text; the bar above it
_HOLD_SECONDS = 6.0
_PLAYS = 3
# All other colours are numbers of six digits already.
_COLOURS = {"default": "#d6dde6", "green": "#5bd18b"}
# The parts of a bar: where in its cell each begins and ends.
_STROKES = {"━": (0.0, 1.0), "╸": (0.0, 0.5), "╺": (0.5, 1.0)}

_STYLE = """\
text{{white-space:pre;font-size:{size}px;\
font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace}}
g{{animation:{seconds:.2f}s step-end {plays} both}}
.w{{visibility:hidden}}
@media (prefers-reduced-motion:reduce){{g{{animation:none!important}}}}
"""


class Cell(NamedTuple):
    """A character and the name of its colour."""

    text: str
    colour: str = "default"


Row = tuple[Cell, ...]


class Frame(NamedTuple):
    """What is shown from a moment on; rows end with their last character."""

    seconds: float
    rows: tuple[Row, ...]


class _Span(NamedTuple):
    start: float
    end: float | None  # None: until the last frame


def draw(frames: Sequence[Frame], columns: int, title: str) -> str:
    """Return the SVG.

    With prefers-reduced-motion it shows the last frame.

    Args:
        frames: in order; the first one is at 0.
        columns: width of the terminal.
        title: a description for readers who do not see the picture.
    """
    rows = max(len(frame.rows) for frame in frames)
    width, height = columns * _COLUMN + 2 * _MARGIN, rows * _ROW + _BAR + 1.5 * _MARGIN
    seconds = frames[-1].seconds + _HOLD_SECONDS
    groups: dict[_Span, list[str]] = {}
    for span, at, row in _spans(frames):
        groups.setdefault(span, []).extend(_shapes(row, at))
    style = _STYLE.format(size=_SIZE, seconds=seconds, plays=_PLAYS)
    drawn = []
    for number, (span, shapes) in enumerate(sorted(groups.items(), key=lambda item: item[0][0])):
        name = f"k{number}" if span != (0.0, None) else "none"
        kind = "" if span.end is None else ' class="w"'
        style += _keyframes(name, span, seconds) if name != "none" else ""
        drawn.append(f'<g{kind} style="animation-name:{name}">{"".join(shapes)}</g>')
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}"'
            f' width="{width:g}" height="{height:g}" role="img" xml:space="preserve">',
            f"<title>{escape(title)}</title>",
            f"<style>\n{style}</style>",
            f'<rect x=".5" y=".5" width="{width - 1:g}" height="{height - 1:g}" rx="9"'
            ' fill="#10151d" stroke="#3a4556"/>',
            *(
                f'<circle cx="{20 + 19 * place}" cy="18" r="5.5" fill="{colour}"/>'
                for place, colour in enumerate(("#ff5f57", "#febc2e", "#28c840"))
            ),
            *drawn,
            "</svg>\n",
        ]
    )


def _spans(frames: Sequence[Frame]) -> Iterator[tuple[_Span, int, Row]]:
    """Return when each row is shown, at which place, and what is in it."""
    for at in range(max(len(frame.rows) for frame in frames)):
        shown = [(f.seconds, f.rows[at] if at < len(f.rows) else ()) for f in frames]
        parts = [(next(part)[0], row) for row, part in groupby(shown, key=lambda item: item[1])]
        ends = [start for start, _ in parts[1:]] + [None]
        for (start, row), end in zip(parts, ends, strict=True):
            if row:
                yield _Span(start, end), at, row


def _keyframes(name: str, span: _Span, seconds: float) -> str:
    """Return the animation of what is shown for a time."""
    hidden = "" if span.start == 0 else "0%{visibility:hidden}"
    shown = f"{100 * span.start / seconds:.2f}%"
    shown += ",to{visibility:visible}" if span.end is None else "{visibility:visible}"
    after = "" if span.end is None else f"{100 * span.end / seconds:.2f}%,to{{visibility:hidden}}"
    return f"@keyframes {name}{{{hidden}{shown}{after}}}\n"


def _shapes(row: Row, at: int) -> Iterator[str]:
    """Return what draws a row: texts of one colour each, and the strokes of a bar."""
    column = 0
    for (is_bar, colour), part in groupby(row, key=lambda cell: (cell[0] in _STROKES, cell.colour)):
        text = "".join(cell.text for cell in part)
        fill = _COLOURS.get(colour, f"#{colour}")
        shape = _stroke if is_bar else _text
        yield from shape(text, column, at, fill)
        column += len(text)


def _stroke(text: str, column: int, at: int, fill: str) -> Iterator[str]:
    left = (column + _STROKES[text[0]][0]) * _COLUMN + _MARGIN
    right = (column + len(text) - 1 + _STROKES[text[-1]][1]) * _COLUMN + _MARGIN
    top = _BAR + at * _ROW + 7
    yield f'<rect x="{left:.4g}" y="{top}" width="{right - left:.4g}" height="4" fill="{fill}"/>'


def _text(text: str, column: int, at: int, fill: str) -> Iterator[str]:
    left = column + len(text) - len(text.lstrip())
    text = text.strip()
    if text:
        place = f'x="{left * _COLUMN + _MARGIN:.4g}" y="{_BAR + at * _ROW + 13}"'
        length = f'textLength="{len(text) * _COLUMN:.4g}"'
        yield f'<text {place} {length} fill="{fill}">{escape(text, quote=False)}</text>'
