"""Random training programs give on 1, 2 and 3 ranks what one process gives."""

import ast
from typing import Any

import pytest
from find_faults import WARM, Ranks, count_equal, script, shrink
from torch_drawing import draw

_RANKS = {1: 20, 2: 65, 3: 65}
# What is left of programs that have found a fault, by number of ranks.
_TWO = {"optimizers": ["sgd", "sgd"]}
_TABLE = {"layers": [{"kind": "embedding", "sparse": True}], "sparse_as_dense": True}
_FOUND: dict[int, list[dict[str, Any]]] = {
    1: [],
    2: [
        # backward() waited for what another rank fills only in its step.
        {
            "layers": [{}, {}, {"kind": "unused"}, {"ranks": [1, 0]}],
            "steps": [{"sync": True}, {}],
            "groups": 2,
            **_TWO,
        },
        # Results of synchronize() were removed, and a rank waited for the next gradient.
        {
            "layers": [{}, {"ranks": [0, 1]}],
            "steps": [{"sync": True, "skip": True}, {"zero": "by hand"}],
            **_TWO,
        },
        # Ranks dropped the gradients of a skipped step at different times.
        {"steps": [{"skip": True, "rows": [1, 2]}, {"closure": True, "rows": [2, 2]}]},
        # Gradients of other ranks' rows were not weighted, with gradients and with weights.
        *(
            {"layers": [{}, {"kind": "batchnorm"}], "steps": [{"rows": [2, 3]}], "exchange": name}
            for name in ("average", "local:steps=1")
        ),
        # Momenta of complex parameters were not averaged.
        {
            "layers": [{"kind": "complex"}],
            "optimizers": ["momentum"],
            "exchange": "postlocal:after=1,steps=1,state=average",
            "steps": [{}, {}],
        },
        # The loss of a closure was not divided by the number of all ranks, as gradients are.
        {"optimizers": ["wolfe"], "steps": [{"closure": True}], "join": [1, 0], "mode": "average"},
        {"layers": [{"kind": "scalar", "dtype": "bf16"}], "world": {"ENGINE": "gloo"}},
        {"layers": [{"kind": "scalar"}], "optimizers": ["adam"], "sharded": True},
        {"layers": [{}, {"ranks": [1, 0]}], "steps": [{"graph": True}] * 2, "sharded": True},
        # An optimizer without any gradient was told to synchronize, which it had done.
        {
            "layers": [{"steps": [0, 1]}],
            "steps": [{"sync": True, "clip": "own"}],
            "pre_hook": 0.01,
            "sharded": True,
        },
        # The optimizer before was not deleted.
        {"steps": [{}, {"before": [{"kind": "wrap"}]}], "sharded": True},
        # Gradients were sparse on ranks outside the process set.
        {"optimizers": ["adam"], "members": [0], "mode": "average", **_TABLE},
        {"steps": [{"clip": "own"}], "members": [0], "mode": "average", **_TABLE},
    ],
    3: [],
}


@pytest.mark.parametrize("np", [1, 2, pytest.param(3, marks=pytest.mark.long)])
def test_programs_give_what_one_process_gives(np: int) -> None:
    programs: list[tuple[int | None, Any]] = [(seed, draw(seed)) for seed in range(_RANKS[np])]
    programs += [(None, program) for program in _FOUND[np]]
    with Ranks("torch_programs", np, warm=WARM) as ranks:
        trained = count_equal(ranks, programs)
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
