"""What the imported names of a script stand for."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from hvdtrain.lint.source.tree import Tree, last_name, path_of

__all__ = ["HVD", "Names"]

HVD = "hvd"
_ROOTS = ("horovod", "hvdtrain")
_FRAMEWORKS = ("torch", "tensorflow", "keras", "mxnet")


class Names:
    """The imports of a script, those inside functions included.

    Args:
        tree: the script.

    Attributes:
        modules: full names of all that is imported.
        frameworks: frameworks whose Horovod interface is imported: torch, tensorflow, keras.
        from_horovod: whether one of them comes from Horovod itself.
    """

    def __init__(self, tree: Tree) -> None:
        self._full = dict(_imports(tree))
        self.modules = set(self._full.values()) | set(_plain(tree))
        interfaces = [parts for name in self.modules if (parts := _interface(name))]
        self.frameworks = {framework for _, framework, _ in interfaces}
        self.from_horovod = any(root == "horovod" for root, _, _ in interfaces)

    def full(self, node: ast.AST) -> str | None:
        """Return the full name of a function or module: "torch.distributed.barrier", "hvd.rank".

        What belongs to the Horovod interface of a framework begins with "hvd", whoever provides it.
        None for what has no name, such as the result of a call.
        """
        path = path_of(node.func if isinstance(node, ast.Call) else node)
        if path is None:
            return None
        first, _, rest = path.partition(".")
        full = f"{self._full.get(first, first)}{'.' if rest else ''}{rest}"
        interface = _interface(full)
        if interface is None:
            return full
        return f"{HVD}.{interface[2]}" if interface[2] else HVD

    def last(self, node: ast.AST) -> str:
        """Return the last word of a function's full name, which `import as` does not change."""
        full = self.full(node)
        return full.rpartition(".")[2] if full else last_name(node)

    def is_of_import(self, node: ast.expr) -> bool:
        """Return whether something is part of an imported module or class."""
        first, _, rest = (path_of(node) or "").partition(".")
        return bool(rest) and (first in self._full or first in self.modules)

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


def _imports(tree: Tree) -> Iterator[tuple[str, str]]:
    for node in tree.nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.asname:
                    yield alias.asname, alias.name
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                base = f"{node.module or ''}."
                yield alias.asname or alias.name, f"{'' if node.level else base}{alias.name}"


def _plain(tree: Tree) -> Iterator[str]:
    for node in tree.nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
