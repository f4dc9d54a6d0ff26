"""What an optimizer's settings say about a step, and the step of a segment (local)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hvdtrain.arrays import HostArray
from hvdtrain.core.arrays.update_rules import Block, UpdateRule, cast
from hvdtrain.core.sharding.segments import Segment

# Elements that stay in the caches while all operations of a step are applied to them.
_BLOCK_ELEMENTS = 16 << 10


@dataclass(frozen=True)
class StepValues:
    """What an optimizer's settings say about a step, equal on all ranks."""

    rate: float
    steps: int
    decay: float | None
    decayed: Sequence[bool]
    clip_norm: float | None = None
    clip_value: float | None = None


@dataclass(frozen=True)
class SegmentUpdate:
    """The update of a segment in a step."""

    rule: UpdateRule
    segment: Segment
    values: StepValues

    def write(
        self,
        weights: HostArray,
        gradient: HostArray,
        state: Sequence[HostArray],
        places: Sequence[HostArray],
    ) -> None:
        """Write the new weights wherever they are needed; update the state in place.

        Args:
            gradient: reduced gradient of the segment, [count]; it is overwritten.
            state: what the rule keeps for the segment, [count] for each of its quantities.
            places: memory for the new weights, [count] each.
        """
        segment, values = self.segment, self.values
        own = weights[segment.first : segment.first + segment.count]
        decay = values.decay if values.decayed[segment.parameter] else None
        for start in range(0, segment.count, _BLOCK_ELEMENTS):
            block = slice(start, start + _BLOCK_ELEMENTS)
            updated = own[block].copy()
            if decay is not None:
                updated -= updated * cast(decay, own.dtype) * own.dtype.type(values.rate)
            kept = [quantity[block] for quantity in state]
            self.rule.update(Block(updated, gradient[block], kept, values.rate, values.steps))
            for place in places:
                place[block] = updated
