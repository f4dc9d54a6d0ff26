"""What single sites ask of job scripts, as their public documentation says: in sites.toml."""

from __future__ import annotations

import shlex
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

READ = "2026-11-30"


@dataclass(frozen=True)
class Site:
    """A table of sites.toml, which describes the fields."""

    scheduler: str
    pages: Sequence[str]
    notes: Sequence[str]
    options: Mapping[str, Any]
    needs: Sequence[str] = ()
    directives: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    placement: str = ""
    login: bool = False  # the shell must be one of a login, to have `module`

    def replace_directives(self, template: str) -> str:
        """Return a scheduler's lines with those of the site."""
        lines = template.splitlines()
        for start, line in self.directives.items():
            lines = [line if old.startswith(start) else old for old in lines]
        return "\n".join(lines)

    def placement_of(self, ranks_per_node: int) -> str:
        """Return options of the launcher; none for another number of ranks than they are for."""
        usual = self.options.get("ranks_per_node") or self.options["gpus_per_node"]
        return self.placement if ranks_per_node == usual else ""

    def heading(self, name: str) -> str:
        """Return comments for the script: where this comes from, and that it is unproven."""
        pages = [f"  {page}" for page in self.pages]
        said = [f"For {name}, by copies of these pages, read on {READ}:", *pages, *self.notes]
        lines = [f"# {line}" for line in [*said, "Unproven: nobody has run this there yet."]]
        return "\n".join(lines)

    def exports(self) -> str:
        """Return the site's variables, as commands of the shell, which expands those with $."""
        words = {key: v if "$" in v else shlex.quote(v) for key, v in self.variables.items()}
        return "\n".join(f"export {key}={word}" for key, word in words.items())


@cache
def sites() -> Mapping[str, Site]:
    """Return the sites by name."""
    tables = tomllib.loads(Path(__file__).with_name("sites.toml").read_text(encoding="utf-8"))
    return {name: Site(**table) for name, table in tables.items()}
