"""Files that all ranks write at once."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from hvdtrain_lint.rules.rule import Found, Rule
from hvdtrain_lint.source.script import Script, keyword
from hvdtrain_lint.source.tree import last_name, path_of, words_in

_WRITING = {"torch.save", "numpy.save", "numpy.savez", "numpy.savetxt", "np.save", "joblib.dump"}
_KERAS_SAVES = {"save", "save_weights", "save_model"}
_KERAS_CALLBACKS = ("ModelCheckpoint", "TensorBoard", "CSVLogger", "BackupAndRestore")
_MODELS = re.compile(
    r"(^|\.)(keras|applications)\.|(^|\.)(Sequential|Model|load_model|clone_model)$"
)
_TRACKING = {
    *("mlflow.log_metric", "mlflow.log_metrics", "mlflow.log_param", "mlflow.log_params"),
    *("mlflow.log_artifact", "mlflow.pytorch.log_model", "mlflow.tensorflow.log_model"),
    *("wandb.init",),
}
_WRITER = "SummaryWriter"
_ADDS = ("add_scalar", "add_scalars", "add_image", "add_histogram", "add_text")
# Paths of one process, or of none.
_OWN_PATH = re.compile(
    r"rank|worker|proc|host|pid|tmp|temp|bytesio|stringio|devnull", re.IGNORECASE
)


def _written(script: Script) -> Iterator[Found]:
    for call in script.everywhere([c for c in script.tree.calls if _writes(script, c)]):
        if not _has_own_path(script, call):
            yield Found(call, f"{path_of(call.func) or last_name(call)}() runs on all ranks")


def _writes(script: Script, call: ast.Call) -> bool:
    full = script.names.full(call) or ""
    if full in _WRITING:
        return True
    if full == "open":
        mode = keyword(call, "mode", 1)
        return isinstance(mode, ast.Constant) and str(mode.value)[:1] in ("w", "x")
    if not isinstance(call.func, ast.Attribute) or not script.names.imports("keras", "tensorflow"):
        return False
    return call.func.attr in _KERAS_SAVES and _is_model(script, call.func.value)


def _is_model(script: Script, node: ast.expr) -> bool:
    """Return whether this is a model of Keras: by what makes it, by name if that is not seen."""
    made = script.values.makers(node)
    if not any(made):
        return "model" in last_name(node).lower()
    own = {each.name: each for each in script.tree.known if isinstance(each, ast.ClassDef)}
    bases = [base for name in made if name in own for base in own[name].bases]
    made += [script.names.full(base) or "" for base in bases]
    return any(_MODELS.search(name) for name in made)


def _has_own_path(script: Script, call: ast.Call) -> bool:
    arguments = [*call.args, *(each.value for each in call.keywords)]
    for argument in arguments:
        if script.ranks.mentions_rank(argument):
            return True
        for each in ast.walk(argument):
            found = script.values.origins(each) if isinstance(each, ast.Name) else [each]
            if any(_OWN_PATH.search(word) for origin in found for word in words_in(origin)):
                return True
    return False


def _callbacks(script: Script) -> Iterator[Found]:
    if not script.uses_hvd or "keras" not in script.names.frameworks:
        return
    for call in script.everywhere(script.named(*_KERAS_CALLBACKS)):
        if not _has_own_path(script, call) and not _is_for_one(script, call):
            yield Found(call, f"{last_name(call)} is a callback of all ranks")


def _is_for_one(script: Script, call: ast.Call) -> bool:
    """Return whether a callback is handed to RankZero, or used on one rank only."""
    if any(
        isinstance(a, ast.Call) and last_name(a) == "RankZero" for a in script.tree.ancestors(call)
    ):
        return True
    statement = script.tree.statement(call)
    if not isinstance(statement, ast.Assign) or not isinstance(statement.targets[0], ast.Name):
        return False
    if statement.value is not call:
        return False
    name = statement.targets[0].id
    uses = [
        node
        for node in script.tree.nodes
        if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load)
    ]
    return bool(uses) and all(_one_uses(script, use) for use in uses)


def _one_uses(script: Script, use: ast.Name) -> bool:
    holder = script.tree.parent(use)
    wrapped = isinstance(holder, ast.Call) and last_name(holder) == "RankZero"
    return wrapped or script.guards.perhaps(use)


def _tracked(script: Script) -> Iterator[Found]:
    seen: set[str] = set()
    adds = any(True for _ in script.everywhere(script.named(*_ADDS)))
    for call in script.everywhere(script.tree.calls):
        full = script.names.full(call) or ""
        is_writer = adds and last_name(call) == _WRITER
        if not is_writer and full not in _TRACKING:
            continue
        if full in seen or _has_own_path(script, call) or keyword(call, "group") is not None:
            continue
        seen.add(full)
        yield Found(call, f"{path_of(call.func)}() runs on all ranks")


RULES = (
    Rule(
        "HVD401",
        "a file that all ranks write",
        "ranks overwrite one another's file at the same moment, and may leave it broken",
        "write it under `if rank() == 0:`, or put the rank into its name",
        _written,
    ),
    Rule(
        "HVD402",
        "a Keras callback that writes, on all ranks",
        "ranks overwrite one another's files",
        "add it to the callbacks on rank 0 only, or wrap it in hvdtrain.keras's callbacks.RankZero",
        _callbacks,
    ),
    Rule(
        "HVD403",
        "a tracker or a writer of events on all ranks",
        "every value is recorded once for each rank",
        "do it under `if rank() == 0:`, with values that all ranks have averaged before",
        _tracked,
    ),
)
