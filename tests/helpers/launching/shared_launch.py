"""Cases that differ only in what ranks do run in one launch, and each is a test of its own.

    LAUNCH = SharedLaunch(WORKER, 2, ["first", "second"])        # in the test
    LAUNCH.results("first")                                      # what it returned, by rank
    run_each({"first": first, "second": second}, sys.argv[1:])   # in the worker, on each rank

The first test that asks starts the ranks. A case that fails ends the job: its test fails with the
output, those of the cases before it pass, and those of the cases after it fail with the same words.
"""

import faulthandler
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from job import RESULTS, Job, rank_of
from ranks import launch

_TIMEOUT_SECONDS = 600
# Shortly before, ranks that hang show where.
_HANGS_SECONDS = 560


def run_each(cases: Mapping[str, Callable[[], object]], names: Sequence[str]) -> None:
    """Run cases by name, in this order, and hand the result of each to its test."""
    faulthandler.dump_traceback_later(_HANGS_SECONDS)
    folder, rank = Path(os.environ[RESULTS]), rank_of(os.environ) or 0
    for number, name in enumerate(names):
        result = cases[name]()
        part = folder / f"{number}.{rank}.part"
        part.write_text(json.dumps(result))
        part.rename(part.with_suffix(".json"))
    faulthandler.cancel_dump_traceback_later()


class SharedLaunch:
    """One launch that runs several cases when the first of them is asked for."""

    def __init__(
        self,
        target: Path,
        np: int,
        cases: Sequence[str],
        *,
        timeout_seconds: float = _TIMEOUT_SECONDS,
        **how: Any,
    ) -> None:
        self.cases = list(cases)
        self._target, self._np, self._timeout_seconds, self._how = target, np, timeout_seconds, how
        self._results: dict[str, list[Any]] | None = None
        self._failure = self.stderr = ""

    def results(self, case: str) -> list[Any]:
        if self._results is None:
            self._results = {}
            self._run()
        if case not in self._results:
            raise AssertionError(self._failure)
        return self._results[case]

    def _run(self) -> None:
        with launch(self._target, self._np, args=self.cases, **self._how) as job:
            try:
                job.ended(self._timeout_seconds, code=0)
            except AssertionError as error:
                self._failure = str(error)
            self.stderr = job.stderr
            assert self._results is not None
            for number, case in enumerate(self.cases):
                results = results_of(job, self._np, number)
                if results is None:
                    reason = self._failure or "a rank left no result, though the exit code is 0"
                    self._failure = f"in case {case!r}: {reason}"
                    return
                self._results[case] = results
        if self._failure:  # after the last case, which must tell
            del self._results[case]


def results_of(job: Job, np: int, number: int) -> list[Any] | None:
    """Return what `np` ranks have returned from the case of this number; None if one has not."""
    files = [job.results_folder / f"{number}.{rank}.json" for rank in range(np)]
    if not all(file.exists() for file in files):
        return None
    return [json.loads(file.read_text()) for file in files]
