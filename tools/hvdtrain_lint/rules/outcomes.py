"""Results, files and lines of output: of which rank, and how often."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable

from hvdtrain_lint.rules.rule import Places
from hvdtrain_lint.source.data import evaluates, has_sampler, is_every_nth
from hvdtrain_lint.source.script import Script
from hvdtrain_lint.source.tree import HVD, Scope, constant, last_name, path_of, words_in, written

_NOT_IN_PLACE = {f"{HVD}.allreduce", f"{HVD}.broadcast", f"{HVD}.allgather"}
_AVERAGE = ast.Name("Average")
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
_ADDS = ("add_scalar", "add_scalars", "add_image", "add_histogram", "add_text")
# Paths of one process, or of none.
_OWN_PATH = re.compile(r"(?i)rank|worker|proc|host|pid|tmp|temp|bytesio|stringio|devnull")
_OWN_LINE = re.compile(r"(?i)rank|gpu|worker|host|pid|device|process|node")
_OWN_TEXT = re.compile(r"(?i)rank|gpu|worker|process|node")


def hvd204(script: Script) -> Places:
    for node in _quotients(script.nodes):
        if script.is_size(node.right) and all(
            _averages(script, e) for e in script.origins(node.left)
        ):
            yield node, "allreduce() has averaged already, and is divided by size() again"


def _averages(script: Script, node: ast.AST) -> bool:
    if not isinstance(node, ast.Call) or script.full(node) != f"{HVD}.allreduce":
        return False
    args, named = script.given(node)
    is_average = last_name(named.get("op", _AVERAGE)) == "Average"
    return len(args) <= 1 and named.keys() <= {"name", "op", "tensor"} and is_average


def hvd209(script: Script) -> Places:
    for call in (call for call in script.calls if _averages(script, call)):
        averaged = script.origins(script.keyword(call, "tensor", 0))
        parts = (node for each in averaged for node in ast.walk(each))
        lengths = script.origins(*(_measured(node.right) for node in _quotients(parts)))
        if any(is_every_nth(script, each) for each in lengths):
            yield call, "each rank divides by the length of its own share"


def _quotients(nodes: Iterable[ast.AST]) -> list[ast.BinOp]:
    return [each for each in nodes if isinstance(each, ast.BinOp) and isinstance(each.op, ast.Div)]


def _measured(node: ast.expr) -> ast.expr | None:
    """Return x for len(x)."""
    is_length = isinstance(node, ast.Call) and last_name(node) == "len"
    return next(iter(node.args), None) if is_length else None  # type: ignore[attr-defined]


def hvd210(script: Script) -> Places:
    if script.is_managed:
        return
    for node in _quotients(script.nodes):
        statement = next(each for each in script.ancestors(node) if isinstance(each, ast.stmt))
        if not _is_whole_set(script, node.right) or any(map(script.is_size, ast.walk(statement))):
            continue
        near = (each for each in script.calls if script.scope(each) is script.scope(node))
        summed = {path_of(call.args[0]) for call in near if _sums(script, call)}
        if (summed - {None}).intersection(map(path_of, ast.walk(node.left))):
            yield node, "every rank evaluates all samples, and the sum over ranks is divided once"


def _sums(script: Script, call: ast.Call) -> bool:
    op = script.keyword(call, "op", 1)
    is_sum = op is None or last_name(op) == "SUM"
    return is_sum and bool(call.args) and script.full(call) == "torch.distributed.all_reduce"


def _is_whole_set(script: Script, node: ast.expr) -> bool:
    """Return whether this is len(loader.dataset) of a loader that every rank reads in full."""
    data = _measured(node)
    if not isinstance(data, ast.Attribute) or data.attr != "dataset":
        return False
    loaders = script.made_by(data.value, "DataLoader")
    return loaders == script.origins(data.value) != [] and all(
        evaluates(script, each, script.keyword(each, "dataset", 0))
        and not has_sampler(script, each)
        for each in loaders
    )


def hvd208(script: Script) -> Places:
    for call in script.calls:
        if script.full(call) not in _NOT_IN_PLACE or not isinstance(script.parent(call), ast.Expr):
            continue
        path = path_of(script.keyword(call, "tensor", 0))
        end = call.end_lineno or call.lineno
        if path and any(
            path_of(each) == path and each.lineno > end
            for each in script.own(script.scope(call))
            if isinstance(each, (ast.Name, ast.Attribute))
        ):
            yield call, f"{last_name(call)}() returns its result and leaves {path} as it was"


def hvd401(script: Script) -> Places:
    for call in script.everywhere(call for call in script.calls if _writes(script, call)):
        if not _has_own_path(script, call):
            yield call, f"{written(call)} runs on all ranks"


def _writes(script: Script, call: ast.Call) -> bool:
    full, owner = script.full(call), script.owner(call)
    if full == "open":
        return str(script.option(call, "mode", 1))[:1] in ("w", "x")
    is_keras = script.last(call) in _KERAS_SAVES and script.imports("keras", "tensorflow")
    if full in _WRITING or not is_keras or owner is None:
        return full in _WRITING
    # A model of Keras: by what makes it, by name if that is not seen.
    made = script.makers(owner)
    is_named = "model" in last_name(owner).lower()
    return any(map(_MODELS.search, made)) if any(made) else is_named


def _has_own_path(script: Script, call: ast.Call) -> bool:
    parts = [each for argument in script.arguments(call) for each in ast.walk(argument)]
    parts += script.origins(*(each for each in parts if isinstance(each, ast.Name)))
    own = any(map(_OWN_PATH.search, words_in(*parts)))
    return own or script.mentions_rank(*script.arguments(call))


def hvd402(script: Script) -> Places:
    for call in script.everywhere(script.named(*_KERAS_CALLBACKS)) if script.uses_hvd_keras else ():
        if not _has_own_path(script, call) and not _is_for_one(script, call):
            yield call, f"{script.last(call)} is a callback of all ranks"


def _is_for_one(script: Script, call: ast.Call) -> bool:
    """Return whether a callback is handed to RankZero, or used on one rank only."""

    def is_for_one(node: ast.AST) -> bool:
        handed = any(last_name(each) == "RankZero" for each in script.ancestors(node))
        return handed or script.is_guarded(node)

    names = (n for n in script.nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load))
    uses = [name for name in names if call in script.origins(name)]
    return is_for_one(call) or (bool(uses) and all(map(is_for_one, uses)))


def hvd403(script: Script) -> Places:
    seen: set[str] = set()
    adds = any(script.everywhere(script.named(*_ADDS)))
    writers = script.named("SummaryWriter") if adds else []
    for call in script.everywhere(
        c for c in script.calls if script.full(c) in _TRACKING or c in writers
    ):
        full = script.full(call)
        if full not in seen and not script.gives(call, "group") and not _has_own_path(script, call):
            seen.add(full)
            yield call, f"{written(call)} runs on all ranks"


def hvd404(script: Script) -> Places:
    # print may be another function here, as where only rank 0's is left.
    if script.assigns("print", "stdout"):
        return
    scopes: set[Scope] = set()
    for call in script.everywhere(c for c in script.calls if script.full(c) == "print"):
        texts = (str(constant(each)) for argument in call.args for each in ast.walk(argument))
        is_named = any(map(_OWN_TEXT.search, texts)) or script.mentions_rank(*call.args)
        if is_named or any(map(_OWN_LINE.search, words_in(*call.args))):
            continue
        repeats = script.repeats(call, lambda loop: True) and not script.gives(call, "file")
        if repeats and script.scope(call) not in scopes:
            scopes.add(script.scope(call))
            yield call, "print() in a loop runs on all ranks"


def hvd405(script: Script) -> Places:
    for call in script.everywhere(script.named("tqdm", "trange")):
        named = script.given(call)[1]
        is_quiet = script.gives(call, "disable", "position", "file", None)
        is_quiet = is_quiet or script.mentions_rank(*named.values())
        if script.full(call).startswith("tqdm") and not is_quiet:
            yield call, f"{written(call)} runs on all ranks"
    fits = script.named("fit", "fit_generator") if script.uses_hvd_keras else []
    for call in script.everywhere(each for each in fits if not script.gives(each, None)):
        if script.option(call, "verbose", 4, default=1):
            yield call, "fit() reports its progress on all ranks"
