"""Hook of MkDocs: makes the pages about Python's modules, from their docstrings."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
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
# What the modules of frameworks have, as patterns, in the order in which programs need it.
_SUBJECTS = {
    "Start and ranks": r"init shutdown is_init.* (rank|size)(_op)? (local|cross)_.* is_homogen.*",
    "Training": (
        r"Distributed.* broadcast_(parameters|optimizer_state|.*variables) Partial.* load_model "
        r"Sync.* .*_shards"
    ),
    "Operations": r"(all|broad|reduce).*[^_] grouped_.* (all|broad).*_ sp.* barrier join poll sy.*",
    "Reductions and compression": r"Average Sum Min Max Product Adasum Compression",
    "Process sets": r"ProcessSet .*process_set.*",
    "Timeline and errors": r".*_timeline .*Error",
    "What is there": r".*_(built|enabled|supported)",
    "TensorFlow 1": r".*Hook",
}
# Of what is described below such a heading, without members of classes that users do not need.
_BELOW = ', heading_level: 3, filters: ["!^_", "!^channel$"]'
# Objects that are defined elsewhere than where they are imported from.
_NAMES = {
    "hvdtrain.launch.calls.call.run": "hvdtrain.run",
    "hvdtrain.tensorflow.sync_batch_norm.SyncBatchNormalization": (
        "hvdtrain.tensorflow.SyncBatchNormalization"
    ),
}
_DEFINED = {name: identifier for identifier, name in _NAMES.items()}


def on_files(files: Files, config: Any) -> Files:
    """Add the pages."""
    root = Path(config.config_file_path).parent
    for name, parts in PAGES.items():
        first, *rest = parts
        source = root / first.replace(".", "/") / "__init__.py"
        if "horovod_api.__all__" in (source.read_text() if source.exists() else ""):
            shared = _listed(root / "hvdtrain/core/horovod_api.py")
            modules = {part.rpartition(".")[2] for part in rest}
            parts = [*_by_subject(first, {*_listed(source), *shared} - modules), *map(_part, rest)]
        else:
            parts = [*map(_part, parts)]
        text = "\n".join([f"# {_TITLES.get(name, name)}\n", *parts])
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    return files


def _listed(source: Path) -> list[str]:
    """Return the `__all__` of a module."""
    for node in ast.parse(source.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    raise ValueError(f"{source} has no __all__")


def _by_subject(module: str, names: set[str]) -> Iterator[str]:
    for subject, patterns in _SUBJECTS.items():
        found = []
        for pattern in patterns.split():
            found += sorted(filter(re.compile(pattern).fullmatch, names.difference(found)))
        names = names.difference(found)
        if found:
            yield f"## {subject}\n"
        for name in found:
            full = f"{module}.{name}"
            yield _part(_DEFINED.get(full, full), name, _BELOW)
    if names:
        raise ValueError(f"no subject has {module}'s {names}")


def _part(identifier: str, name: str = "", options: str = "") -> str:
    """Return what mkdocstrings replaces by the description of an object and all that it has."""
    name = name or _NAMES.get(identifier, identifier)
    return f"::: {identifier}\n    options: {{heading: {name}, toc_label: {name}{options}}}\n"
