"""Functions of numpy arrays as TensorFlow operations, in eager mode and in graphs."""

from __future__ import annotations

import functools
import itertools
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeAlias, TypeVar

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import control_flow_util
from tensorflow.python.saved_model import save_context

from hvdtrain.arrays import HostArray
from hvdtrain.core.gradients.step_info import MOST_ELEMENTS, WeightSums, sum_weights
from hvdtrain.errors import HvdtrainError, MismatchError, UnsupportedError

F = TypeVar("F", bound=Callable[..., object])


def do_not_convert(function: F) -> F:
    """Keep AutoGraph from rewriting a function, and what it calls, inside a tf.function."""
    unconverted: F = tf.autograph.experimental.do_not_convert(function)
    return unconverted


def keeps_trace_order(graph: tf.Graph) -> bool:
    """Return whether TensorFlow runs all stateful operations of a graph in the order of the trace.

    It does in functions that are called in eager mode, except those that it makes for gradients.
    """
    ordered = getattr(graph, "_add_control_dependencies", False)
    return bool(ordered) and tf.compat.v1.executing_eagerly_outside_functions()


def next_in_trace_order() -> tf.Operation:
    """Add an operation to the graph that runs after all those that this function added before."""
    if save_context.in_save_context():  # which allows no resources other than the model's
        return tf.no_op()
    resource = _captured(_order_resource(), tf.compat.v1.get_default_graph())
    return tf.raw_ops.AssignAddVariableOp(resource=resource, value=0)


def _captured(tensor: tf.Tensor, graph: tf.Graph) -> tf.Tensor:
    """Return an eager tensor as every function around has it: tf.cond's gradient needs that."""
    if not graph.building_function:
        return tensor
    return graph.capture(_captured(tensor, graph.outer_graph))


@functools.cache
def _order_resource() -> tf.Tensor:
    """Return a resource; a tf.Variable would make TensorFlow trace the calling function twice."""
    with tf.init_scope(), tf.device("CPU:0"):
        handle = tf.raw_ops.VarHandleOp(dtype=tf.int32, shape=[], shared_name="hvdtrain_order")
        tf.raw_ops.AssignVariableOp(resource=handle, value=0)
    return handle


def weight_sums(variables: Sequence[Any]) -> WeightSums | None:
    """Return what ranks compare of variables; None for those of a session, and for tensors."""
    rows = []
    for variable in variables:
        handle = getattr(variable, "handle", None)
        if not isinstance(handle, tf.__internal__.EagerTensor):
            return None
        # By the operation alone: a tape would note that the variable itself was used.
        value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.as_dtype(variable.dtype))
        part = tf.reshape(value, [-1])[:MOST_ELEMENTS]
        values = tf.bitcast(part, part.dtype.real_dtype) if part.dtype.is_complex else part
        rows.append((getattr(variable, "path", variable.name), values.numpy(), part.dtype.size))
    return sum_weights(rows)


def as_array(tensor: tf.Tensor) -> HostArray:
    """Return an eager tensor as an array: a view of host memory, else a copy."""
    if tensor.dtype == tf.bfloat16 or "CPU" not in tensor.backing_device:
        copied: HostArray = np.asarray(tensor.numpy())
        return copied
    return np.asarray(memoryview(tensor))


# A gradient as TensorFlow returns it: dense, sparse, or None where nothing depends on a variable.
Gradient: TypeAlias = "tf.Tensor | tf.IndexedSlices | None"

# Anything that tf.convert_to_tensor takes: tensors, variables, arrays, lists and numbers.
TensorLike: TypeAlias = "tf.types.experimental.TensorLike"

# Of TensorFlow, Keras 3 or tf_keras.
Variable: TypeAlias = Any
Model: TypeAlias = Any


class FailedPreconditionError(MismatchError, tf.errors.FailedPreconditionError):  # type: ignore[misc]
    """Ranks submitted different requests."""

    def __init__(self, message: str) -> None:
        tf.errors.FailedPreconditionError.__init__(self, None, None, message)


class InvalidArgumentError(ValueError, tf.errors.InvalidArgumentError):  # type: ignore[misc]
    def __init__(self, message: str) -> None:
        tf.errors.InvalidArgumentError.__init__(self, None, None, message)


_mutex_numbers = itertools.count()

# A complete run is dropped when this many later runs of its operation have started.
_KEPT_RUNS = 1000


def call_in_thread(
    function: Callable[..., list[HostArray]],
    tensors: Sequence[tf.Tensor],
    dtypes: Sequence[tf.DType],
    name: str,
) -> Sequence[tf.Tensor] | tf.Operation:
    """Add operations to the graph that call a function in a thread of its own."""
    runs = _Runs(function)
    with tf.name_scope(f"{name}/"), tf.device("CPU:0"):
        mutex = tf.raw_ops.MutexV2(container="", shared_name=f"hvdtrain {next(_mutex_numbers)}")
        with tf.control_dependencies(list(tensors)):
            lock = tf.raw_ops.MutexLock(mutex=mutex)
        run = tf.py_function(runs.start, [lock, *tensors], tf.int64)
        with tf.control_dependencies([run]):
            complete = tf.raw_ops.MutexLock(mutex=mutex)
        with tf.control_dependencies([complete.op]):
            return tf.numpy_function(runs.finish, [run], list(dtypes))


class _Runs:
    """Runs of a function that were started, each in a thread of its own."""

    def __init__(self, function: Callable[..., list[HostArray]]) -> None:
        self._function = function
        self._numbers = itertools.count()
        self._pending: dict[int, Future[list[HostArray]]] = {}

    def start(self, lock: tf.Tensor, *tensors: tf.Tensor) -> HostArray:
        number, done = next(self._numbers), Future[list[HostArray]]()
        self._pending[number] = done
        # Sessions of complete ones failed before taking the results. Of a copy, because sessions of
        # one graph start and finish runs in their own threads.
        for earlier, run in self._pending.copy().items():
            if earlier < number - _KEPT_RUNS and run.done():
                self._pending.pop(earlier, None)
        locks = [lock]

        def call() -> None:
            try:
                done.set_result(self._function(*map(as_array, tensors)))
            except BaseException as error:  # the session is to raise it
                done.set_exception(error)
            finally:
                locks.clear()

        threading.Thread(target=call, name="hvdtrain-operation", daemon=True).start()
        return np.array(number)

    def finish(self, number: np.integer[Any] | int) -> list[HostArray]:
        """Return the results of a complete run, or raise its error."""
        return self._pending.pop(int(number)).result()


# Takes the inputs and the operation name, which is None where the core numbers the operation.
ArrayFunction = Callable[[Sequence[HostArray], str | None], Sequence[HostArray]]
NUMBER = tf.TensorSpec([], tf.int32)

_NOT_IN_NAMES = re.compile("[^A-Za-z0-9_]")
_NOT_IN_NODE_NAMES = re.compile(r"[^A-Za-z0-9_.\-/]")


def automatic_name(kind: str, tensors: Sequence[tf.Tensor]) -> str | None:
    """Return a name for an operation that the user has not named.

    In a graph it is made from the names of its tensors: a counter would depend on how often a rank
    has traced a function. Eager tensors have no names, and the core numbers their operations.
    """
    if tf.executing_eagerly():
        return None
    names = dict.fromkeys(_NOT_IN_NAMES.sub("_", t.name) for t in (*tensors[:1], *tensors[-1:]))
    return "_".join([f"Horovod{kind}", *names])


def call_on_arrays(
    function: ArrayFunction,
    tensors: Sequence[tf.Tensor],
    results: Sequence[tf.Tensor | tf.TensorSpec],
    name: str | None = None,
    ignore_name_scope: bool = False,
    collective: bool = True,
) -> list[tf.Tensor]:
    """Call a function on tensors as arrays: at once in eager mode, else when the graph runs.

    It returns arrays with the shapes and dtypes of `results`.
    """
    if tf.executing_eagerly():
        return _call_now(function, tensors, name)
    graph = tf.compat.v1.get_default_graph()
    if control_flow_util.GraphOrParentsInXlaContext(graph):
        raise UnsupportedError(
            "XLA cannot compile operations that call Python, as hvdtrain's do: use "
            "tf.function(jit_compile=False), in Keras model.compile(jit_compile=False), and move "
            "what XLA should compile into a tf.function without hvdtrain's operations"
        )
    node = _NOT_IN_NODE_NAMES.sub("_", name or "Horovod")
    if not node[0].isalnum():  # no other character may begin the name of a node
        node = f"Horovod{node}"
    ordered = keeps_trace_order(graph)
    if ordered:
        full = graph.unique_name(node, mark_as_used=False)
    else:
        # In a session branches of a graph may run at the same time. Names outside a function would
        # depend on how often a rank has traced it.
        while graph.building_function and not tf.compat.v1.executing_eagerly_outside_functions():
            graph = graph.outer_graph
        full = graph.unique_name(node)
    key = full.rpartition("/")[2] if ignore_name_scope else full

    def run(*arrays: HostArray) -> list[HostArray]:
        # TensorFlow passes some scalars as numbers, not as arrays.
        return list(function([np.asarray(array) for array in arrays], key))

    inputs, dtypes = list(tensors), [result.dtype for result in results]
    if not collective:
        outputs = tf.numpy_function(run, inputs, dtypes, name=node)
    elif ordered:
        with tf.control_dependencies([next_in_trace_order()]):
            outputs = tf.numpy_function(run, inputs, dtypes, name=node)
        with tf.control_dependencies(outputs if dtypes else [outputs]):
            next_in_trace_order()
    else:
        outputs = call_in_thread(run, inputs, dtypes, full)
    for output, result in zip(outputs if dtypes else [], results, strict=True):
        output.set_shape(result.shape)
    return list(outputs) if dtypes else [outputs]


def _call_now(
    function: ArrayFunction, tensors: Sequence[tf.Tensor], name: str | None
) -> list[tf.Tensor]:
    try:
        arrays = function([as_array(tensor) for tensor in tensors], name)
    except MismatchError as error:
        raise FailedPreconditionError(str(error)) from None
    except HvdtrainError:
        raise
    except ValueError as error:
        raise InvalidArgumentError(str(error)) from None
    return [tf.convert_to_tensor(array) for array in arrays]
