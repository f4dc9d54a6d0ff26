"""What the pages of a site name, and what there is to be named."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

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
