"""What modules and optimizers may hold, sent from one rank to all."""

import threading
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch_training import refused

import hvdtrain.torch as hvd
from hvdtrain.errors import MismatchError, UnsupportedError
from hvdtrain.torch.functions import broadcast_module

# PyTorch says once that sparse layouts are in beta, and that quantized tensors will go.
warnings.filterwarnings("ignore", module=__name__)
# Its own functions use it to read quantized tensors.
warnings.filterwarnings("ignore", "TypedStorage is deprecated")
warnings.filterwarnings("ignore", "The PyTorch API of nested tensors")


def tensors_of(rank: int) -> dict[str, torch.Tensor]:
    dense = torch.diag(torch.arange(1.0, 4.0)).roll(rank, 0) * (rank + 1)
    blocks = torch.block_diag(torch.ones(2, 2), torch.ones(2, 2)) * (rank + 1)
    kinds = {
        "coo": dense.to_sparse(),
        "hybrid": torch.sparse_coo_tensor(
            torch.tensor([[rank % 2, 2]]), torch.ones(2, 2) * rank, (3, 2)
        ),
        "csr": dense.to_sparse_csr(),
        "csc": dense.to_sparse_csc(),
        "bsr": blocks.to_sparse_bsr((2, 2)),
        "quantized": torch.quantize_per_tensor(dense, 0.5, 2, torch.qint8),
        "by channel": torch.quantize_per_channel(
            dense, torch.tensor([0.5, 1.0, 2.0]), torch.tensor([0, 1, 2]), 0, torch.quint8
        ),
        "expanded": torch.full((1,), float(rank)).expand(3),
        "transposed": dense.t(),
        "channels last": torch.full((2, 3, 2, 2), float(rank)).to(
            memory_format=torch.channels_last
        ),
        "scalar": torch.tensor(float(rank)),
        "empty": torch.empty(0, 3),
    }
    types = [
        *("float8_e4m3fn", "float8_e5m2", "bfloat16", "uint16", "uint64"),
        *("complex64", "complex32", "bool"),
    ]
    return kinds | {f"as {name}": dense.to(getattr(torch, name)) for name in types}


def equal(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return type(one) is type(other) and bool(one == other)
    same = (one.layout, one.dtype, one.shape) == (other.layout, other.dtype, other.shape)
    if one.is_quantized:
        return same and torch.equal(one, other)
    wide = torch.complex128 if one.dtype.is_complex else torch.float64
    dense = [t if t.layout is torch.strided else t.to_dense() for t in (one, other)]
    return same and torch.equal(*(t.to(wide) for t in dense))


def module_of(rank: int) -> torch.nn.Module:
    module = torch.nn.Linear(2, 2)
    for name, tensor in tensors_of(rank).items():
        module.register_buffer(name.replace(" ", "_"), tensor)
    module.register_buffer("tied", module.get_buffer("transposed"))
    module.register_buffer("absent", None)
    return module


def refused_everywhere(kind: type[Exception], call: Callable[[], object]) -> str:
    """Return the message of the error that all ranks must raise, and go on together."""
    message = refused(kind, call)
    assert "\n" not in message
    assert set(hvd.allgather_object(message)) == {message}
    return message


def buffers_of_every_kind() -> None:
    root = hvd.size() - 1
    module, expected = module_of(hvd.rank()), module_of(root)
    named = list(module.state_dict().items())  # in any order
    hvd.broadcast_parameters(dict(named[:: -1 if hvd.rank() % 2 else 1]), root_rank=root)
    for name, buffer in expected.named_buffers():
        assert equal(module.get_buffer(name), buffer), name


def objects_of_every_kind() -> None:
    for name, tensor in tensors_of(hvd.rank()).items():
        every = hvd.allgather_object(tensor)
        assert all(equal(got, tensors_of(rank)[name]) for rank, got in enumerate(every)), name
        assert equal(hvd.broadcast_object({"inner": [tensor]})["inner"][0], tensors_of(0)[name])


def objects_that_one_rank_cannot_send() -> None:
    last = hvd.rank() == hvd.size() - 1
    torn = (value for value in "ab") if last else 1
    for call in (hvd.allgather_object, partial(hvd.broadcast_object, root_rank=hvd.size() - 1)):
        message = refused_everywhere(TypeError, partial(call, torn))
        assert f"rank {hvd.size() - 1}/" in message
        assert "generator" in message


def what_cannot_be_overwritten_is_refused() -> None:
    """What other ranks have, and what the last one has."""
    last, size = hvd.rank() == hvd.size() - 1, hvd.size()
    weight, bias = {"weight": torch.ones(1)}, {"bias": torch.ones(1)}
    ragged = {
        "ragged": torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)
    }
    halves, threes = (
        {"scaled": torch.quantize_per_tensor(torch.ones(2), scale, 0, torch.qint8)}
        for scale in (0.5, 1.5)
    )
    two, three = ({"graph": torch.ones(count).to_sparse()} for count in (2, 3))
    held = [
        (np.arange(3), np.arange(3) + 1), ({1, 2}, {1, 3}), ("x" * 70, "x" * 69 + "y"), ({}, []),
        ({}, {"inner": {}}),
    ]  # fmt: skip
    unlike: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        (two, three, "load_state_dict(hvd.broadcast_object(model.state_dict()))"),
        (halves, threes, "scale 1.5"),
        (extra([1, 2]), extra([1, 3]), "norm._extra_state['held'][1]\" is 3, but 2 on rank 0"),
        *((extra(one), extra(other), "norm._extra_state['held']") for one, other in held),
        (weight | bias, weight, "has no 'bias'"),
        (weight, weight | bias, "has 'bias'"),
    ]
    unset = f"[rank {size - 1}/{size}] broadcast_parameters: 'weight' has no values yet"
    lacking: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        (weight, {"weight": torch.nn.UninitializedParameter()}, unset),
        (weight, {"weight": torch.ones(1, device="meta")}, "'weight' is on the meta device"),
        (ragged, ragged, "'ragged' is a NestedTensor"),
    ]
    for kind, table in ((UnsupportedError, lacking), (MismatchError, unlike if size > 1 else [])):
        for one, other, text in table:
            broadcast = partial(hvd.broadcast_parameters, other if last else one)
            assert text in refused_everywhere(kind, broadcast)


def extra(value: object) -> dict[str, Any]:
    return {"norm._extra_state": {"held": value}}


def extra_states_that_are_equal_and_paths_that_look_alike() -> None:
    rank, root = float(hvd.rank()), hvd.size() - 1
    held: dict[Any, Any] = {1: torch.full((1,), rank), "1": torch.full((2,), rank)}
    held |= {"a": {"b/c": torch.full((3,), rank)}, "a/b": {"c": torch.full((4,), rank)}}
    name = "held"
    again = "".join(("he", "ld"))  # as equal on one rank, and the same object on others
    states = {
        "sets": {0, 8} if rank else {8, 0},
        "array": np.arange(6).reshape(2, 3),
        "own": [Settings(torch.ones(3)), Settings({"one", ("two",)})],  # pickles differ
        "names": [(name * 20, again * 20 if rank else name * 20)],
        "none": threading.Lock(),  # which nothing can send: its type must be equal
        "held": held,
        "held 0": torch.full((5,), rank),
    }
    hvd.broadcast_parameters(states, root_rank=root)
    tensors = [held[1], held["1"], held["a"]["b/c"], held["a/b"]["c"], states["held 0"]]
    for count, tensor in enumerate(tensors, 1):
        assert tensor.tolist() == [root] * count


class Settings:
    """A value that pickle can send, and of which each object equals itself only."""

    def __init__(self, value: object) -> None:
        self.value = value


class Torn(Exception):
    """An error that cannot be read where it was not raised."""

    def __init__(self, one: object, other: object) -> None:
        super().__init__(f"torn {one}\nby {other}")


class Unreadable:
    """A value that only the first rank can read."""

    def __setstate__(self, state: object) -> None:
        if hvd.rank() > 0:
            raise Torn("state", state)

    def __getstate__(self) -> object:
        return 1


class Failing(torch.nn.Linear):
    """A layer whose own state fails on the last rank."""

    last: bool = False

    def get_extra_state(self) -> Any:
        if self.last:
            raise Torn("layer", "user")
        return 1

    def set_extra_state(self, state: Any) -> None:
        pass


class Schedule:
    """What an elastic state sends beside models and optimizers."""

    def __init__(self, last: bool) -> None:
        self.saving, self.loading, self.steps = True, True, hvd.rank()
        self.rates, self.last = torch.full((2,), float(hvd.rank())), last

    def state_dict(self) -> dict[str, Any]:
        if self.last and not self.saving:
            raise Torn("schedule", "saving")
        return {"steps": self.steps, "rates": self.rates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.last and not self.loading:
            raise Torn("schedule", "loading")
        self.steps, self.rates = state["steps"], state["rates"]


def what_fails_on_one_rank_fails_on_all() -> None:
    size = hvd.size()
    last = hvd.rank() == size - 1
    title = f"[rank {size - 1}/{size}]"

    def told(call: Callable[[], object], kind: type[Exception] = UnsupportedError) -> str:
        message = refused_everywhere(kind, call)
        assert message.startswith(title), message
        return message

    weight = torch.nn.Parameter(torch.zeros(2))

    def torn() -> Iterator[tuple[str, torch.Tensor]]:
        yield "weight", weight
        if last:
            raise Torn("names", "user")

    assert "Torn: torn names by user" in told(lambda: hvd.broadcast_parameters(torn()))
    pairs = [("weight", weight)] * (1 + last)
    message = told(partial(hvd.broadcast_parameters, pairs), ValueError)
    assert "two entries are called 'weight'" in message
    given = weight if last else [weight]
    assert "got Parameter" in told(partial(hvd.broadcast_parameters, given), ValueError)
    nested = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])
    message = told(partial(hvd.broadcast_parameters, {"it": nested if last else weight}))
    assert "'it' is a Tensor" in message

    failing = Failing(2, 2)
    failing.last = last
    for root in (0, size - 1):
        message = told(partial(broadcast_module, failing, root))
        assert "state of a module: Torn: torn layer by user" in message
    schedule = Schedule(last)
    state = hvd.elastic.TorchState(torch.nn.Linear(1, 1), schedule=schedule)
    state.sync()
    assert (schedule.steps, schedule.rates.tolist()) == (0, [0, 0])
    schedule.saving = False
    assert "state of Schedule: Torn: torn schedule by saving" in told(state.sync)
    schedule.saving, schedule.loading = True, False
    if size > 1:  # the root rank loads nothing
        assert "state of Schedule: Torn: torn schedule by loading" in told(state.sync)

    optimizer = torch.optim.SGD([weight], lr=0.1)
    held = vars(optimizer)["state"]
    broadcast = partial(hvd.broadcast_optimizer_state, optimizer)
    held["nested"] = nested if last else 1
    hvd.broadcast_optimizer_state(optimizer, root_rank=size - 1)
    assert [part.numel() for part in held["nested"].unbind()] == [1, 2]
    held["nested"] = torch.nn.UninitializedParameter() if last else 1
    message = told(partial(hvd.broadcast_optimizer_state, optimizer, root_rank=size - 1))
    assert "has no values yet" in message
    held.clear()
    if size == 1:
        return
    held["unreadable"] = Unreadable()
    message = refused_everywhere(UnsupportedError, broadcast)
    assert message == f"[rank 1/{size}] broadcast_optimizer_state: Torn: torn state by 1"
    held.clear()
    parameters = [weight, torch.nn.Parameter(torch.zeros(1))] if last else [weight]
    broadcast = partial(hvd.broadcast_optimizer_state, torch.optim.SGD(parameters, lr=0.1))
    assert "groups have [2] parameters, but rank 0's have [1]" in told(broadcast, MismatchError)
    message = refused_everywhere(
        MismatchError, partial(hvd.broadcast_optimizer_state, optimizer, root_rank=size)
    )
    assert f"0 ranks send, with root_rank={size} here" in message


def state_of_an_optimizer_of_every_kind() -> None:
    weight = torch.nn.Parameter(torch.zeros(3, 2))
    optimizer = torch.optim.SGD([weight], lr=torch.tensor(0.1 * (hvd.rank() + 1)), momentum=0.9)

    def state(rank: int) -> dict[Any, Any]:
        inner: dict[str, Any] = {**tensors_of(rank), "text": "x", "none": None, "yes": True}
        return {
            "calls": 3 + rank,
            ("pair", 1): {"deep": [torch.full((2,), float(rank)), {"count": rank}]},
            weight: {**inner, "momentum_buffer": torch.full((3, 2), float(rank))},
        }

    root = hvd.size() - 1
    for filled in (hvd.rank() == root, True):  # state that only the root rank has, and all have
        optimizer.state.clear()
        optimizer.state.update(state(hvd.rank()) if filled else {})
        hvd.broadcast_optimizer_state(optimizer, root_rank=root)
        assert optimizer.state.keys() == {"calls", ("pair", 1), weight}
        found: dict[Any, Any] = optimizer.state
        assert found["calls"] == 3 + root
        first, second = found["pair", 1]["deep"]
        assert (first.tolist(), second) == ([root, root], {"count": root})
        for name, value in state(root)[weight].items():
            assert equal(optimizer.state[weight][name], value), name
        assert torch.equal(optimizer.param_groups[0]["lr"], torch.tensor(0.1 * (root + 1)))
    optimizer.state.clear()
    if hvd.rank() == 0:
        optimizer.state[torch.zeros(1)] = {"lost": 1}
    message = refused_everywhere(
        UnsupportedError, partial(hvd.broadcast_optimizer_state, optimizer)
    )
    assert "none of its parameters" in message


class Counting(torch.nn.Linear):
    """A layer with state of its own that is no tensor."""

    calls = 0
    _version = 2

    def _load_from_state_dict(
        self, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *rest: Any
    ) -> None:
        assert metadata.get("version") == 2  # from an older one, a layer would convert weights
        super()._load_from_state_dict(state, prefix, metadata, *rest)

    def get_extra_state(self) -> Any:
        return {"calls": self.calls, "names": ["a", None]}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


def elastic_state_of_every_kind() -> None:
    rank = hvd.rank()
    counting, module = Counting(2, 2), module_of(rank)
    del module.expanded  # torch cannot load it
    counting.calls = 5 + rank
    module.register_buffer("graph", torch.ones(3).to_sparse())
    module.get_buffer("graph").copy_(
        torch.tensor([1.0] * (1 + rank % 3) + [0.0] * (2 - rank % 3)).to_sparse()
    )
    model = torch.nn.Sequential(counting, module)
    optimizer = torch.optim.Adam(counting.parameters())
    vars(optimizer)["state"]["calls"] = rank
    state = hvd.elastic.TorchState(model, optimizer, epoch=rank)
    state.sync()
    expected = module_of(0)
    del expected.expanded
    expected.register_buffer("graph", torch.tensor([1.0, 0, 0]).to_sparse())
    for _ in range(2):
        for name, buffer in expected.named_buffers():
            assert equal(module.get_buffer(name), buffer), name
        calls = vars(optimizer)["state"]["calls"]
        assert (counting.calls, calls, vars(state)["epoch"]) == (5, 0, 0)
        counting.calls = vars(optimizer)["state"]["calls"] = vars(state)["epoch"] = 9
        module.get_buffer("scalar").fill_(7)
        state.restore()


def parameters_without_a_shape() -> None:
    last, size = hvd.rank() == hvd.size() - 1, hvd.size()
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LazyLinear(3))
    if not last:
        model(torch.ones(1, 2))
    options: dict[str, Any]
    for options in ({}, {"sharded": True}, {"exchange": "local:steps=2"}, {"op": hvd.Adasum}):
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        wrap = partial(hvd.DistributedOptimizer, sgd, model.named_parameters(), **options)
        message = refused_everywhere(UnsupportedError, wrap)
        assert f"[rank {size - 1}/{size}] DistributedOptimizer: '1.weight' has no values" in message
        assert "run one batch through the model first" in message
    bare = torch.nn.Linear(2, 2, device="meta" if last else "cpu")
    wrap = partial(hvd.DistributedOptimizer, torch.optim.SGD(bare.parameters(), lr=0.1))
    assert "is on the meta device" in refused_everywhere(UnsupportedError, wrap)
    sparse = torch.nn.Parameter(torch.eye(2).to_sparse() if last else torch.eye(2))
    wrap = partial(hvd.DistributedOptimizer, torch.optim.SGD([sparse], lr=0.1))
    assert "is sparse_coo" in refused_everywhere(UnsupportedError, wrap)
    small = torch.nn.Parameter(torch.ones(2).to(torch.float8_e4m3fn if last else torch.float32))
    wrap = partial(hvd.DistributedOptimizer, torch.optim.SGD([small], lr=0.1))
    assert "float8_e4m3fn" in refused_everywhere(UnsupportedError, wrap)
