"""1-bit SGD with error feedback between nodes, written through the seam as a user would.

Each node's sum is sent as one bit per element and one scale per parameter, its mean magnitude:

    x = sum over the node of weighted gradients + residual
    sent = mean|x| * sign(x), residual = x - sent, result = sum over nodes of sent / size
"""

from hvdtrain.arrays import Array, elements_of, pack_signs, unpack_signs, zeros_like
from hvdtrain.buffer import Buffer
from hvdtrain.core.exchanges.parameter_state import ParameterState
from hvdtrain.core.gradients.communicators import Communicators, gather
from hvdtrain.core.gradients.exchange import Exchange, ExchangeState, FilledBucket, StepInfo
from hvdtrain.core.gradients.plan import BucketPlan
from hvdtrain.engines.communicator import Communicator
from hvdtrain.types import DType


class OneBit(Exchange):
    """Send signs, and keep what they lose for the next step."""

    spec = "onebit"
    exactness = "One bit per element; what it loses is added to the next step's gradient."
    checks_finite = True

    def __init__(self, hierarchical: bool = True) -> None:
        self.hierarchical = hierarchical
        self._residual = ParameterState("residual")

    def prepare(self, plan: BucketPlan) -> None:
        for spec in plan.specs:
            if spec.dtype not in (DType.FLOAT32, DType.FLOAT64):
                kind = spec.dtype.value
                raise ValueError(f"onebit takes float32 and float64, {spec.name!r} is {kind}")

    def reduce(self, bucket: FilledBucket, info: StepInfo, communicators: Communicators) -> None:
        bucket.buffer.scale(info.weigh())
        lost: dict[str, Array] = {}
        for piece in bucket.pieces(bucket.elements, 0):
            # All of it, wherever it is from: another plan may have given this rank other slices.
            piece.elements[...] = piece.elements + self._residual.get(piece.name, piece.elements)
            lost[piece.name] = zeros_like(piece.elements)

        def combine(own: Buffer, start: int, network: Communicator) -> None:
            x = elements_of(own)
            scales = zeros_like(x)[: len(bucket.pieces(x, start))]
            for number, piece in enumerate(bucket.pieces(x, start)):
                scales[number] = abs(piece.elements).mean()
            signs, factors = gather(network, pack_signs(x)), gather(network, scales)
            sent = [
                _decoded(signs[rank], factors[rank], bucket, x, start)
                for rank in range(network.size)
            ]
            error = x - sent[network.rank]
            for piece in bucket.pieces(error, start):
                end = piece.first + piece.elements.shape[0]
                lost[piece.name][piece.first : end] = piece.elements
            x[...] = sum(sent[1:], sent[0])

        communicators.over_network(bucket.buffer, combine)
        bucket.buffer.scale(1 / info.size)
        for name, residual in lost.items():
            self._residual.put(name, residual)

    def end(self, info: StepInfo) -> None:
        self._residual.end(keep=info.finite)

    def state(self) -> ExchangeState:
        return ExchangeState(own=self._residual.arrays())

    def load(self, state: ExchangeState) -> None:
        self._residual.load(state.own)


def _decoded(signs: Array, scales: Array, bucket: FilledBucket, model: Array, start: int) -> Array:
    values = unpack_signs(signs, model)
    for number, piece in enumerate(bucket.pieces(values, start)):
        piece.elements[...] = piece.elements * scales[number]
    return values
