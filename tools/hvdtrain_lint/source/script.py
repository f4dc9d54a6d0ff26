"""A script, parsed, with all that the rules ask about it."""

from __future__ import annotations

import ast
import tokenize
from functools import cached_property
from pathlib import Path

from hvdtrain.errors import UsageError
from hvdtrain_lint.source.guards import Guards
from hvdtrain_lint.source.tree import NAMES, last_name
from hvdtrain_lint.source.values import HVD, modules_of

_MOST_MODULES = 20
_TRAINER_LIBRARIES = ("lightning", "pytorch_lightning", "transformers", "ignite", "composer")
_TRAINERS = ("Trainer", "Fabric", "Seq2SeqTrainer", "Engine")


class Script(Guards):
    """What is known of a script."""

    @cached_property
    def uses_hvd(self) -> bool:
        """Whether it starts ranks through Horovod's interface."""
        return any(self.full(call) == f"{HVD}.init" for call in self.calls)

    @cached_property
    def uses_hvd_keras(self) -> bool:
        """Whether it does so for Keras."""
        return self.uses_hvd and "keras" in self.frameworks

    @cached_property
    def is_managed(self) -> bool:
        """Whether a library divides its data, or runs its loops, and knows of ranks itself."""
        return bool(self.named("Accelerator")) or self.has_trainer

    @cached_property
    def has_trainer(self) -> bool:
        """Whether a library's trainer runs its loops and knows of ranks itself."""
        return self.imports(*_TRAINER_LIBRARIES) and bool(self.named(*_TRAINERS))

    @cached_property
    def joins(self) -> bool:
        """Whether ranks join(), after which others may continue without them."""
        return any(self.full(call) == f"{HVD}.join" for call in self.calls)

    @cached_property
    def words(self) -> set[str]:
        """All names and attributes in it, and what it imports."""
        imported = {module.rpartition(".")[2] for module in self.modules}
        return imported.union(last_name(node) for node in self.nodes if isinstance(node, NAMES))

    def named(self, *names: str) -> list[ast.Call]:
        """Return the calls whose last word is one of these, in the order of the text."""
        return [call for call in self.calls if self.last(call) in names]


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
    except (OSError, UnicodeDecodeError, SyntaxError, LookupError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"{path} cannot be read: {reason}: name a Python script") from None
