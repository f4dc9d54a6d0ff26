"""Which gradients each rank has in a step, dense or sparse, and what ranks make of it together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hvdtrain.arrays import HostArray
from hvdtrain.collective import collective
from hvdtrain.errors import MismatchError

DENSE, SPARSE, NONE = "d", "s", "-"


@dataclass(frozen=True)
class Layout:
    kinds: str
    fixed: bool = False

    @property
    def variant(self) -> str:
        """What ranks compare; "" if all gradients are dense."""
        return f", gradients {self.kinds}" if self.kinds.strip(DENSE) else ""

    @property
    def dense(self) -> list[int]:
        """The variables with a dense gradient."""
        return [index for index, kind in enumerate(self.kinds) if kind == DENSE]


class LayoutsDifferError(Exception):
    """Ranks have gradients of different layouts; raised on all of them."""

    def __init__(self, ranks: Sequence[int], layouts: Sequence[Layout]) -> None:
        super().__init__("gradients have different layouts on the ranks")
        self._ranks, self._layouts = ranks, layouts

    def agreed(self, names: Sequence[str], operation: str) -> Layout:
        """Return the layout that all ranks use instead, with zeros where a rank has nothing.

        A gradient is dense if it is on any rank, and None if it is on all. Once a function is
        traced, its sparse gradients can become dense, but None cannot become a gradient.
        """
        fixed = any(layout.fixed for layout in self._layouts)
        if len({len(layout.kinds) for layout in self._layouts}) > 1:
            counts = [
                f"{len(layout.kinds)} on rank {rank}"
                for rank, layout in zip(self._ranks, self._layouts, strict=True)
            ]
            raise MismatchError(
                f"{operation}: ranks reduce gradients of different numbers of variables: "
                f"{', '.join(counts)}. Build the same model on every rank"
            )
        kinds, columns = "", zip(*(x.kinds for x in self._layouts), strict=True)
        for name, column in zip(names, columns, strict=True):
            present = set(column) - {NONE}
            self._check_traced(name, column, operation)
            mixed = DENSE in present or (fixed and present)
            kinds += DENSE if mixed else SPARSE if present else NONE
        return Layout(kinds, fixed)

    def _check_traced(self, name: str, column: Sequence[str], operation: str) -> None:
        triples = list(zip(self._ranks, column, self._layouts, strict=True))
        having = [rank for rank, kind, _ in triples if kind != NONE]
        lacking = [rank for rank, kind, layout in triples if kind == NONE and layout.fixed]
        if having and lacking:
            raise MismatchError(
                f"{operation}: {name} has a gradient on rank {having[0]}, but none in the function "
                f"that rank {lacking[0]} traced: make the loss depend on the variable on every "
                "rank (add 0 times it), or run eagerly"
            )


@collective
def reduce_present(
    gradients: Sequence[HostArray | None],
    names: Sequence[str],
    operation: str,
    zeros: Callable[[int], HostArray],
    reduce: Callable[[Sequence[HostArray], Layout], Sequence[HostArray]],
    fixed: bool = False,
) -> list[HostArray | None]:
    """Reduce gradients where some ranks have only some of them."""
    layout = Layout("".join(NONE if g is None else DENSE for g in gradients), fixed)
    given = dict(enumerate(gradients))
    try:
        reduced = reduce([g for g in gradients if g is not None], layout)
    except LayoutsDifferError as differ:
        layout = differ.agreed(names, operation)
        own = [(index, given[index]) for index in layout.dense]
        reduced = reduce([zeros(i) if each is None else each for i, each in own], layout)
    results = dict(zip(layout.dense, reduced, strict=True))
    return [results.get(index) for index in range(len(gradients))]
