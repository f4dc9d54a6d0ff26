"""The allocator of gradients: how it is built and tried, and which gradients are shared."""

from __future__ import annotations

import logging
import mmap
import os
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch.autograd.graph import get_gradient_edge

from hvdtrain.buffer import Elements
from hvdtrain.collective import collective
from hvdtrain.core import context
from hvdtrain.core.agreement.channel import Channel
from hvdtrain.core.allocators import (
    LEAST_BYTES,
    AllocatorError,
    BuildRecipe,
    GradientArena,
    Library,
    blocks_for,
    build,
    open_places,
    suitable_slices,
)
from hvdtrain.core.gradients.plan import BucketPlan
from hvdtrain.core.places import GradientPlaces


def recipe() -> BuildRecipe:
    abi = int(torch.compiled_with_cxx11_abi())
    beside = Path(torch.__file__).parent
    return BuildRecipe(
        source=Path(__file__).with_name("gradient_allocator.cpp"),
        name=f"torch{torch.__version__}",
        build=f"{torch.version.git_version} {abi}",
        flags=[
            *("-std=gnu++20", f"-D_GLIBCXX_USE_CXX11_ABI={abi}"),
            # PyTorch has loaded these libraries, wherever they are.
            *("-isystem", str(beside / "include"), "-L", str(beside / "lib")),
        ],
        libraries=["-lc10", "-ltorch_cpu"],
    )


# Of the gradient: in Python, to the tensor, to its storage; and to the tensor that it is a view of.
References = tuple[int, int, int, int]


def count_references(parameter: torch.Tensor, incoming: torch.Tensor | None) -> References:
    """Return how many references there are to a gradient, those included that are always there."""
    python = sys.getrefcount(parameter.grad)
    gradient = parameter.grad
    assert gradient is not None
    tensor = gradient._use_count()  # type: ignore[attr-defined]
    storage = torch._C._storage_Use_Count(gradient.untyped_storage()._cdata)
    if incoming is None or incoming.data_ptr() != gradient.data_ptr():  # it was added or cloned
        return python, tensor, storage + 1, 0
    base = incoming._base
    if base is None:
        return python, tensor, storage, 0
    return python, tensor, storage - 1, base._use_count()  # type: ignore[attr-defined]


_ELEMENTS = LEAST_BYTES // 4


class Allocator:
    """The allocator, as tried on this machine."""

    def __init__(self, library: Library) -> None:
        self.library = library
        blocks = blocks_for([LEAST_BYTES] * 2)
        assert blocks is not None
        memory = np.frombuffer(mmap.mmap(-1, blocks.nbytes), np.uint8)
        arena = GradientArena(library, memory, blocks)
        with torch.enable_grad():
            self._alone, _ = _gradients_of(1, lambda p: p.square().sum(), arena)
            self._check(arena)

    def _check(self, arena: GradientArena) -> None:
        """Check that shared gradients are found, and that blocks are returned."""
        viewed = _gradients_of(1, lambda p: p.view(2, -1).square().sum(), arena)
        shared = _gradients_of(
            2, lambda p, q: (p.view(2, -1) + q.view(2, -1)).square().sum(), arena
        )
        kept: list[torch.Tensor | None] = []
        seen = _gradients_of(1, lambda p: p.square().sum(), arena, lambda p: kept.append(p.grad))
        outside = torch.empty(_ELEMENTS, dtype=torch.float32, device="cpu")
        if arena.offset(outside.data_ptr()) is not None:
            raise AllocatorError("it takes memory that is no gradient's")
        if not all(map(self._fits, viewed)) or any(map(self._fits, [*shared, *seen])):
            raise AllocatorError("it cannot tell which gradients share memory")
        kept.clear()
        if arena.used:
            raise AllocatorError("its blocks are not returned")

    def _fits(self, references: References) -> bool:
        python, tensor, storage, base = references
        alone = self._alone
        return python <= alone[0] and tensor <= alone[1] and storage <= alone[2] and base <= 2

    def is_alone(self, parameter: torch.Tensor, incoming: torch.Tensor | None) -> bool:
        """Return whether nothing else uses the memory of a gradient."""
        return self._fits(count_references(parameter, incoming))


def _gradients_of(
    number: int,
    loss: Callable[..., torch.Tensor],
    arena: GradientArena,
    hook: Callable[[torch.Tensor], None] = lambda _: None,
) -> list[References]:
    """Return the references to the gradients of a function, in their hooks and afterwards."""
    found: list[References] = []
    parameters = [
        torch.ones(_ELEMENTS, dtype=torch.float32, device="cpu", requires_grad=True)
        for _ in range(number)
    ]
    nodes = []  # a tensor does not keep its node alive
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(hook)
        nodes.append(get_gradient_edge(parameter).node)

        def count(
            _: object, incoming: tuple[torch.Tensor, ...], of: torch.Tensor = parameter
        ) -> None:
            found.append(count_references(of, *incoming))

        nodes[-1].register_hook(count)
    loss(*parameters).backward()
    for parameter in parameters:
        if parameter.grad is None or arena.offset(parameter.grad.data_ptr()) is None:
            raise AllocatorError("gradients do not come to lie in its memory")
    return found + [count_references(parameter, None) for parameter in parameters]


def find_allocator() -> Allocator | None:
    """Return the allocator, compiled and tried on the first call; None if there is none."""
    return _found()[0]


def why_no_allocator() -> str:
    """Return why there is no usable allocator, or "" if there is one."""
    return _found()[1]


@cache
def _found() -> tuple[Allocator | None, str]:
    try:
        return Allocator(Library(build(recipe(), os.environ))), ""
    except AllocatorError as error:
        return None, str(error)
    except (AttributeError, OSError, RuntimeError, TypeError) as error:  # of another torch
        return None, f"it does not work with torch {torch.__version__}: {error}"


_logger = logging.getLogger("hvdtrain")


# Only while it lasts, a backward pass has other tensors of a gradient's size.
_SPARE = 1 / 16


class Staying(NamedTuple):
    """What gradients need that are reduced where autograd has made them."""

    allocator: Allocator
    arena: GradientArena
    places: GradientPlaces


@collective
def open_staying(
    channel: Channel,
    plan: BucketPlan,
    memory: Mapping[str, Elements],
    suitable: bool,
    name: str,
) -> Staying | None:
    """Let autograd allocate gradients in memory that the ranks share, if all can."""
    if set(memory) != {"cpu"} or suitable_slices(channel, memory["cpu"]) is None:
        return None
    sizes = [spec.nbytes for spec in plan.specs if spec.dtype.value == spec.kind]
    blocks = blocks_for(sizes, _SPARE)

    def find() -> Library | None:
        allocator = _wanted() if suitable else None
        return None if allocator is None else allocator.library

    opened = open_places(channel, memory["cpu"], blocks, len(plan.specs), find, name)
    allocator = _wanted()
    if opened is None or allocator is None:
        return None
    return Staying(allocator, *opened)


def _wanted() -> Allocator | None:
    """Return the allocator, unless the user or its trial has decided against it."""
    if not context.current().config.torch_allocator:
        return None
    allocator = find_allocator()
    if allocator is None:
        _logger.debug("gradients are copied into buckets: %s", why_no_allocator())
    return allocator
