"""A script, parsed, with all that the rules ask about it."""

from __future__ import annotations

import ast
import re
import tokenize
from collections.abc import Callable, Mapping
from pathlib import Path

from hvdtrain.errors import UsageError
from hvdtrain_lint.source.guards import Guards
from hvdtrain_lint.source.tree import HVD, NAMES, Function, last_name, modules_of

_MOST_MODULES = 20
_TRAINER_LIBRARIES = ("lightning", "pytorch_lightning", "transformers", "ignite", "composer")
_TRAINERS = ("Trainer", "Fabric", "Seq2SeqTrainer", "Engine")


class Script(Guards):
    """What is known of a script.

    `uses_hvd` says whether it starts ranks through Horovod's interface, `uses_hvd_keras` whether
    for Keras; `joins` whether ranks join(), after which others may continue without them;
    `has_trainer` whether a library's trainer runs its loops and knows of ranks, `is_managed`
    whether one does that or divides its data. `words` are its names, attributes and imports;
    `inside` is what leads_to() has found in functions.
    """

    def __init__(self, module: ast.Module, beside: Mapping[str, ast.Module]) -> None:
        super().__init__(module, beside)
        self.inside: dict[tuple[Function, object], ast.Call | None] = {}
        called = {self.full(call) for call in self.calls}
        self.uses_hvd = f"{HVD}.init" in called
        self.uses_hvd_keras = self.uses_hvd and "keras" in self.frameworks
        self.joins = f"{HVD}.join" in called
        self.has_trainer = self.imports(*_TRAINER_LIBRARIES) and bool(self.named(*_TRAINERS))
        self.is_managed = self.has_trainer or bool(self.named("Accelerator"))
        names = (last_name(node) for node in self.nodes if isinstance(node, NAMES))
        self.words = {*names, *(module.rpartition(".")[2] for module in self.modules)}

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


_HVD = re.compile(
    rf"{HVD}\.(((grouped_)?(allreduce|allgather|reducescatter)|broadcast|alltoall)(_async)?_?"
    r"|broadcast_(parameters|optimizer_state|object|variables|global_variables)"
    r"|allgather_object|barrier)"
)
_TORCH = re.compile(
    r"torch\.distributed\.((all_)?(reduce|gather)|all_(reduce|gather)_coalesced|reduce_scatter"
    r"|reduce_scatter_tensor|all_gather_into_tensor|all_to_all(_single)?|broadcast|scatter"
    r"|(all_)?gather_object|(broadcast|scatter)_object_list|(monitored_)?barrier)"
)
_ACCELERATOR = {
    *("wait_for_everyone", "gather", "gather_for_metrics", "reduce", "pad_across_processes"),
}


def collective(script: Script, call: ast.Call) -> bool:
    """Return whether every rank has to make a call; not so if it is for a group of ranks."""
    name, owner, full = script.last(call), script.owner(call), script.full(call)
    if script.gives(call, "group", "process_set", "pg") or (call.args and name == "barrier"):
        return False
    if _TORCH.fullmatch(full) or (_HVD.fullmatch(full) and not script.joins):
        return True
    if name == "save_checkpoint" and script.imports("lightning", "pytorch_lightning"):
        return bool(script.made_by(owner, "Trainer"))
    return name in _ACCELERATOR and bool(script.made_by(owner, "Accelerator"))


def leads_to(
    script: Script, call: ast.Call, wanted: Callable[[Script, ast.Call], bool]
) -> ast.Call | None:
    """Return the wanted call that a call is, or that its function makes whatever it is given."""
    if wanted(script, call):
        return call
    called = script.called(call)
    if len(called) != 1:
        return None
    at = called[0], wanted
    if at not in script.inside:
        script.inside[at] = None  # a function that calls itself makes nothing more
        calls = (each for each in script.own(called[0]) if isinstance(each, ast.Call))
        sure = (each for each in calls if not _is_conditional(script, each))
        found = (leads_to(script, each, wanted) for each in sure)
        script.inside[at] = next(filter(None, found), None)
    return script.inside[at]


def averages_by_hvd(script: Script) -> bool:
    """Return whether an optimizer or a tape of Horovod's interface averages gradients."""
    wrappers = script.named("DistributedOptimizer", "DistributedGradientTape")
    return any(script.full(call).startswith(HVD) for call in wrappers)


def _is_conditional(script: Script, node: ast.AST) -> bool:
    kinds = (ast.If, ast.IfExp, ast.Try, ast.BoolOp)
    before = (each for statement in script.before(node) for each in ast.walk(statement))
    is_inside = any(isinstance(holder, kinds) for holder, _ in script.within(node))
    return is_inside or any(isinstance(each, ast.Return) for each in before)
