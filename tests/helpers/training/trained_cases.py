"""Cases that train_worker.py trains, all those of a number of ranks in one launch."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paths import TESTS
from ranks import run_ranks

WORKER = TESTS / "train" / "train_worker.py"


class TrainedCases:
    def __init__(self, folder: Path, cases: Mapping[int, Mapping[str, dict[str, Any]]]) -> None:
        self._folder, self._cases = folder, cases
        self._results: dict[int, dict[str, list[dict[str, Any]]]] = {}
        self.stderr: dict[int, str] = {}

    def results(self, size: int, name: str) -> list[dict[str, Any]]:
        if size not in self._results:
            cases = self._cases[size]
            arguments = [
                {**case, "out": str(self.directory(size, case.get("out", key)))}
                for key, case in cases.items()
            ]
            done = run_ranks(WORKER, size, args=[json.dumps(arguments)], warm="torch")
            by_case = map(list, zip(*done.results, strict=True))
            self._results[size] = dict(zip(cases, by_case, strict=True))
            self.stderr[size] = done.stderr
        return self._results[size][name]

    def directory(self, size: int, name: str) -> Path:
        return self._folder / str(size) / name
