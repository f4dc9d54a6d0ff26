"""Hook of MkDocs: makes the pages about Python's modules, from their docstrings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mkdocs.structure.files import File, Files

__all__ = ["PAGES", "on_files"]

# The parts of each page: a module, or one object of a module that does not list it.
PAGES: Mapping[str, list[str]] = {
    "hvdtrain": ["hvdtrain.launch.calls.call.run"],
    "hvdtrain.torch": ["hvdtrain.torch", "hvdtrain.torch.elastic", "hvdtrain.torch.process_group"],
    "hvdtrain.tensorflow": ["hvdtrain.tensorflow", "hvdtrain.tensorflow.elastic"],
    "hvdtrain.keras": ["hvdtrain.keras", "hvdtrain.keras.callbacks", "hvdtrain.keras.elastic"],
    "hvdtrain.data": [
        "hvdtrain.data",
        *(f"hvdtrain.data.{name}" for name in ("digits", "idx", "cifar10", "images")),
        *(f"hvdtrain.data.{name}" for name in ("image_folder", "map_file", "parquet")),
    ],
    "hvdtrain.train": ["hvdtrain.train", "hvdtrain.train.metrics"],
    "hvdtrain.lightning": ["hvdtrain.lightning"],
    "hvdtrain.spark": ["hvdtrain.spark"],
    "hvdtrain.ray": ["hvdtrain.ray"],
    "exchanges": [
        *("hvdtrain.core.gradients.exchange", "hvdtrain.core.gradients.communicators"),
        "hvdtrain.arrays",
    ],
}
_TITLES = {"exchanges": "Exchanges of your own"}
# Objects that are defined elsewhere than where they are imported from.
_NAMES = {"hvdtrain.launch.calls.call.run": "hvdtrain.run"}


def on_files(files: Files, config: Any) -> Files:
    """Add the pages."""
    for name, parts in PAGES.items():
        text = f"# {_TITLES.get(name, name)}\n\n" + "\n".join(map(_part, parts))
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    return files


def _part(identifier: str) -> str:
    """Return what mkdocstrings replaces by the description of an object and all that it has."""
    name = _NAMES.get(identifier, identifier)
    return f"::: {identifier}\n    options: {{heading: {name}, toc_label: {name}}}\n"
