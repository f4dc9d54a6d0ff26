"""What calls a collective function is marked as collective, too: read from the source text."""

import ast
from collections.abc import Iterator
from pathlib import Path

import hvdtrain

# Local all the same, with the reason.
LOCAL = {
    "Channel._mark": "submits a mark of the timeline, which no rank waits for",
    "Channel.poll": "waits only where all ranks must run the operation in their own threads",
    "ObjectState.commit": "says itself that it raises together where hosts have changed",
    "StallWatch._look": "the watch has a communicator of its own, whose ranks answer in any order",
    "StallWatch.abandon": "the ranks that would answer have ended",
}
# Programs: whoever starts them starts them on all ranks that there are.
PROGRAMS = ("hvdtrain.__main__", "hvdtrain.cli", "hvdtrain.horovod", "hvdtrain.probes")

Name = tuple[str, str]  # of a module, and of a function or class in it


class Package:
    """The functions of a package, and which of them call which, as far as names tell."""

    def __init__(self, folder: Path) -> None:
        self.functions: dict[Name, tuple[str | None, ast.FunctionDef]] = {}
        self.classes: dict[Name, ast.ClassDef] = {}
        self.imports: dict[str, dict[str, Name]] = {}
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder.parent).with_suffix("").parts
            module = ".".join(parts).removesuffix(".__init__")
            tree = ast.parse(path.read_text(encoding="utf-8"))
            self.imports[module] = {
                alias.asname or alias.name: (node.module, alias.name)
                for node in ast.walk(tree)
                if isinstance(node, ast.ImportFrom) and node.module
                for alias in node.names
            }
            self._read(module, tree.body, None)

    def _read(self, module: str, body: list[ast.stmt], owner: str | None) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                self.classes[module, node.name] = node
                self._read(module, node.body, node.name)
            elif isinstance(node, ast.FunctionDef):
                name = node.name if owner is None else f"{owner}.{node.name}"
                self.functions[module, name] = (owner, node)

    def _resolve(self, module: str, name: str) -> Name | None:
        for _ in range(8):  # imports that hand on a name
            if (module, name) in self.functions or (module, name) in self.classes:
                return module, name
            if name not in self.imports.get(module, {}):
                return None
            module, name = self.imports[module][name]
        return None

    def _method(self, module: str, owner: str, name: str) -> Name | None:
        if (module, f"{owner}.{name}") in self.functions:
            return module, f"{owner}.{name}"
        for base in self.classes[module, owner].bases:
            base = base.value if isinstance(base, ast.Subscript) else base
            found = self._resolve(module, base.id) if isinstance(base, ast.Name) else None
            method = self._method(*found, name) if found and found in self.classes else None
            if method:
                return method
        return None

    def _called(self, module: str, owner: str | None, called: ast.expr) -> Name | None:
        if isinstance(called, ast.Name):
            found = self._resolve(module, called.id)
            return self._method(*found, "__init__") if found and found in self.classes else found
        if not (isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name)):
            return None
        if called.value.id in ("self", "cls"):
            return self._method(module, owner, called.attr) if owner else None
        if called.value.id in self.imports[module]:
            return self._resolve(".".join(self.imports[module][called.value.id]), called.attr)
        return None

    def faults(self) -> Iterator[str]:
        """Yield a line for each call of a collective function in one that is not marked."""
        for (module, name), (owner, function) in self.functions.items():
            if _is_marked(function) or name in LOCAL or module.startswith(PROGRAMS):
                continue
            for call in _calls(function):
                called = self._called(module, owner, call.func)
                if called and called in self.functions and _is_marked(self.functions[called][1]):
                    yield f"{module}:{call.lineno}: {name} calls {called[1]}: mark it @collective"


def _is_marked(function: ast.FunctionDef) -> bool:
    return any(isinstance(d, ast.Name) and d.id == "collective" for d in function.decorator_list)


def _calls(function: ast.FunctionDef) -> Iterator[ast.Call]:
    """Yield the calls of a function, but not those of the functions inside it."""
    nodes: list[ast.AST] = list(function.body)
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Call):
            yield node
        if not isinstance(node, ast.FunctionDef | ast.Lambda | ast.ClassDef):
            nodes += ast.iter_child_nodes(node)


def test_local_functions_call_no_collective_one() -> None:
    package = Package(Path(hvdtrain.__file__).parent)
    assert list(package.faults()) == []
    assert {name for _, name in package.functions} >= set(LOCAL)
