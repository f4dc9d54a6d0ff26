"""Hook of MkDocs: what pages name outside docs/ becomes part of the site.

On GitHub such links are relative paths that leave docs/. Here, a page of Markdown that is named
there is copied to `repository/`, a picture as well, and of any other file a page with its text is
made.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

__all__ = ["on_files", "on_page_markdown"]

_COPIES = "repository/"
# Named by no page of docs/, but by the navigation.
_ALWAYS = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
_PICTURES = {".gif", ".jpg", ".png", ".svg"}
_LANGUAGES = {".py": "python", ".sh": "sh", ".toml": "toml", ".yaml": "yaml", ".yml": "yaml"}
_FENCES = re.compile(r"^(```.*?^```$)", re.MULTILINE | re.DOTALL)
# `](name#anchor)`, and `src="name"` of a picture in HTML.
_LINK = re.compile(r"(\]\(|\bsrc(?:set)?=\")([^)\"\s#]+)(#[^)\"\s]*)?([)\"])")


def on_files(files: Files, config: Any) -> Files:
    """Add all files outside docs/ that are named, and those that these name."""
    root = Path(config.config_file_path).parent
    waiting = [root / name for name in _ALWAYS if (root / name).is_file()]
    for file in files.documentation_pages():
        waiting += _outside(root, Path(file.abs_src_path or ""))
    seen: set[Path] = set()
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        files.append(_added(root, path, config))
        if path.suffix == ".md":
            waiting += _outside(root, path)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Rewrite the links that leave docs/, and those of copies."""
    root = Path(config.config_file_path).parent
    source = _source_of(root, page.file.src_uri)
    folder = os.path.dirname(page.file.src_uri)

    def replaced(link: re.Match[str]) -> str:
        start, name, anchor, end = link.groups(default="")
        target = _target(source, name)
        if target is None or not target.is_relative_to(root):
            return link[0]
        uri = _uri(root, target)
        return f"{start}{os.path.relpath(uri, folder or '.')}{anchor}{end}"

    parts = _FENCES.split(markdown)
    return "".join(part if part.startswith("```") else _LINK.sub(replaced, part) for part in parts)


def _outside(root: Path, page: Path) -> Iterator[Path]:
    """Yield the files outside docs/ that a page names."""
    text = _FENCES.sub("", page.read_text(encoding="utf-8"))
    for _, name, _, _ in _LINK.findall(text):
        target = _target(page, name)
        if target is not None and not target.is_relative_to(root / "docs"):
            yield target


def _target(page: Path, name: str) -> Path | None:
    """Return the file that a link of a page names, if it is one of ours."""
    if ":" in name:
        return None
    target = Path(os.path.normpath(page.parent / name))
    return target if target.is_file() else None


def _source_of(root: Path, uri: str) -> Path:
    """Return where a page of the site comes from."""
    return root / uri.removeprefix(_COPIES) if uri.startswith(_COPIES) else root / "docs" / uri


def _uri(root: Path, path: Path) -> str:
    """Return where a file is in the site, as MkDocs names it."""
    if path.is_relative_to(root / "docs"):
        return path.relative_to(root / "docs").as_posix()
    uri = _COPIES + path.relative_to(root).as_posix()
    return uri if path.suffix in {".md", *_PICTURES} else f"{uri}.md"


def _added(root: Path, path: Path, config: Any) -> File:
    """Return a copy, or a page with a file's text."""
    uri = _uri(root, path)
    if path.suffix in _PICTURES:
        return File.generated(config, uri, abs_src_path=str(path))
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return File.generated(config, uri, content=text)
    language = _LANGUAGES.get(path.suffix, "text")
    page = f"# {path.relative_to(root)}\n\n```{language}\n{text.rstrip()}\n```\n"
    return File.generated(config, uri, content=page, inclusion=InclusionLevel.NOT_IN_NAV)
