"""The layers of the packages, and the imports that break them, read from the source text."""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

_FOUNDATIONS = {
    *("", "arrays", "buffer", "collective", "compiled", "config"),
    *("control_groups", "devices", "errors", "flight_layout", "files", "fork_server", "streams"),
    *("milestones", "topology", "types", "world"),
}
_BELOW_ADAPTERS = {"foundations", "engines", "core"}
_BELOW_TRAIN = _BELOW_ADAPTERS | {"torch", "tensorflow", "keras", "launch", "data"}
_BELOW_CLI = _BELOW_TRAIN | {"train", "check", "horovod"}
# What each layer may import beside itself.
_MAY_IMPORT: Mapping[str, set[str]] = {
    "foundations": set(),
    "engines": {"foundations"},
    "core": {"foundations", "engines"},
    "torch": _BELOW_ADAPTERS,
    "tensorflow": _BELOW_ADAPTERS,
    "keras": _BELOW_ADAPTERS | {"torch", "tensorflow"},
    "lightning": _BELOW_ADAPTERS | {"torch", "data"},
    "launch": {"foundations"},
    "check": {"foundations", "launch"},
    "spark": {"foundations", "launch"},
    "ray": {"foundations", "launch"},
    # Programs: others start them and do not import them.
    "probes": {"foundations", "engines", "torch", "tensorflow"},
    "horovod": _BELOW_TRAIN,
    "data": {"foundations", "core"},
    "train": _BELOW_TRAIN,
    "cli": _BELOW_CLI,
    # Packages beside hvdtrain, which it finds as commands and does not import.
    # It reads files, of runs of other versions too, and knows nothing of what wrote them.
    "hvdtrain_report": {"foundations"},
    "hvdtrain_lint": {"foundations", "torch", "launch", "check"},
    "hvdtrain_bench": _BELOW_CLI | {"cli", "hvdtrain_report"},
}
# The folders of each layer, lowest first: each may import those before it. "" is the layer's own
# modules, but for those that have a place by their names.
_FOLDERS: Mapping[str, list[str]] = {
    "engines": ["", "shared_memory", "mpi", "torch_distributed", "horovod"],
    "core": [
        *("exits", "tuning", "agreement", "ordered", "allreduce", "gathers"),
        *("timeline", "stall", "places", "allocators", "gradients", "exchanges", "sharding"),
        *("recruiter", "membership", "", "arrays"),
    ],
    "torch": [
        *("compression", "operations", "allocator", "buckets", "parameters", "averaged_gradients"),
        *("exchanged", "kernel_step", "sharding", "", "elastic"),
    ],
    "tensorflow": [
        *("allocator", "graph", "compression", "differentiable", "operations", "gradients", "")
    ],
    "keras": ["backends", "callbacks", ""],
    "launch": ["hosts", "launchers", "", "calls", "scripts"],
    "horovod": ["names", "names.common", "names.on_path", "names.on_path.horovod", "build"],
    "train": [
        *(
            "optimizers",
            "tracking",
            "parameter_server",
            "option",
            "options",
            "config_file",
            "metrics",
            "records",
            "callbacks",
        ),
        *("recipe", "recipes", "checkpoints", "loop", "torch", "keras", ""),
    ],
    "hvdtrain_lint": ["source", "rules", "running", ""],
    "hvdtrain_bench": [
        *("harness", "many", "scaling", "analysis", "cases", "elastic", "", "cli", "compare")
    ],
}
# All that other layers may know of engines: the contract, and how to find one by name.
_ENGINE_CONTRACT = {"engines", "engines.communicator"}
# Benchmarks compare engines with one another, and probes test the parts of one.
_KNOW_ENGINES = {"hvdtrain_bench", "probes"}

_FRAMEWORKS = {"jax", "keras", "tensorflow", "torch"}
_MPI = {"mpi4py"}
_FOREIGN: Mapping[str, set[str]] = {
    "foundations": _FRAMEWORKS | _MPI, "core": _FRAMEWORKS | _MPI, "torch": _MPI,
    "tensorflow": _MPI, "keras": _MPI, "lightning": _MPI, "launch": _FRAMEWORKS | _MPI,
    "check": _FRAMEWORKS | _MPI, "train": _MPI, "horovod": _MPI, "cli": _MPI,
    "hvdtrain_report": _FRAMEWORKS | _MPI | {"numpy"},
    "hvdtrain_lint": _FRAMEWORKS | _MPI | {"numpy"},
}  # fmt: skip
# It runs in a process of its own, and others do not import it.
_KNOW_FRAMEWORKS = {"hvdtrain_lint.running.rank"}
_FOREIGN_AT_TOP: Mapping[str, set[str]] = {"data": _FRAMEWORKS | _MPI, "cli": _FRAMEWORKS}


@dataclass(frozen=True)
class _Import:
    module: str
    at_top: bool


@dataclass(frozen=True)
class _Module:
    path: Path
    layer: str | None
    folder: str | None


def faults(*packages: Path) -> list[str]:
    """Return one line for each import that breaks the layers or the order of their folders.

    Imports inside functions and under TYPE_CHECKING count too: they are arrows all the same. There
    is a line for a cycle of modules, and for a folder that is in no order.
    """
    modules = {name: module for package in packages for name, module in _modules(package)}
    found = [f"{n}: no layer is known for it" for n, m in modules.items() if m.layer is None]
    graph: dict[str, set[str]] = {}
    for name, module in modules.items():
        imports = list(_imports(name, module.path, modules))
        names = {package.name for package in packages}
        own = [i for i in imports if i.module.partition(".")[0] in names]
        found += [fault for i in own if (fault := _own_fault(name, i, modules))]
        found += [
            fault for i in imports if i not in own and (fault := _foreign_fault(name, module, i))
        ]
        graph[name] = {i.module for i in own if i.module != name}
    return found + _folder_faults(modules) + _cycles(graph)


def _modules(package: Path) -> Iterator[tuple[str, _Module]]:
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        inside = parts[1:-1] if is_package else parts[1:]
        layer = _layer(package.name, inside)
        depth = 1 if package.name == "hvdtrain" else 0
        folder = ".".join(parts[1 + depth : -1])
        if not folder and parts[-1] in _FOLDERS.get(layer or "", ()):
            folder = parts[-1]
        is_front = is_package and len(inside) <= depth
        yield name, _Module(path, layer, None if is_front else folder)


def _layer(package: str, inside: tuple[str, ...]) -> str | None:
    if package != "hvdtrain":
        return package if package in _MAY_IMPORT else None
    part = inside[0] if inside else ""
    if part in _FOUNDATIONS:
        return "foundations"
    if part == "__main__":
        return "cli"
    return part if part in _MAY_IMPORT else None


def _imports(name: str, path: Path, modules: Mapping[str, _Module]) -> Iterator[_Import]:
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


def _own_fault(name: str, imported: _Import, modules: Mapping[str, _Module]) -> str | None:
    if imported.module not in modules:
        return f"{name} imports {imported.module}, which is not there"
    source, target = modules[name], modules[imported.module]
    if source.layer is None or target.layer is None:
        return None
    if source.layer == target.layer:
        return _order_fault(name, imported, source, target)
    if target.layer not in _MAY_IMPORT[source.layer]:
        return f"{name} imports {imported.module}: {source.layer} must not import {target.layer}"
    inside = imported.module.partition(".")[2]
    known = inside in _ENGINE_CONTRACT or source.layer in _KNOW_ENGINES
    if target.layer == "engines" and not known:
        return f"{name} imports {imported.module}: only engines know a concrete engine"
    return None


def _order_fault(name: str, imported: _Import, source: _Module, target: _Module) -> str | None:
    order = _FOLDERS.get(source.layer or "", [])
    if source.folder not in order or target.folder not in order:
        return None
    if order.index(target.folder) <= order.index(source.folder):
        return None
    lower, upper = source.folder or source.layer, target.folder or target.layer
    return f"{name} imports {imported.module}: {lower} must not import {upper}"


def _folder_faults(modules: Mapping[str, _Module]) -> list[str]:
    return [
        f"{module.path}: no order is known for this folder"
        for module in modules.values()
        if module.layer and module.folder not in (None, *_FOLDERS.get(module.layer, [""]))
    ]


def _foreign_fault(name: str, module: _Module, imported: _Import) -> str | None:
    layer = module.layer or ""
    root = imported.module.partition(".")[0]
    if root in _FOREIGN.get(layer, ()) and name not in _KNOW_FRAMEWORKS:
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
