"""What the product puts on streams, recorded; see the test."""

from collections.abc import Callable
from contextlib import nullcontext

import stream_engine
import stream_record
import torch
from hidden_device import allow_staging
from hidden_memory import DEVICE
from logged import logged
from stream_record import Record

import hvdtrain.torch as hvd
from hvdtrain.buffer import Buffer
from hvdtrain.core import context
from hvdtrain.core.compression import Compressor
from hvdtrain.core.sharding import exchange
from hvdtrain.errors import UnsupportedError
from hvdtrain.streams import Mark, Several, Streams
from hvdtrain.torch import averaged_gradients
from hvdtrain.torch.operations.routes import streams_of

Case = Callable[[], None]


def filled(number: float = 1.0) -> torch.Tensor:
    return torch.full((4, 3), number, device=DEVICE)


def used(tensor: torch.Tensor) -> None:
    """Read and write a result on the current stream, and give it back."""
    tensor.mul_(2)


def named_operations() -> None:
    """Operations on temporary tensors, whose results are used and given back at once."""
    used(hvd.allreduce(filled(), op=hvd.Sum))
    used(hvd.allreduce(filled().t(), op=hvd.Sum))
    used(hvd.allreduce(filled().half(), op=hvd.Sum))
    used(hvd.allreduce_(filled(), op=hvd.Sum))
    for tensor in hvd.grouped_allreduce([filled(), filled().t()], op=hvd.Sum):
        used(tensor)
    used(hvd.broadcast(filled(), 0))
    used(hvd.broadcast_(filled(), 0))
    used(hvd.broadcast_(filled().t(), 0))
    used(hvd.allgather(filled()))
    used(hvd.alltoall(filled()))
    used(hvd.alltoall(filled(), torch.tensor([2]))[0])
    used(hvd.reducescatter(filled(), op=hvd.Sum))


def operations_beside_others() -> None:
    """Operations that are waited for later, and on another stream than they were submitted on."""
    other = torch.hidden.Stream()  # type: ignore[attr-defined]
    handles = [
        hvd.allreduce_async(filled(), op=hvd.Sum),
        hvd.allreduce_async_(filled(), op=hvd.Sum),
        hvd.allgather_async(filled()),
        hvd.broadcast_async(filled(), 0),
        hvd.allgather_async(filled().t()),
    ]
    filled()
    with torch.hidden.stream(other):  # type: ignore[attr-defined]
        for handle in handles:
            hvd.synchronize(handle)


def operations_done_together() -> None:
    """Small reductions that come at once."""
    with context.current().world.turn:  # which no round can begin without
        handles = [hvd.allreduce_async(filled(), name=f"small {i}", op=hvd.Sum) for i in range(3)]
    for handle in handles:
        used(hvd.synchronize(handle))


def buckets() -> None:
    """Two steps of two buckets, whose gradients come on three streams."""
    channel = context.current().world
    streams = streams_of(f"{DEVICE}:0", channel.communicator.capabilities)
    on_device = DEVICE in channel.communicator.capabilities.devices
    memories = [torch.empty(8, device=DEVICE if on_device else "cpu") for _ in range(2)]
    for memory in memories:
        streams.keep(memory)
    sources = [torch.hidden.Stream() for _ in range(2)]  # type: ignore[attr-defined]
    for step in range(2):
        marks = [_fill(streams, memory, sources, step) for memory in memories]
        finished = []
        for memory, mark in zip(memories, marks, strict=True):
            finished.append(streams.run_after(mark, _Reduce(Buffer.of(memory)))[1])
        for memory, mark in zip(memories, finished, strict=True):
            streams.wait(mark)
            gradient = torch.empty(8, device=DEVICE)
            streams.read(memory, gradient)
            used(gradient)


def several_devices() -> None:
    """A reduction of a group whose tensors have streams of different devices."""
    capabilities = context.current().world.communicator.capabilities
    both = [streams_of(f"{DEVICE}:0", capabilities) for _ in range(2)]
    streams, on_host = Several(both), DEVICE not in capabilities.devices
    for number in range(2):
        memory = torch.empty(3, device="cpu" if on_host else DEVICE)
        both[1].keep(memory)
        both[number].fill(torch.ones(3, device=DEVICE), memory)
        result, finished = streams.run_after(streams.mark(), _Reduce(Buffer.of(memory)))
        assert result is None
        streams.wait(finished)
        gradient = torch.empty(3, device=DEVICE)
        both[number].read(memory, gradient)
        used(gradient)


class _Reduce:
    def __init__(self, buffer: Buffer) -> None:
        self._buffer = buffer

    def __call__(self) -> None:
        context.current().world.communicator.allreduce(self._buffer, hvd.Sum)


def _fill(streams: Streams, memory: torch.Tensor, sources: list[object], step: int) -> Mark:
    places = set()
    for source, view in zip(sources, (memory[:3], memory[3:6]), strict=True):
        with torch.hidden.stream(source):  # type: ignore[attr-defined]
            streams.fill(torch.ones(3, device=DEVICE), view)
            places.add(streams.place())
    if step:
        streams.clear(memory[6:])
    else:
        streams.fill(torch.ones(2, device=DEVICE), memory[6:])
    places.add(streams.place())
    return streams.mark(places)


def training() -> None:
    """Steps of an optimizer by two plans, with a parameter that is used now and then."""
    layers = [torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)]
    model, seldom = torch.nn.Sequential(*layers).to(DEVICE), torch.nn.Linear(3, 2).to(DEVICE)
    parameters = [*model.parameters(), *seldom.parameters()]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(parameters, 0.1, momentum=0.9, foreach=False), compression=Rounded
    )
    for step in range(4):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        outputs = model(filled()) + (seldom(filled()) if step == 1 else 0)
        outputs.sum().backward()
        if step == 3:
            optimizer.synchronize()
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()


def shared_steps() -> None:
    """Steps of which this rank owns all slices, their norms, and the state of the optimizer."""
    if DEVICE not in context.current().world.communicator.capabilities.devices:
        return
    layers = [torch.nn.Linear(3, 40), torch.nn.ReLU(), torch.nn.Linear(40, 2)]
    model = torch.nn.Sequential(*layers).to(DEVICE)
    sgd = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, foreach=False)
    usual = vars(exchange)["owned_slices"]
    vars(exchange)["owned_slices"] = lambda channel, _: exchange.ScatteredSlices(
        channel.communicator
    )
    optimizer = hvd.DistributedOptimizer(sgd, sharded=True)
    vars(exchange)["owned_slices"] = usual
    assert optimizer.sharded
    for step in range(4):
        optimizer.zero_grad()
        model(filled()).sum().backward()
        if step == 2:
            optimizer.synchronize()
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            used(optimizer.clip_grad_norm_(0.1))
            optimizer.step()
    for entry in optimizer.state_dict()["state"].values():
        used(entry["momentum_buffer"])
    model(filled()).sum().backward()
    optimizer.step()


class Rounded(Compressor):
    """Leaves gradients as they are, in memory of their own."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, None]:
        return tensor * 1, None


CASES: list[Case] = [
    *(training, shared_steps, named_operations, operations_beside_others, operations_done_together),
    *(buckets, several_devices),
]


def races(engine: str, cases: list[Case]) -> list[str]:
    found = []
    hvd.init(engine=engine)
    for case in cases:
        record = Record()
        with record.running(), allow_staging() if engine == "host" else nullcontext():
            case()
            hvd.barrier()  # the channel's thread has given back what it had
        assert case is shared_steps or len(record.texts()) > 10, record.texts()
        found += [f"{case.__name__}: {race}" for race in record.races()]
    hvd.shutdown()
    return found


def staging_is_said_once() -> None:
    """Copy tensors through host memory twice."""

    def stage() -> None:
        hvd.init(engine="host")
        with allow_staging():
            hvd.allreduce(filled(), op=hvd.Sum)
            hvd.allgather(filled())
        hvd.shutdown()

    said = logged(stage)
    assert said == [
        f"tensors on {DEVICE}:0 are copied through host memory: engine host takes no {DEVICE} "
        "memory"
    ], said


def ask_before_it_is_done() -> None:
    """Ask about a result that the device has not come to yet."""
    hvd.init(engine="device")
    record = Record()
    with record.running():
        handle = hvd.allreduce_async(filled(), op=hvd.Sum)
        hvd.barrier()
        assert not hvd.poll(handle)
        record.idle = True
        assert hvd.poll(handle)
    hvd.shutdown()


def capture_is_refused() -> None:
    """Call operations while a graph is captured."""
    for engine in ("device", "host"):
        hvd.init(engine=engine)
        tensor, on_host = filled(), torch.ones(2)
        record = Record(capturing=True)
        with record.running():
            for call in (hvd.allreduce, hvd.allgather, hvd.alltoall, hvd.reducescatter):
                assert refusal(call, tensor) == REFUSAL, refusal(call, tensor)
            assert refusal(hvd.broadcast_, tensor, 0) == REFUSAL
            assert not refusal(hvd.allreduce, on_host)
            assert not any("copy" in text for text in record.texts())
        hvd.shutdown()


REFUSAL = (
    "[rank 0/1] an operation on tensors cannot be part of a CUDA graph, which is being captured: "
    "ranks agree on the host before each. Capture what lies between such operations, or call them "
    "outside of torch.cuda.graph()"
)


def refusal(call: Callable[..., object], *arguments: object) -> str:
    try:
        call(*arguments)
    except UnsupportedError as error:
        return str(error)
    return ""


def main() -> None:
    stream_record.install()
    stream_engine.install()
    # The host waits where it looks at weights, which orders what comes after.
    vars(averaged_gradients)["is_due"] = lambda steps: False
    ask_before_it_is_done()
    capture_is_refused()
    staging_is_said_once()
    for engine in ("device", "host"):
        for race in races(engine, CASES):
            print(engine, race)


if __name__ == "__main__":
    main()
