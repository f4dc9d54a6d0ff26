"""Draws random programs for keras_programs, of features that real programs have."""

from __future__ import annotations

import copy
import os

from torch_drawing import Draw, Spec

LAYERS = ["dense", "dense", "embedding", "embedding", "norm", "shared", "frozen"]
EMA = ("use_ema", "ema_momentum", "ema_overwrite_frequency")
OPTIMIZERS = ["sgd", "momentum", "adam", "adamw", "rmsprop", "adagrad"]
# On one node they are the plain average; those of weights are that with plain SGD.
EXCHANGES = ["average", "half:type=bf16", "half:type=fp16", "nbit:bits=2", "powersgd:rank=2"]
WEIGHTS = ["local:steps=1", "postlocal:after=1,steps=1", "diloco:steps=1,rate=1,momentum=0"]


def draw(seed: int, backend: str | None = None) -> Spec:
    d = Draw(f"{seed}")
    backend = backend or os.environ.get("KERAS_BACKEND", "tensorflow")
    program: Spec = {"loop": d.choice(["fit", "fit", "fit", "batch", "own"])}
    program["layers"] = [{"kind": d.choice(LAYERS)} for _ in range(d.randint(1, 4))]
    program["losses"] = [d.choice(["mse", "crossentropy"]) for _ in range(d.choice([1, 1, 2]))]
    if d.maybe(0.15):
        program["losses"].insert(d.randint(0, 1), "unused")
    program["reduction"] = d.choice(["sum", "mean", "mean", "mean_with_sample_weight"])
    program["optimizer"] = d.choice(OPTIMIZERS)
    program["op"] = d.choice(["average", "average", "average", "sum"])
    for key, chance, values in (
        ("f32", 0.2, [True]),
        ("mask", 0.3, [True]),
        ("pool", 0.5, [True]),
        ("l2", 0.2, [0.1]),
        ("weights", 0.5, ["sample", "sample", "class"]),
        ("eager", 0.4, [True]),
        ("epochs", 0.5, [2]),
        ("scale", 0.15, [True]),
        ("passes", 0.2, [2, 3]),
        ("average_passes", 0.5, [True]),
        ("members", 0.15, [[0, 1], [1, 2], [0, 2], [1]]),
        ("short", 0.3, [[0, 1], [1, 0], [0, 2, 1]]),
        ("data", 0.4, ["arrays", "generator"]),
        ("executions", 0.15, [2, 3]),
        ("jit", 0.3, [True, False]),
        ("validate", 0.2, [True]),
        ("schedule", 0.2, [True]),
        ("fits", 0.15, [2]),
    ):
        if d.maybe(chance):
            program[key] = d.choice(values)
    program["with"] = _settings(d)
    program["options"] = _options(d)
    names = [("broadcast", 0.8), ("metrics", 0.4), ("warmup", 0.2)]
    program["callbacks"] = [name for name, chance in names if d.maybe(chance)]
    counts = [[d.randint(1, 4) for _ in range(d.randint(1, 3))] for _ in range(d.randint(1, 4))]
    if d.maybe(0.4):
        counts = [[3], [3], [3], [2, 1]]
    program["steps"] = counts
    _settle(program, backend)
    return program


def _settings(d: Draw) -> Spec:
    settings: Spec = {}
    if d.maybe(0.35):
        settings[d.choice(["clipnorm", "global_clipnorm", "clipvalue"])] = 0.05
    if d.maybe(0.2):
        settings |= {"use_ema": True, "ema_momentum": 0.5}
        settings["ema_overwrite_frequency"] = d.choice([None, 2])
    if d.maybe(0.2):
        settings["gradient_accumulation_steps"] = d.choice([2, 3])
    if d.maybe(0.2):
        settings["weight_decay"] = 0.01
    return settings


def _options(d: Draw) -> Spec:
    options: Spec = {}
    if d.maybe(0.3):
        options["sparse_as_dense"] = True
    kind = d.choice(["sharded", "exchange", "groups", "predivide", *["plain"] * 3])
    if kind == "sharded":
        options["sharded"] = True
    elif kind == "exchange":
        options["exchange"] = d.choice([*EXCHANGES, *WEIGHTS])
    elif kind == "groups":
        options["groups"] = 2
    elif kind == "predivide":
        options["gradient_predivide_factor"] = 2.0
    return options


def _settle(program: Spec, backend: str) -> None:
    """Leave out what programs must not do, or what is refused."""
    get, drop = program.get, lambda *keys: [program.pop(key, None) for key in keys]
    options, settings = get("options", {}), get("with", {})
    own, fit = get("loop") == "own", get("loop", "fit") == "fit"
    if not fit:
        drop("short", "data", "executions", "callbacks", "epochs", "validate", "fits")
    if own:  # which computes its loss, and its divisor, itself
        drop("mask", "l2")
    if get("weights") == "class" and (own or get("losses") != ["crossentropy"] or not get("pool")):
        program["weights"] = "sample"
    if backend == "jax":
        options.pop("sharded", None)
        drop("eager")  # to compile each operation takes far longer
        if own:
            drop("scale")
    else:  # TensorFlow refuses it
        drop("jit")
    if backend == "torch":
        drop("executions")
    kinds = {layer.get("kind") for layer in get("layers", [])}
    linear = get("optimizer", "sgd") in OPTIMIZERS[:2]
    apart = not linear or any("clip" in key for key in settings)
    if backend == "tensorflow" and "embedding" in kinds and apart:
        # Keras takes each of several slices of a row by itself, so that dense gradients differ.
        drop("short")
        options.pop("sparse_as_dense", None)
        options.pop("sharded", None)
    if options.get("sharded"):
        if get("optimizer") in OPTIMIZERS[4:]:  # which are refused
            program["optimizer"] = "sgd"
        drop("scale", "passes", "short")
        for key in ("clipnorm", "gradient_accumulation_steps", *EMA):
            settings.pop(key, None)
    if "half" in options.get("exchange", "") and not linear:
        program["optimizer"] = "sgd"  # others make rounding large
    if options.get("exchange", "").startswith(("nbit", "powersgd")):  # which no rank may join
        drop("short")
    if options.get("exchange") in WEIGHTS:  # between which gradients are those of each rank
        program["optimizer"] = "sgd"
        drop("scale", "short", "passes")
        for key in set(settings) - {"weight_decay"}:
            del settings[key]
    if "passes" in program:
        settings.pop("gradient_accumulation_steps", None)
        if "average_passes" not in program:
            drop("l2")
    if "exchange" in options or "gradient_predivide_factor" in options:
        drop("op")
    callbacks, steps = get("callbacks", []), get("steps", [])
    if get("data") == "arrays":
        program["steps"] = steps = [steps[0][:1]] * (len(steps) - 1) + steps[-1:] if steps else []
        program["steps"][-1:] = [[min(c, steps[0][0]) for c in rows] for rows in steps[-1:]]
    if get("reduction") == "sum" and get("l2"):  # which a rank without rows does not add
        drop("short")
    if get("op") == "sum":
        drop("l2", "short")
        if get("reduction") != "sum":  # of gradients that are means over equal batches
            drop("mask", "weights")
            program["steps"] = [rows[:1] for rows in steps]
    if "members" in program:  # whose ranks have equal numbers of batches
        drop("short")
        if "broadcast" in callbacks:  # of what rank 0 has learned, to those that it is not with
            drop("fits")
    if get("data") == "generator":
        drop("epochs")
        if backend == "tensorflow":  # where Keras takes a step more than there are batches
            drop("data")
        drop("fits")
    unknown = "short" in program or get("data") == "generator"
    if "warmup" in callbacks and (unknown or "schedule" in program or "fits" in program):
        callbacks.remove("warmup")  # which needs to know the number of batches, and sets the rate


def allowed(program: Spec, backend: str | None = None) -> bool:
    """Return whether a program must give what one process gives."""
    settled = copy.deepcopy(program)
    try:
        _settle(settled, backend or os.environ.get("KERAS_BACKEND", "tensorflow"))
    except IndexError:  # a step or a loss without what it needs
        return False
    return settled == program
