"""The compiled optimizer step and arithmetic of codes, for each instruction set."""

import ctypes
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from coded_rows import LENGTHS, coded, rows_of_all_kinds
from compiling import LEVELS, compile_library, supports

from hvdtrain.core import update_kernel as kernel
from hvdtrain.core.exchanges import codes
from hvdtrain.core.exchanges.codes import BITS
from hvdtrain.core.update_kernel import KINDS, Form, KernelRule, KernelStep

SOURCE = Path(kernel.__file__).with_name("update_kernel.c")
RULES = [
    KernelRule(lr=0.1),
    KernelRule(lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=1),
    KernelRule(lr=0.1, momentum=0.9, dampening=0.3, maximize=1),
    KernelRule(lr=0.1, kind=1, beta1=0.9, beta2=0.99, epsilon=1e-8, weight_decay=0.1),
    KernelRule(lr=0.1, kind=2, beta1=0.4, beta2=0.99, epsilon=1e-8, weight_decay=0.1, amsgrad=1),
]
COUNT = 1031
Numbers = npt.NDArray[np.float64]  # or float32


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> list[ctypes.CDLL]:
    found = []
    for level in filter(supports, LEVELS):
        path = tmp_path_factory.mktemp(level) / "update.so"
        compile_library(SOURCE, level, path)
        found.append(kernel.open_kernel(path))
    return found


def kernel_step(gradients: Any, weights: Any, form: Form, **fields: Any) -> KernelStep:
    targets, is_double = [[row.ctypes.data for row in weights]], gradients[0].dtype == np.float64
    step = KernelStep(targets, form, count=COUNT, is_double=is_double, **fields)
    step.gradients[:] = [row.ctypes.data for row in gradients]
    return step


def stepped(rule: KernelRule, ranks: int, kind: type, contracts: bool) -> list[Numbers]:
    """Return weights of all ranks, state and own gradient after two steps, the second clipped."""
    draw = np.random.default_rng(7)
    gradients: Numbers = draw.normal(size=(ranks, COUNT)).astype(kind)
    weights: Numbers = np.repeat(draw.normal(size=(1, COUNT)).astype(kind), ranks, axis=0)
    state: Numbers = np.zeros((3, COUNT), kind)
    steps = np.zeros(1, np.float32)
    form = Form(contracts, 32)
    rest = form.rest(COUNT, 0, COUNT, gradients.itemsize)
    step = kernel_step(gradients, weights, form, rest=rest, steps=steps.ctypes.data)
    step.segments["state"] = [row.ctypes.data for row in state]
    scales = [1.0 + rank for rank in range(ranks)], 1.0 / ranks
    step.segments["begins"] = True
    step.update([rule], scales)
    step.segments["begins"] = False
    squares = step.sum(scales)
    assert np.isclose(squares, float((gradients[0].astype(np.float64) ** 2).sum()))
    step.update([rule], factor=0.5)
    assert (weights == weights[0]).all()
    return [weights, state, gradients, steps.astype(np.float64)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
def test_all_instruction_sets_give_the_same_bits(
    ranks: int, libraries: list[ctypes.CDLL], monkeypatch: pytest.MonkeyPatch
) -> None:
    for rule, kind, contracts in product(RULES, (np.float32, np.float64), (True, False)):
        results = []
        for library in libraries:
            monkeypatch.setattr(kernel, "load_kernel", lambda library=library: library)
            results.append([part.tobytes() for part in stepped(rule, ranks, kind, contracts)])
        assert all(result == results[0] for result in results)


@pytest.mark.parametrize("rule", RULES[3:])
def test_an_adam_step_is_its_formula(rule: KernelRule) -> None:
    weights, state, _, steps = stepped(rule, 1, np.float64, contracts=True)
    draw = np.random.default_rng(7)
    gradient, expected = draw.normal(size=COUNT), draw.normal(size=COUNT)
    mean = square = largest = np.zeros(COUNT)
    decoupled = KINDS[rule.kind] == "adamw"
    for number, factor in ((1, 1.0), (2, 0.5)):
        own = factor * gradient + (0 if decoupled else rule.weight_decay * expected)
        expected = expected * (1 - rule.lr * rule.weight_decay * decoupled)
        mean = rule.beta1 * mean + (1 - rule.beta1) * own
        square = rule.beta2 * square + (1 - rule.beta2) * own**2
        largest = np.maximum(largest, square)
        root = np.sqrt((largest if rule.amsgrad else square) / (1 - rule.beta2**number))
        expected = expected - rule.lr * mean / (1 - rule.beta1**number) / (root + rule.epsilon)
    np.testing.assert_allclose(weights[0], expected, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(state[:2], np.stack([mean, square]), rtol=1e-12, atol=1e-14)
    assert steps[0] == 2


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_sums_are_along_a_tree(ranks: int) -> None:
    draw = np.random.default_rng(7)
    parts = [draw.normal(size=COUNT).astype(np.float32) for _ in range(ranks)]
    scaled = [part * np.float32(1.0 + rank) for rank, part in enumerate(parts)]
    pairs = scaled[0] + scaled[1]
    if ranks == 3:
        pairs = pairs + scaled[2]
    if ranks == 5:
        pairs = (pairs + (scaled[2] + scaled[3])) + scaled[4]
    summed = parts[0].copy()
    step = kernel_step([summed, *parts[1:]], parts, Form(True, 32))
    step.sum(([1.0 + rank for rank in range(ranks)], 0.25))
    assert summed.tobytes() == (pairs * np.float32(0.25)).tobytes()


CODES_SOURCE = Path(codes.__file__).with_name("codes_kernel.c")


@pytest.mark.parametrize("level", LEVELS)
def test_codes_of_all_instruction_sets_have_the_bits_of_numpy(
    level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not supports(level):
        pytest.skip(f"this processor lacks instructions of {level}")
    path = tmp_path / "codes.so"
    compile_library(CODES_SOURCE, level, path)
    library = codes.open_kernel(path)
    monkeypatch.setattr(codes, "load_kernel", lambda: library)
    for kind in (np.float32, np.float64):
        for length in LENGTHS:
            rows = rows_of_all_kinds(length, kind)
            for bits in BITS:
                expected = coded(codes.code_arrays, rows.copy(), bits)
                found = coded(codes.with_kernel, rows.copy(), bits)
                for one, other in zip(found, expected, strict=True):
                    assert one.tobytes() == other.tobytes()
