"""The layers of the package, and the imports that break them, read from the source text."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

__all__ = ["faults"]

_FOUNDATIONS = {
    *(
        "",
        "arithmetic",
        "arrays",
        "buffer",
        "config",
        "control_groups",
        "devices",
        "errors",
        "memory",
        "patience",
        "streams",
        "topology",
    ),
    *("types", "world"),
}
_BELOW_ADAPTERS = {"foundations", "engines", "core", "tensors"}
_BELOW_TRAIN = _BELOW_ADAPTERS | {"torch", "tensorflow", "keras", "launch", "data"}
# What each layer may import beside itself.
_MAY_IMPORT: Mapping[str, set[str]] = {
    "foundations": set(),
    "engines": {"foundations"},
    "core": {"foundations", "engines"},
    "tensors": {"foundations", "engines", "core"},
    "torch": _BELOW_ADAPTERS,
    "tensorflow": _BELOW_ADAPTERS,
    "keras": _BELOW_ADAPTERS | {"torch", "tensorflow"},
    "launch": {"foundations"},
    "data": {"foundations", "core"},
    "train": _BELOW_TRAIN,
    "horovod_names": _BELOW_TRAIN,
    "bench": _BELOW_TRAIN | {"train"},
    # It reads files, of runs of other versions too, and knows nothing of what wrote them.
    "report": {"foundations"},
    "cli": _BELOW_TRAIN | {"train", "horovod_names", "bench", "report"},
}
# All that other layers may know of engines: the contract, and how to find one by name.
_ENGINE_CONTRACT = {"engines", "engines.communicator", "engines.registry"}

_FRAMEWORKS = {"jax", "keras", "tensorflow", "torch"}
_MPI = {"mpi4py"}
_FOREIGN: Mapping[str, set[str]] = {
    "foundations": _FRAMEWORKS | _MPI,
    "core": _FRAMEWORKS | _MPI,
    "tensors": _MPI,
    "torch": _MPI,
    "tensorflow": _MPI,
    "keras": _MPI,
    "launch": _FRAMEWORKS | _MPI,
    "train": _MPI,
    "horovod_names": _MPI,
    "report": _FRAMEWORKS | _MPI | {"numpy"},
    "cli": _MPI,
}
_FOREIGN_AT_TOP: Mapping[str, set[str]] = {
    "data": _FRAMEWORKS | _MPI,
    "cli": _FRAMEWORKS,
}


@dataclass(frozen=True)
class _Import:
    module: str
    at_top: bool


def faults(package: Path) -> list[str]:
    """Return one line for each import that breaks the layers, and one for a cycle.

    Imports inside functions and under TYPE_CHECKING count too: they are arrows all the same.

    Args:
        package: the folder of the package; its name is the package's.
    """
    modules = _modules(package)
    found = [
        f"{name}: no layer is known for it"
        for name in modules
        if _layer(_inside(name, package.name)) is None
    ]
    graph: dict[str, set[str]] = {}
    for name, path in modules.items():
        imports = list(_imports(name, path, modules))
        own = [i for i in imports if i.module.partition(".")[0] == package.name]
        found += [fault for i in own if (fault := _own_fault(name, i, modules, package.name))]
        found += [
            fault for i in imports if i not in own and (fault := _foreign_fault(name, i, package))
        ]
        graph[name] = {i.module for i in own if i.module != name}
    return found + _cycles(graph)


def _modules(package: Path) -> dict[str, Path]:
    names = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


def _imports(name: str, path: Path, modules: Mapping[str, Path]) -> Iterator[_Import]:
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    deferred = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
        for node in ast.walk(function)
    }
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(tree):
        at_top = id(node) not in deferred
        if isinstance(node, ast.Import):
            yield from (_Import(alias.name, at_top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node, package)
            for alias in node.names:
                submodule = f"{base}.{alias.name}"
                yield _Import(submodule if submodule in modules else base, at_top)


def _absolute(node: ast.ImportFrom, package: str) -> str:
    if not node.level:
        return node.module or ""
    parts = package.split(".")
    kept = parts[: len(parts) - node.level + 1]
    return ".".join([*kept, *([node.module] if node.module else [])])


def _inside(name: str, package: str) -> str:
    return name.removeprefix(package).removeprefix(".")


def _layer(inside: str) -> str | None:
    part = inside.partition(".")[0]
    if part in _FOUNDATIONS:
        return "foundations"
    if part == "__main__":
        return "cli"
    return part if part in _MAY_IMPORT else None


def _own_fault(
    name: str, imported: _Import, modules: Mapping[str, Path], package: str
) -> str | None:
    inside = _inside(imported.module, package)
    source, target = _layer(_inside(name, package)), _layer(inside)
    if imported.module not in modules:
        return f"{name} imports {imported.module}, which is not there"
    if source is None or target is None or source == target:
        return None
    if target not in _MAY_IMPORT[source]:
        return f"{name} imports {imported.module}: {source} must not import {target}"
    # Benchmarks compare engines with one another, so they know them.
    if target == "engines" and source != "bench" and inside not in _ENGINE_CONTRACT:
        return f"{name} imports {imported.module}: only engines know a concrete engine"
    return None


def _foreign_fault(name: str, imported: _Import, package: Path) -> str | None:
    layer = _layer(_inside(name, package.name)) or ""
    root = imported.module.partition(".")[0]
    if root in _FOREIGN.get(layer, ()):
        return f"{name} imports {imported.module}: {layer} must not know it"
    if imported.at_top and root in _FOREIGN_AT_TOP.get(layer, ()):
        return f"{name} imports {imported.module}: {layer} must import it inside a function"
    return None


def _cycles(graph: Mapping[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return ["cycle: " + " -> ".join(reversed(error.args[1]))]
    return []
