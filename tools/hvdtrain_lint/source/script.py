"""A script, parsed, with all that the rules ask about it."""

from __future__ import annotations

import ast
import tokenize
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path

from hvdtrain.errors import UsageError
from hvdtrain_lint.source.calls import Calls
from hvdtrain_lint.source.guards import Guards
from hvdtrain_lint.source.names import HVD, Names, modules_of
from hvdtrain_lint.source.ranks import Ranks
from hvdtrain_lint.source.tree import Tree, last_name
from hvdtrain_lint.source.values import Values

_MOST_MODULES = 20
_TRAINERS = {"Trainer", "Fabric", "Seq2SeqTrainer", "Engine"}


class Script:
    """What is known of a script."""

    def __init__(self, module: ast.Module, beside: Mapping[str, ast.Module] | None = None) -> None:
        self.tree = Tree(module, beside or {})
        self.names = Names(self.tree)
        self.values = Values(self.tree, self.names)
        self.methods = self.values.methods
        self.ranks = Ranks(self.tree, self.names, self.values, self.methods)
        self.calls = Calls(self.tree, self.names, self.methods)
        self.guards = Guards(self.tree, self.ranks, self.calls)
        # The loops that read what a call has made; see data.py, which fills it when it is asked.
        self.readings: dict[ast.expr, list[ast.AST]] | None = None

    @cached_property
    def uses_hvd(self) -> bool:
        """Whether it starts ranks through Horovod's interface."""
        return any(self.names.full(call) == f"{HVD}.init" for call in self.tree.calls)

    @cached_property
    def uses_accelerate(self) -> bool:
        """Whether Accelerate divides its data among ranks."""
        return bool(self.named("Accelerator"))

    @cached_property
    def has_trainer(self) -> bool:
        """Whether a library's trainer runs its loops and knows of ranks itself."""
        libraries = ("lightning", "pytorch_lightning", "transformers", "ignite", "composer")
        return self.names.imports(*libraries) and any(
            self.names.last(call) in _TRAINERS for call in self.tree.calls
        )

    @cached_property
    def words(self) -> frozenset[str]:
        """All names and attributes in it, and what it imports."""
        names = (node for node in self.tree.nodes if isinstance(node, (ast.Name, ast.Attribute)))
        imported = (module.rpartition(".")[2] for module in self.names.modules)
        return frozenset({last_name(node) for node in names} | set(imported))

    def named(self, *names: str) -> list[ast.Call]:
        """Return the calls whose last word is one of these."""
        return [call for call in self.tree.calls if self.names.last(call) in names]

    def everywhere(self, calls: list[ast.Call]) -> Iterator[ast.Call]:
        """Yield those calls that every rank surely makes."""
        for call in calls:
            if self.calls.runs_on_ranks(call) and not self.guards.perhaps(call):
                yield call


def keyword(call: ast.Call, name: str, position: int | None = None) -> ast.expr | None:
    """Return an argument by its name, or by its position; None if it is not given."""
    for each in call.keywords:
        if each.arg == name:
            return each.value
    if position is not None and position < len(call.args):
        return call.args[position]
    return None


def parse_script(path: Path) -> tuple[Script, str]:
    """Read a script; return it and its text."""
    text = _read(path)
    try:
        module = ast.parse(text, str(path))
        return Script(module, _beside(path.parent, module)), text
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None) or 1
        reason = getattr(error, "msg", None) or str(error)
        raise UsageError(
            f"{path}:{line}: {reason}: this Python cannot parse it, so correct the line"
        ) from None
    except (RecursionError, MemoryError):
        raise too_deep(path) from None


def _beside(folder: Path, script: ast.Module) -> dict[str, ast.Module]:
    """Return the modules of a script's folder that it imports, those that they import included."""
    found: dict[str, ast.Module] = {}
    waiting = [script]
    while waiting:
        for name in modules_of(waiting.pop()):
            path = folder.joinpath(*name.split(".")).with_suffix(".py")
            if name in found or len(found) == _MOST_MODULES or not path.is_file():
                continue
            try:
                found[name] = ast.parse(_read(path))
            except (UsageError, SyntaxError, ValueError, RecursionError, MemoryError):
                continue  # it says so itself when it is checked
            waiting.append(found[name])
    return found


def too_deep(path: Path) -> UsageError:
    """Return the error for a script with an expression in which Python or a rule gets lost."""
    return UsageError(
        f"{path}: an expression has too many parts inside one another: divide it into several"
    )


def _read(path: Path) -> str:
    """Return the text of a script as Python reads it, in the encoding that it names."""
    try:
        with tokenize.open(path) as file:
            return file.read()
    except OSError as error:
        reason = error.strerror
    except UnicodeDecodeError as error:
        reason = f"it is not text in {error.encoding}"
    except (SyntaxError, LookupError) as error:
        reason = str(error)
    raise UsageError(f"{path} cannot be read: {reason}: name a Python script")
