"""Optimizers of hvdtrain.keras on gradients that depend on the rank, against plain ones."""

import hashlib
import importlib
import itertools
import re
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from types import FrameType
from typing import Any
from unittest import mock

import keras
import numpy as np
from one_bit import OneBit
from paths import ROOT
from process_sets import assert_lists_are_refused
from raising import raising

import hvdtrain.keras as hvd
from hvdtrain.errors import UnsupportedError, UsageError
from hvdtrain.keras.backends.distributed import require_backend
from hvdtrain.types import DType

Array = np.ndarray[Any, Any]
Make = Callable[[], Any]

SHAPES = [(4, 3), (3,), (1, 1)]
STEPS = 4


def digest(variables: Any) -> str:
    data = b"".join(np.asarray(keras.ops.convert_to_numpy(v)).tobytes() for v in variables)
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def assert_close(variables: Any, want: Any, rtol: float = 1e-5) -> None:
    for mine, theirs in zip(variables, want, strict=True):
        mine, theirs = keras.ops.convert_to_numpy(mine), keras.ops.convert_to_numpy(theirs)
        np.testing.assert_allclose(mine, theirs, rtol=rtol, atol=1e-6)


def gradients(step: int, rank: int, shapes: Any = SHAPES) -> list[Array]:
    random = np.random.default_rng((step, rank))
    return [random.normal(size=shape).astype(np.float32) for shape in shapes]


def mean_gradients(step: int, shapes: Any = SHAPES) -> list[Array]:
    every = [gradients(step, rank, shapes) for rank in range(hvd.size())]
    return [np.mean(parts, axis=0) for parts in zip(*every, strict=True)]


def stepped(optimizer: Any, of: Callable[[int], list[Array]], steps: int = STEPS) -> list[Any]:
    random = np.random.default_rng(0)
    variables = [keras.Variable(random.normal(size=shape).astype(np.float32)) for shape in SHAPES]
    apply = optimizer.apply
    if keras.backend.backend() == "jax":
        optimizer.build(variables)
        apply = stateless(optimizer)
    for step in range(steps):
        apply([keras.ops.convert_to_tensor(g) for g in of(step)], variables)
    return variables


def stateless(optimizer: Any) -> Callable[..., None]:
    import jax

    compiled = jax.jit(optimizer.stateless_apply)

    def apply(gradients: list[Any], variables: list[Any]) -> None:
        state = [*variables, *optimizer.variables]
        new, state_of_new = compiled(
            [v.value for v in optimizer.variables], gradients, [v.value for v in variables]
        )
        for variable, value in zip(state, [*new, *state_of_new], strict=True):
            variable.assign(value)

    return apply


def own(step: int) -> list[Array]:
    return gradients(step, hvd.rank())


def agree(make: Make, **options: Any) -> list[Any]:
    got = stepped(hvd.DistributedOptimizer(make(), **options), own)
    assert_close(got, stepped(make(), mean_gradients))
    return got


def every_optimizer_of_keras() -> str:
    kinds = {
        kind
        for kind in vars(keras.optimizers).values()
        if isinstance(kind, type) and issubclass(kind, keras.optimizers.Optimizer)
    }
    given: dict[Any, Make] = {
        keras.optimizers.LossScaleOptimizer: lambda: keras.optimizers.LossScaleOptimizer(
            keras.optimizers.Adam(0.01), initial_scale=4.0
        ),
        keras.optimizers.Muon: lambda: keras.optimizers.Muon(0.1, ns_steps=2),
    }
    kinds -= {keras.optimizers.Optimizer, getattr(keras.optimizers, "MultiOptimizer", None)}
    assert len(kinds) > 12
    if keras.backend.backend() != "torch":  # where they all take a moment
        kinds = {keras.optimizers.Lamb, *given}
    ends = []
    for kind in sorted(kinds, key=lambda kind: kind.__name__):
        ends += agree(given.get(kind) or partial(kind, learning_rate=0.1))
    return digest(ends)


def gradients_that_some_ranks_lack() -> None:
    rank, size = hvd.rank(), hvd.size()
    gradient = keras.ops.convert_to_tensor([1.0])
    # Of the first two, which have one shape, each rank has one; nobody has the third.
    own = [gradient, None, None] if rank == 0 else [None, gradient, None]
    for exchange in (None, "postlocal:after=9,steps=1"):
        variables = [keras.Variable([0.0]) for _ in "abc"]
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), exchange=exchange)
        optimizer.build(variables)
        optimizer.sample_weight = rank + 1.0
        for _ in range(2):
            optimizer.apply(own, variables)
        first, second, third = (keras.ops.convert_to_numpy(v)[0] for v in variables)
        share = 1 / (size * (size + 1) / 2)
        np.testing.assert_allclose([first, second, third], [-2 * share, -2 * (1 - share), 0], 1e-6)
        optimizer.sample_weight = None
        if size > 1 and keras.backend.backend() == "tensorflow":
            with raising(Exception, text="but none in the function that rank"):
                step = partial(optimizer.apply, own, variables)
                importlib.import_module("tensorflow").function(step)()


def sparse_gradients_of_some_ranks() -> None:
    """Gradients of a table, sparse here and dense there, in steps of TensorFlow."""
    tf = importlib.import_module("tensorflow")
    rank, size = hvd.rank(), hvd.size()

    class Model(keras.Model):
        def __init__(self, kind: str) -> None:
            super().__init__()
            self.kind = kind
            self.table = self.add_weight(shape=(4, 2), initializer="zeros")

        def call(self, rows: Any) -> Any:
            dense = keras.ops.sum(self.table) if self.kind == "dense" else 0.0
            return keras.ops.sum(keras.ops.take(self.table, rows, axis=0), -1) + dense

    rows = [[[0, 3], [1, 3], [1, 1]][: 1 + 2 * (r > 0)] for r in range(size)]  # 1 or 3 samples
    kinds = ["dense", *["sparse"] * (size - 1)]
    for as_dense, run_eagerly in ((False, False), (False, True), (True, False)):
        want = np.zeros([4, 2])
        for r in range(size):
            np.subtract.at(want, np.array(rows[r]).ravel(), 0.5)  # the mean of two rows' outputs
            want -= len(rows[r]) * (kinds[r] == "dense")
        want /= sum(map(len, rows))
        model = Model(kinds[rank])
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), sparse_as_dense=as_dense)
        model.compile(optimizer, lambda y, p: p, run_eagerly=run_eagerly)
        data = tf.data.Dataset.from_tensors((np.array(rows[rank]), np.zeros(len(rows[rank]))))
        model.fit(data, verbose=0)
        np.testing.assert_allclose(model.table.numpy(), want, rtol=1e-6)


def a_gradient_takes_the_walk_of_the_page() -> None:
    if hvd.size() == 1:
        return
    variable, walked = keras.Variable([0.0]), set[str]()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD())
    gradient = keras.ops.convert_to_tensor([1.0])
    optimizer.apply([gradient], [variable])  # makes the plan

    def note(given: object, *_: object, **how: object) -> object:
        frame: FrameType | None = sys._getframe().f_back
        # In the engine, that of the bucket: what ranks agree on is of other types.
        of_bucket = getattr(given, "dtype", DType.FLOAT32) is DType.FLOAT32
        while of_bucket and frame is not None and frame.f_globals["__name__"] != __name__:
            walked.add(frame.f_globals["__name__"].replace(".", "/"))
            frame = frame.f_back
        return mock.DEFAULT

    channel = hvd.global_process_set.channel()
    with ExitStack() as spies:
        for owner, name in ((channel.queue, "add"), (channel.communicator, "allreduce")):
            own = getattr(owner, name)
            spies.enter_context(mock.patch.object(owner, name, wraps=own, side_effect=note))
        optimizer.apply([gradient], [variable])
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    section = page.partition("\n## A gradient\n")[2].partition("\nA `GradientStep`")[0]
    described = set(re.findall(r"`(hvdtrain/[\w/]+)\.py`", section))
    taken = {file for file in walked if file.startswith("hvdtrain/")}
    files = {file for file in taken if "/engines/" not in file} - {"hvdtrain/core/tuning"}
    assert files <= described, files - described
    assert len(files) + len({file for file in described if "/engines/" in file}) <= 12


def options_mean_the_same_on_one_rank() -> None:
    """On one rank, which is a process set here, an option gives what its formula gives."""
    tf = importlib.import_module("tensorflow")
    rank, alone = hvd.rank(), [hvd.add_process_set([r]) for r in range(hvd.size())]
    # Four equal rows: as slices their norm is 2, together it is 4.
    gradient = tf.IndexedSlices(tf.constant([[1.0, 0.0]] * 4), [1] * 4, [3, 2])
    given = [("sparse_as_dense", "clipnorm"), ("sharded", "global_clipnorm")]
    for (option, clip), mine in itertools.product(given, (alone[rank], hvd.global_process_set)):
        table = keras.Variable(np.zeros([3, 2], np.float32))
        sgd = keras.optimizers.SGD(1.0, **{clip: 1.0})
        options: dict[str, Any] = {option: True}
        hvd.DistributedOptimizer(sgd, process_set=mine, **options).apply([gradient], [table])
        np.testing.assert_allclose(table.numpy(), [[0, 0], [-1, 0], [0, 0]], atol=1e-6)
    for process_set in alone:
        assert hvd.remove_process_set(process_set)


def local_layers_stay_local() -> None:
    rank, size = hvd.rank(), hvd.size()
    for scaled in (True, False):
        layers = [keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros") for _ in "ab"]
        for layer in layers:
            layer.build([None, 1])
        optimizer = hvd.PartialDistributedOptimizer(
            keras.optimizers.SGD(1.0), local_layers=layers[0], scale_local_gradients=scaled
        )
        gradient = keras.ops.convert_to_tensor([[-float(rank + 1)]])
        optimizer.apply([gradient, gradient], [layer.kernel for layer in layers])
        local, shared = (keras.ops.convert_to_numpy(layer.kernel)[0, 0] for layer in layers)
        assert local == np.float32((rank + 1) / (size if scaled else 1))
        assert shared == (size + 1) / 2
    with raising(ValueError, text="layers"):
        hvd.PartialDistributedOptimizer(keras.optimizers.SGD(), local_layers=[1])


def state_and_class_are_kept() -> None:
    plain = keras.optimizers.Adam(0.5, beta_1=0.5)
    stepped(plain, own)
    optimizer = hvd.DistributedOptimizer(plain)
    assert isinstance(optimizer, keras.optimizers.Adam)
    assert int(optimizer.iterations) == STEPS
    assert optimizer.get_config() == plain.get_config()
    optimizer.learning_rate = 0.25
    assert float(optimizer.learning_rate) == 0.25


def bad_arguments() -> None:
    assert_lists_are_refused(hvd, {"optimizer": keras.optimizers.SGD()}, 2)
    once = hvd.DistributedOptimizer(keras.optimizers.SGD())
    with raising(ValueError, text="already"):
        hvd.DistributedOptimizer(once)
    with raising(ValueError, text="already"):
        hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(once))
    with raising(ValueError, text="Keras 3, got str"):
        hvd.DistributedOptimizer("sgd")
    bad: list[dict[str, Any]] = [
        {"op": hvd.Adasum},
        {"op": hvd.Sum, "gradient_predivide_factor": 2.0},
        {"groups": 0},
        {"backward_passes_per_step": 0},
        {"exchange": OneBit(), "op": hvd.Sum},
        {"exchange": OneBit(), "compression": hvd.Compression.fp16},
        {"compression": type("Own", (hvd.Compression.none,), {})},
    ]
    for option in bad:
        with raising(ValueError):
            hvd.DistributedOptimizer(keras.optimizers.SGD(), **option)
    with raising(TypeError, text="must be an Exchange or text, got int"):
        wrong: Any = 1
        hvd.DistributedOptimizer(keras.optimizers.SGD(), exchange=wrong)
    with raising(UsageError, text="tensorflow, torch, jax, found 'numpy': set KERAS_BACKEND"):
        require_backend("numpy")
    accumulating = keras.optimizers.SGD(gradient_accumulation_steps=2)
    with raising(ValueError, text="gradient_accumulation_steps"):
        hvd.DistributedOptimizer(accumulating, backward_passes_per_step=2)
    distributed = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    another = type(distributed).from_config(distributed.get_config())
    with raising(AttributeError, text="made by the class of a DistributedOptimizer"):
        another.build([keras.Variable([1.0])])


def values() -> None:
    rank, size = hvd.rank(), hvd.size()
    total = size * (size + 1) / 2
    assert float(hvd.allreduce(rank + 1.0)) == total / size
    assert float(hvd.allreduce(rank + 1.0, op=hvd.Sum, prescale_factor=2.0)) == 2 * total
    for _ in range(3):  # the first one plans the others
        assert int(hvd.allreduce(rank, op=hvd.Max, name="largest")) == size - 1
    tensor = keras.ops.convert_to_tensor([[1.0, rank]])
    mean = hvd.allreduce(tensor, compression=hvd.Compression.bf16)
    assert mean.dtype == np.float32
    np.testing.assert_allclose(mean, [[1.0, (size - 1) / 2]])
    np.testing.assert_array_equal(hvd.allgather(rank), np.arange(size))
    rows = hvd.allgather(keras.ops.ones([rank + 1, 2]) * rank)
    np.testing.assert_array_equal(rows[:, 0], np.repeat(np.arange(size), np.arange(size) + 1))
    np.testing.assert_array_equal(hvd.broadcast([rank, 5], root_rank=1), [1, 5])
    part = hvd.reducescatter(np.arange(size) * (rank + 1.0), op=hvd.Sum)
    np.testing.assert_array_equal(part, [rank * total])
    with raising(RuntimeError, text="BroadcastGlobalVariablesCallback"):
        hvd.broadcast_global_variables(0)
    kinds = [np.dtype("float32"), np.dtype("bool")]
    if keras.backend.backend() != "torch":  # where Keras has no such variables
        kinds.append(np.dtype(importlib.import_module("ml_dtypes").float8_e4m3fn))
    for kind in kinds:
        variable = keras.Variable(np.full(1, rank, kind), dtype=kind.name, trainable=False)
        hvd.broadcast_variables([variable], root_rank=1)
        assert keras.ops.convert_to_numpy(variable)[0] == 1
    wrong = keras.Variable(np.zeros([2 + min(rank, 1)]), name="wrong")
    with raising(hvd.HorovodInternalError, text=f"[rank 1/{size}] broadcast_variables: wrong"):
        hvd.broadcast_variables([wrong], root_rank=0)


def traced_reductions() -> str:
    """On JAX: with gradients, of arrays that are too large for it to copy at once, and in loops."""
    import jax

    rank, size = hvd.rank(), hvd.size()
    x = np.full([2, 200_000], rank + 1.0, np.float32)
    mean, traces, count = (size + 1) / 2, [], x.size

    def squares(x: Any) -> Any:
        traces.append(1)
        return keras.ops.sum(hvd.allreduce(x, name="squares") ** 2) / count

    def twice(x: Any) -> Any:
        traces.append(1)
        first, second = hvd.allreduce(x * 3), hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5)
        return first + second

    @jax.jit
    def repeated(x: Any, go: Any) -> Any:
        def body(_: Any, x: Any) -> Any:
            return hvd.allreduce(x, op=hvd.Sum) + rank

        x = jax.lax.fori_loop(0, 2, body, x)
        return jax.lax.cond(go, lambda x: hvd.allreduce(x, op=hvd.Max), lambda x: x, x)

    # The sum of all ranks' squares of the mean has 2 mean for its gradient by each rank's value.
    gradient, sums = jax.jit(jax.grad(squares)), jax.jit(twice)
    for _ in range(2):
        np.testing.assert_allclose(gradient(x), np.full(x.shape, 2 * mean / x.size), rtol=1e-5)
        np.testing.assert_allclose(sums(x), (3 + size / 2) * mean * np.ones_like(x), rtol=1e-5)
    assert len(traces) == 2
    once = size * (size + 1) / 2  # of the ranks' inputs, then of that and the ranks' numbers
    again = size * once + size * (size - 1) / 2
    np.testing.assert_allclose(repeated(x, False)[0, :3], again + rank, rtol=1e-6)
    np.testing.assert_allclose(repeated(x, True)[0, :3], again + size - 1, rtol=1e-6)
    several = keras.distribution.DataParallel(devices=["cpu:0", "cpu:0"])
    with several.scope(), raising(UnsupportedError, text="divides a step among 2 devices"):
        jax.jit(hvd.allreduce)(x)
    with raising(ValueError, text="has no gradient"):
        jax.grad(lambda x: hvd.allreduce(x, op=hvd.Max).sum())(x)
    return digest([sums(x)])
