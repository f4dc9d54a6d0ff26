"""The allocator of PyTorch's gradients in one process: what it serves, and for how long."""

import gc
import mmap
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from hvdtrain.core.allocators import LEAST_BYTES, AllocatorError, GradientArena, blocks_for, build
from hvdtrain.torch.allocator import Allocator, find_allocator, recipe, why_no_allocator

COUNT = LEAST_BYTES // 4


@pytest.fixture
def allocator() -> Allocator:
    found = find_allocator()
    assert found is not None, why_no_allocator()
    gc.collect()  # arenas of other tests, which would end at any time
    return found


def open_arena(allocator: Allocator) -> GradientArena:
    blocks = blocks_for([LEAST_BYTES])
    assert blocks is not None
    memory = np.frombuffer(mmap.mmap(-1, blocks.nbytes), np.uint8)
    return GradientArena(allocator.library, memory, blocks)


def parameter() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.arange(COUNT, dtype=torch.float32))


def gradient_of(weights: torch.nn.Parameter) -> torch.Tensor:
    """Return its gradient, its own values, which takes no other memory to compute."""
    (weights * weights.detach()).sum().backward()
    assert weights.grad is not None
    return weights.grad


def test_gradients_alone_are_served_while_there_are_blocks(allocator: Allocator) -> None:
    arena, weights = open_arena(allocator), [parameter() for _ in range(3)]
    served = [arena.offset(gradient_of(weight).data_ptr()) for weight in weights]
    assert sorted(offset for offset in served if offset is not None) == [0, LEAST_BYTES]
    assert arena.used == 2
    assert arena.offset(torch.empty(COUNT).data_ptr()) is None
    for weight in weights:
        weight.grad = None
    assert arena.used == 0


def test_spare_blocks_are_a_small_part() -> None:
    for spare, large in ((1.0, 3), (1 / 16, 2)):
        blocks = blocks_for([1 << 20, 1 << 20, LEAST_BYTES], spare)
        assert blocks is not None
        assert blocks.nbytes == (large << 20) + 2 * LEAST_BYTES


def test_the_arena_may_end_before_its_gradients(allocator: Allocator) -> None:
    before = allocator.library.arenas
    arena, weights = open_arena(allocator), parameter()
    gradient = gradient_of(weights)
    weights.grad = None
    del arena
    assert allocator.library.arenas == before + 1
    gradient += 1.0
    assert torch.equal(gradient, weights.detach() + 1)
    del gradient
    assert allocator.library.arenas == before


def test_the_preferred_of_two_arenas_serves_first(allocator: Allocator) -> None:
    arenas = [open_arena(allocator) for _ in range(2)]
    for arena in (arenas[1], arenas[0], arenas[0]):
        arena.miss(0)
        weights = parameter()
        assert arena.offset(gradient_of(weights).data_ptr()) is not None
        del weights


def test_a_forked_child_gets_memory_of_its_own(allocator: Allocator) -> None:
    arena, weights = open_arena(allocator), parameter()
    first = gradient_of(weights)
    process = os.fork()
    if not process:
        weights.grad = None
        second = parameter()
        alone = arena.offset(gradient_of(second).data_ptr()) is None
        os._exit(0 if alone else 1)
    assert os.waitpid(process, 0)[1] == 0
    assert torch.equal(first, weights.detach())
    assert arena.used == 1
    assert arena.offset(gradient_of(parameter()).data_ptr()) is not None


def test_gradients_of_one_memory_are_found(allocator: Allocator) -> None:
    arena = open_arena(allocator)
    seen = []

    def note(weights: torch.nn.Parameter, incoming: torch.Tensor) -> None:
        seen.append(allocator.is_alone(weights, incoming))

    pair = [parameter(), parameter()]
    nodes = []
    for weights in pair:
        nodes.append(torch.autograd.graph.get_gradient_edge(weights).node)
        nodes[-1].register_hook(lambda _, given, weights=weights: note(weights, *given))
    ((pair[0].view(2, -1) + pair[1].view(2, -1)) * torch.ones(2, COUNT // 2)).sum().backward()
    assert seen == [False, False]
    assert arena.used == 1


def test_without_a_compiler(tmp_path: Path) -> None:
    with pytest.raises(AllocatorError, match=r"no C\+\+ compiler \(c\+\+, g\+\+, clang\+\+\)"):
        build(recipe(), {"PATH": "", "HOME": str(tmp_path)})
    with pytest.raises(AllocatorError, match="does not compile it"):
        build(recipe(), {**os.environ, "CXX": "false", "XDG_CACHE_HOME": str(tmp_path)})
    (tmp_path / "c++").write_text("not a program")
    (tmp_path / "c++").chmod(0o755)
    with pytest.raises(AllocatorError, match=r"c\+\+ does not run \(Exec format error\)"):
        build(recipe(), {"PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)})
    with pytest.raises(AllocatorError, match=r"no home directory .*: set XDG_CACHE_HOME"):
        build(recipe(), {**os.environ, "XDG_CACHE_HOME": "", "HOME": "~nobody-of-this-name"})
    assert not list(tmp_path.rglob("*.so"))
