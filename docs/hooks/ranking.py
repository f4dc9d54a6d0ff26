"""Hook of MkDocs: lets the search name pages that mention everything after those about it."""

from typing import Any

__all__ = ["on_page_markdown"]

_LAST = ("repository/CHANGELOG.md", "versions.md", "horovod/names.md")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> None:
    """Mark the pages, before the search reads them."""
    if page.file.src_uri in _LAST:
        page.meta["search"] = {"boost": 0.1}
