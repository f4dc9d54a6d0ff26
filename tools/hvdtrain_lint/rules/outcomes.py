"""Results, files and lines of output: of which rank, and how often."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from hvdtrain_lint.rules.rule import Found, rule
from hvdtrain_lint.source.data import evaluates, is_every_nth
from hvdtrain_lint.source.names import HVD
from hvdtrain_lint.source.script import Script, keyword
from hvdtrain_lint.source.tree import Scope, last_name, path_of, words_in

_NOT_IN_PLACE = {f"{HVD}.allreduce", f"{HVD}.broadcast", f"{HVD}.allgather"}
_VALUES = ("item", "numpy", "cpu", "detach")
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
_OWN_LINE = re.compile(r"rank|gpu|worker|host|pid|device|process|node", re.IGNORECASE)
_OWN_TEXT = re.compile(r"rank|gpu|worker|process|node", re.IGNORECASE)
_VERBOSE_POSITION = 4


@rule(
    "HVD204",
    "an average that is divided by the number of ranks again",
    "the result is too small by that factor",
    "leave the division out, or use allreduce(..., op=Sum)",
)
def _divided_twice(script: Script) -> Iterator[Found]:
    for node in script.tree.nodes:
        if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Div):
            continue
        if script.ranks.is_size(node.right) and _is_average(script, node.left):
            yield Found(node, "allreduce() has averaged already, and is divided by size() again")


def _is_average(script: Script, node: ast.expr) -> bool:
    if isinstance(node, ast.Call) and script.names.full(node) != f"{HVD}.allreduce":
        if last_name(node) in _VALUES and isinstance(node.func, ast.Attribute):
            return _is_average(script, node.func.value)
        return last_name(node) == "float" and bool(node.args) and _is_average(script, node.args[0])
    origins = [each for each in script.values.origins(node) if each is not node]
    if not origins:
        return _averages(script, node)
    return all(_is_average(script, each) for each in origins)


def _averages(script: Script, node: ast.expr) -> bool:
    if not isinstance(node, ast.Call) or script.names.full(node) != f"{HVD}.allreduce":
        return False
    op = keyword(node, "op")
    scaled = any(each.arg not in ("name", "op", "tensor") for each in node.keywords)
    return len(node.args) <= 1 and not scaled and (op is None or last_name(op) == "Average")


@rule(
    "HVD209",
    "an average over ranks of averages over unequal shares",
    "that is not the average over samples, because shares differ by one sample",
    "add up sums and counts over the ranks (op=Sum), then divide",
)
def _unequal_shares(script: Script) -> Iterator[Found]:
    for call in script.tree.calls:
        if not _averages(script, call):
            continue
        tensor = keyword(call, "tensor", 0)
        for each in script.values.origins(tensor) if tensor is not None else []:
            if any(_is_share(script, divisor) for divisor in _divisors(each)):
                yield Found(call, "each rank divides by the length of its own share")
                break


def _divisors(node: ast.expr) -> Iterator[ast.expr]:
    """Yield x for each division by len(x) in an expression."""
    for each in ast.walk(node):
        if isinstance(each, ast.BinOp) and isinstance(each.op, ast.Div):
            right = each.right
            if isinstance(right, ast.Call) and last_name(right) == "len" and right.args:
                yield right.args[0]


def _is_share(script: Script, node: ast.expr) -> bool:
    return any(is_every_nth(script, each) for each in script.values.origins(node))


@rule(
    "HVD210",
    "a sum over ranks that have all evaluated all samples",
    "the result is size() times too large",
    "give each rank its own samples, or do not add up",
)
def _counted_by_all(script: Script) -> Iterator[Found]:
    if script.uses_accelerate or script.has_trainer:
        return
    for node in script.tree.nodes:
        if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Div):
            continue
        if not _is_whole_set(script, node.right):
            continue
        scope = script.tree.scope(node)
        paths = {path_of(each) for each in ast.walk(node.left)} - {None}
        summed = [
            c for c in script.tree.calls if script.tree.scope(c) is scope and _sums(script, c)
        ]
        if any(path_of(call.args[0]) in paths for call in summed) and not _has_size(script, node):
            yield Found(
                node,
                "every rank evaluates all samples, and the sum over ranks is divided once",
            )


def _sums(script: Script, call: ast.Call) -> bool:
    if script.names.full(call) != "torch.distributed.all_reduce" or not call.args:
        return False
    op = keyword(call, "op", 1)
    return op is None or last_name(op) == "SUM"


def _is_whole_set(script: Script, node: ast.expr) -> bool:
    """Return whether this is len(loader.dataset) of a loader that every rank reads in full."""
    if not isinstance(node, ast.Call) or last_name(node) != "len" or not node.args:
        return False
    data = node.args[0]
    if not isinstance(data, ast.Attribute) or data.attr != "dataset":
        return False
    loaders = script.values.origins(data.value)
    return bool(loaders) and all(_reads_all(script, loader) for loader in loaders)


def _reads_all(script: Script, loader: ast.expr) -> bool:
    if not isinstance(loader, ast.Call) or script.names.last(loader) != "DataLoader":
        return False
    if {each.arg for each in loader.keywords} & {"sampler", "batch_sampler", None}:
        return False
    data = keyword(loader, "dataset", 0)
    return data is not None and len(loader.args) <= 2 and evaluates(script, loader, data)


def _has_size(script: Script, node: ast.BinOp) -> bool:
    statement = script.tree.statement(node)
    return statement is None or any(
        isinstance(each, ast.expr) and script.ranks.is_size(each) for each in ast.walk(statement)
    )


@rule(
    "HVD208",
    "the result of an operation that is thrown away",
    "what follows uses the value of its own rank",
    "assign the result, or use the operation in place, such as allreduce_()",
)
def _thrown_away(script: Script) -> Iterator[Found]:
    for node in script.tree.nodes:
        call = node.value if isinstance(node, ast.Expr) else None
        if not isinstance(call, ast.Call) or script.names.full(call) not in _NOT_IN_PLACE:
            continue
        tensor = keyword(call, "tensor", 0)
        path = path_of(tensor) if tensor is not None else None
        if path and _is_used_after(script, path, call):
            name = last_name(call)
            yield Found(call, f"{name}() returns its result and leaves {path} as it was")


def _is_used_after(script: Script, path: str, call: ast.Call) -> bool:
    scope = script.tree.scope(call)
    return any(
        path_of(each) == path and each.lineno > (call.end_lineno or call.lineno)
        for each in script.tree.own(scope)
        if isinstance(each, (ast.Name, ast.Attribute))
    )


@rule(
    "HVD401",
    "a file that all ranks write",
    "ranks overwrite one another's file at the same moment, and may leave it broken",
    "write it under `if rank() == 0:`, or put the rank into its name",
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


@rule(
    "HVD402",
    "a Keras callback that writes, on all ranks",
    "ranks overwrite one another's files",
    "add it to the callbacks on rank 0 only, or wrap it in hvdtrain.keras's callbacks.RankZero",
)
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


@rule(
    "HVD403",
    "a tracker or a writer of events on all ranks",
    "every value is recorded once for each rank",
    "do it under `if rank() == 0:`, with values that all ranks have averaged before",
)
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


@rule(
    "HVD404",
    "print() on all ranks in a loop",
    "every line appears once for each rank",
    "print on rank 0 only, or begin the line with the rank",
)
def _printed(script: Script) -> Iterator[Found]:
    if _replaces_print(script):
        return
    seen: set[Scope] = set()
    for call in script.everywhere([c for c in script.tree.calls if path_of(c.func) == "print"]):
        scope = script.tree.scope(call)
        if (
            scope in seen
            or not _repeats(script, call, frozenset())
            or _names_its_rank(script, call)
        ):
            continue
        seen.add(scope)
        yield Found(call, "print() in a loop runs on all ranks")


def _replaces_print(script: Script) -> bool:
    """Return whether print is another function here, as where only rank 0's is left."""
    if any(function.name == "print" for function in script.tree.functions):
        return True
    return any(
        isinstance(node, (ast.Name, ast.Attribute))
        and isinstance(node.ctx, ast.Store)
        and last_name(node) in ("print", "stdout")
        for node in script.tree.nodes
    )


def _repeats(script: Script, node: ast.AST, seen: frozenset[Scope]) -> bool:
    if script.tree.loops(node):
        return True
    scope = script.tree.scope(node)
    if isinstance(scope, ast.Module) or scope in seen:
        return False
    sites = script.calls.sites(scope)
    return any(_repeats(script, site, seen | {scope}) for site in sites)


def _names_its_rank(script: Script, call: ast.Call) -> bool:
    if keyword(call, "file") is not None:
        return True
    if any(script.ranks.mentions_rank(each) for each in call.args):
        return True
    if any(_OWN_LINE.search(word) for each in call.args for word in words_in(each)):
        return True
    return any(
        isinstance(each, ast.Constant)
        and isinstance(each.value, str)
        and _OWN_TEXT.search(each.value)
        for argument in call.args
        for each in ast.walk(argument)
    )


@rule(
    "HVD405",
    "a progress bar on all ranks",
    "the bars of all ranks overwrite one another",
    "tqdm(..., disable=rank() != 0); in Keras verbose=1 if hvd.rank() == 0 else 0",
)
def _bars(script: Script) -> Iterator[Found]:
    for call in script.everywhere(script.named("tqdm", "trange")):
        own = {each.arg for each in call.keywords} & {"disable", "position", "file", None}
        of_tqdm = (script.names.full(call) or "").startswith("tqdm")
        named = any(script.ranks.mentions_rank(each.value) for each in call.keywords)
        if of_tqdm and not own and not named:
            yield Found(call, f"{path_of(call.func)}() runs on all ranks")
    if not script.uses_hvd or "keras" not in script.names.frameworks:
        return
    for call in script.everywhere(script.named("fit", "fit_generator")):
        if any(each.arg is None for each in call.keywords):
            continue
        verbose = keyword(call, "verbose", _VERBOSE_POSITION)
        if verbose is None or (isinstance(verbose, ast.Constant) and verbose.value):
            yield Found(call, "fit() reports its progress on all ranks")
