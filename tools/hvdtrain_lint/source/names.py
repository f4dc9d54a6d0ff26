"""What the imported names of a script stand for."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator

from hvdtrain_lint.source.tree import Tree, last_name, path_of

HVD = "hvd"
_ROOTS = ("horovod", "hvdtrain")
_DEEPEST = 8
_FRAMEWORKS = ("torch", "tensorflow", "keras", "mxnet")


class Names:
    """The imports of a script and of the modules beside it, those inside functions included.

    `modules` holds full names of all that the script imports, `frameworks` those of which it
    imports Horovod's interface (torch, tensorflow, keras), `from_horovod` whether from Horovod.
    """

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        roots = (tree.module, *tree.beside.values())
        self._full: dict[ast.AST, dict[str, str]] = {root: {} for root in roots}
        for node in tree.known:
            self._full[tree.root(node)].update(_imports(node))
        own = (name for node in tree.nodes for name, is_near in _named_modules(node) if not is_near)
        self.modules = set(self._full[tree.module].values()) | set(own)
        interfaces = [parts for name in self.modules if (parts := _interface(name))]
        self.frameworks = {framework for _, framework, _ in interfaces}
        self.from_horovod = any(root == "horovod" for root, _, _ in interfaces)
        # What a name is assigned; Values sets it, which needs the imports first.
        self.assigned: Callable[[ast.AST], list[ast.expr]] = lambda node: []

    def full(self, node: ast.AST) -> str | None:
        """Return the full name of a function or module: "torch.distributed.barrier", "hvd.rank".

        What belongs to the Horovod interface of a framework begins with "hvd", whoever provides it.
        A name that is assigned another one has the full name of that. None for what has no name,
        such as the result of a call.
        """
        full = self._named(node.func if isinstance(node, ast.Call) else node, _DEEPEST)
        interface = _interface(full) if full else None
        if interface is None:
            return full
        return f"{HVD}.{interface[2]}" if interface[2] else HVD

    def imported(self, node: ast.Name) -> str:
        """Return the full name of what is imported under a name; "" if nothing is."""
        return self._full[self._tree.root(node)].get(node.id, "")

    def _named(self, node: ast.AST, depth: int) -> str | None:
        if not isinstance(node, (ast.Name, ast.Attribute)):
            return None
        values = self.assigned(node) if depth else []
        if len(values) == 1 and (full := self._named(values[0], depth - 1)):
            return full
        if isinstance(node, ast.Name):
            return self._full[self._tree.root(node)].get(node.id, node.id)
        base = self._named(node.value, depth)
        return None if base is None else f"{base}.{node.attr}"

    def last(self, node: ast.AST) -> str:
        """Return the last word of a function's full name, which `import as` does not change."""
        full = self.full(node)
        return full.rpartition(".")[2] if full else last_name(node)

    def is_of_import(self, node: ast.expr) -> bool:
        """Return whether something is part of an imported module or class."""
        first, _, rest = (path_of(node) or "").partition(".")
        return bool(rest) and (first in self._full[self._tree.root(node)] or first in self.modules)

    def imports(self, *roots: str) -> bool:
        """Return whether one of these packages, or a part of one, is imported."""
        return any(
            module == root or module.startswith(f"{root}.")
            for module in self.modules
            for root in roots
        )


def _interface(full: str) -> tuple[str, str, str] | None:
    """Return package, framework and what follows, for a name of a Horovod interface."""
    parts = full.split(".")
    if parts[0] not in _ROOTS or len(parts) < 2 or parts[1] not in _FRAMEWORKS:
        return None
    framework, rest = parts[1], parts[2:]
    if framework == "tensorflow" and rest[:1] == ["keras"]:
        framework, rest = "keras", rest[1:]
    return parts[0], framework, ".".join(rest)


def _imports(node: ast.AST) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.Import):
        yield from ((alias.asname, alias.name) for alias in node.names if alias.asname)
    elif isinstance(node, ast.ImportFrom):
        base = f"{node.module}." if node.module else ""
        yield from ((alias.asname or alias.name, f"{base}{alias.name}") for alias in node.names)


def modules_of(module: ast.Module) -> list[str]:
    """Return the names of the modules that a module imports, in the order of the text."""
    return [name for node in ast.walk(module) for name, _ in _named_modules(node)]


def _named_modules(node: ast.AST) -> Iterator[tuple[str, bool]]:
    """Yield the modules that a statement imports, and whether it looks for them beside its own."""
    if isinstance(node, ast.Import):
        yield from ((alias.name, False) for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module:
        yield node.module, bool(node.level)
