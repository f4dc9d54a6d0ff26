"""Random training programs give on 1, 2 and 3 ranks what one process gives."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

import pytest
from find_faults import FAULTS, script, shrink
from program_serving import WARM, Ranks
from torch_drawing import draw, known

_RANKS = {1: 20, 2: 65, 3: 65}
# Seeds whose programs have found a fault that is mended, by number of ranks.
_FOUND: dict[int, list[int]] = {1: [], 2: [114, 352], 3: [369]}


def drawn(count: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield seeds and programs without features of known faults."""
    seed = 0
    while count:
        program = draw(seed)
        if not known(program):
            yield seed, program
            count -= 1
        seed += 1


@pytest.mark.parametrize("np", _RANKS)
def test_programs_give_what_one_process_gives(np: int) -> None:
    programs = [*drawn(_RANKS[np]), *((seed, draw(seed)) for seed in _FOUND[np])]
    trained = 0
    with Ranks("torch_programs", np, warm=WARM) as ranks:
        for seed, program in programs:
            result = ranks.run(program)
            assert result["outcome"] not in FAULTS, (
                f"seed {seed}\n{script('torch_programs', program, result, np)}"
            )
            trained += result["outcome"] == "equal"
    assert trained >= 0.7 * len(programs)  # one rank may have no rows


def test_a_program_shrinks_to_what_fails() -> None:
    program = {"layers": [{"kind": "gru", "times": 2}, {"kind": "conv"}], "steps": [{}, {}]}

    def fails(less: dict[str, Any]) -> bool:
        return any(layer.get("times") == 2 for layer in less.get("layers", []))

    assert shrink(program, fails) == {"layers": [{"times": 2}]}


def test_a_wrong_program_is_found_and_printed() -> None:
    wrong = {"steps": [{"rows": [2]}], "wrong": 1e-6}
    with Ranks("torch_programs", 2, warm=WARM) as ranks:
        result = ranks.run(wrong)
        assert result["outcome"] == "different"
        assert ranks.run({})["outcome"] == "equal"
    with Ranks("torch_programs", 2, patience_seconds=5, warm=WARM) as ranks:
        hanging = ranks.run({"absent": 1})
        assert (hanging["outcome"], hanging["missing"]) == ("hang", [0])
        assert "in step" in hanging["stacks"][0]
    ast.parse(script("torch_programs", wrong, result, 2))
