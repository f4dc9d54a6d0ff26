"""What the lint does grows with a script, and not with the square of it."""

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest
from hvdtrain_lint.command import check_script
from lint_cases import DDP


def calls_in(function: Callable[[], object]) -> int:
    """Return how many functions Python calls, or goes on with, in a function."""
    count = 0

    def profile(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    gc.disable()  # it would call what others have left
    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(before)
        gc.enable()
    return count


@pytest.mark.parametrize("term", ["'a'", "a.b * f(a)"])
@pytest.mark.parametrize("rest", ["x = {}\n", "print({})\n", "for y in z:\n    print(y, {})\n"])
def test_long_sums(tmp_path: Path, term: str, rest: str) -> None:
    def calls(terms: int) -> int:
        path = tmp_path / "script.py"
        path.write_text(DDP + rest.format(" + ".join([term] * terms)))
        return calls_in(lambda: check_script(path))

    few, some, many = (calls(terms) for terms in (50, 200, 350))
    # As many terms more, as much more to do; and as the square of them, twice as much and more.
    assert many - some == pytest.approx(some - few, rel=0.2)
