"""Runs the cases of several modules on each rank, and reports their digests."""

import sys
import time
from collections.abc import Callable, Iterable
from types import FunctionType, ModuleType
from typing import Any

from ranks import report

from hvdtrain.core import context

Case = Callable[[], str | None]


def cases_of(*modules: ModuleType) -> list[Case]:
    """Return the public functions that take nothing and return nothing, or a digest, in order."""
    found = [
        (module, [own for own in vars(module).values() if _is_case(module, own)])
        for module in modules
    ]
    empty = [module.__name__ for module, cases in found if not cases]
    assert not empty, f"no cases in {empty}"
    return [case for _, cases in found for case in cases]


def _is_case(module: ModuleType, own: object) -> bool:
    return (
        isinstance(own, FunctionType)
        and own.__module__ == module.__name__
        and not own.__name__.startswith("_")
        and own.__annotations__.keys() == {"return"}
        and own.__annotations__["return"] in (None, str, str | None)
    )


def run_all(cases: Iterable[Case], begin: Callable[[], Any] = bool) -> None:
    """Run all cases, or those that arguments name; each begins alike."""
    digests, started = {}, time.perf_counter()
    wanted = [name for name in sys.argv[1:] if name != "hooks"]
    chosen = [case for case in cases if not wanted or case.__name__ in wanted]
    for case in chosen:
        begin()
        digest = case()
        if wanted:
            print(f"{case.__name__}: {time.perf_counter() - started:.2f} s", flush=True)
        if digest is not None:
            digests[case.__name__] = digest
    engine = context.current().engine_name
    payload = {"engine": engine, "cases": len(chosen), "digests": digests}
    report(cases=len(chosen), payload=payload)
