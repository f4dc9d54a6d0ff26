"""Sweeps: Optuna proposes options, and ranks train one trial after the other with them."""

from __future__ import annotations

import fcntl
import os
import secrets
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from hvdtrain.collective import collective
from hvdtrain.core.objects import call_on_root, vote
from hvdtrain.errors import (
    OneRankError,
    RecipeError,
    TooFewRanksError,
    TrainingError,
    UsageError,
)
from hvdtrain.files import replacing
from hvdtrain.train.callbacks import Callback, CallbackState
from hvdtrain.train.find import NothingToResume
from hvdtrain.train.loop.heartbeat import StopSignals
from hvdtrain.train.metrics import improved
from hvdtrain.train.option import KINDS
from hvdtrain.train.options import OPTIONS, RUNS, TrainOptions, key_of_name_elsewhere
from hvdtrain.train.records import json_text, new_directory, prepare_directory, usage_errors
from hvdtrain.train.session import train
from hvdtrain.train.setup import join_world, set_up
from hvdtrain.train.tracking.tracker import RunInfo, Status, load_json, masked, one_line
from hvdtrain.train.tracking.trackers import Trackers, open_trackers, tracker_names

if TYPE_CHECKING:
    import optuna

# Options of a trial, unless the ranks have been started with them.
_GROUPS = ("Data", "Optimization", "Exchange", "Learning rate over time", "Precision")
_NOT_OF_TRIALS = ("dry_run", "find_batch_size", "find_lr", "overfit", "resume", "virtual_shards")
_OF_TRIALS = {one.name: one for one in OPTIONS if one.group in _GROUPS}
_SET = "set."


@dataclass(frozen=True)
class Parameter:
    """What is searched for: an option, or set.NAME for an argument of the recipe."""

    name: str
    choices: tuple[Any, ...]  # the values, or the least and the largest one of a range
    is_range: bool = False
    log: bool = False  # logarithms are drawn evenly

    @classmethod
    def parse(cls, text: str) -> Parameter:
        """Return what lr=0.001..0.1:log or set.width=32,64 names."""
        name, _, values = text.partition("=")
        name, is_range = name.strip().replace("-", "_"), ".." in values
        log = is_range and values.endswith(":log")
        values = values.removesuffix(":log" * log)
        parts = [part.strip() for part in values.split(".." if is_range else ",")]
        if not all(parts) or (is_range and len(parts) != 2):
            raise UsageError(
                f"--search {text!r}: write NAME=LEAST..LARGEST, NAME=LEAST..LARGEST:log, or "
                "NAME=A,B,C, with an option of train or set.ARGUMENT as the name"
            )
        name = name if name.startswith(_SET) else _option_name(name)
        kind = _OF_TRIALS[name].kind if name in _OF_TRIALS else str
        if is_range and kind is str:  # the argument's own type is known to the recipe alone
            kind = int if all(part.lstrip("+-").isdecimal() for part in parts) else float
        try:
            choices = tuple(KINDS[kind].read(part) for part in parts)
        except ValueError:
            raise UsageError(f"--search {text!r}: {name} is {KINDS[kind].words}") from None
        for value in choices:
            if name in _OF_TRIALS:
                _OF_TRIALS[name].require(value, f"--search {name}")
        if is_range and not (kind in (int, float) and choices[0] <= choices[1]):
            raise UsageError(f"--search {text!r}: a range is one of numbers, the least one first")
        if log and choices[0] <= 0:
            raise UsageError(f"--search {text!r}: with :log, numbers must be positive")
        return cls(name, choices, is_range, log)

    def suggest(self, trial: optuna.Trial) -> None:
        if not self.is_range:
            trial.suggest_categorical(self.name, self.choices)
        elif isinstance(self.choices[0], int):
            trial.suggest_int(self.name, *self.choices, log=self.log)
        else:
            trial.suggest_float(self.name, *self.choices, log=self.log)


def _option_name(name: str) -> str:
    key = key_of_name_elsewhere(name)
    found = name if key is None else key.replace("-", "_")
    if found not in _OF_TRIALS or found in _NOT_OF_TRIALS:
        raise UsageError(
            f"--search {name}: what can differ between trials is set.ARGUMENT, or one of "
            f"{', '.join(one for one in _OF_TRIALS if one not in _NOT_OF_TRIALS)}"
        )
    return found


def with_values(options: TrainOptions, values: Mapping[str, Any]) -> TrainOptions:
    """Return options with the values of a trial."""
    arguments = {n.removeprefix(_SET): v for n, v in values.items() if n.startswith(_SET)}
    others = {name: value for name, value in values.items() if name in _OF_TRIALS}
    return replace(options, set={**options.set, **arguments}, **others)


def command_line(options: TrainOptions) -> str:
    """Return the command that trains with options."""
    words = ["python", "-m", "hvdtrain", "train", options.recipe]
    for one in OPTIONS[1:]:
        value = getattr(options, one.name)
        if one.name == "out":
            continue
        if isinstance(value, Mapping):
            words += [word for n, v in value.items() for word in ("--set", f"{n}={v}")]
        elif value != one.default:
            no = "no-" * (value is False)
            words += [f"--{no}{one.key}", *([] if isinstance(value, bool) else [str(value)])]
    return shlex.join(words)


@contextmanager
def _optuna_errors(storage: str) -> Iterator[None]:
    """Turn an error of Optuna, its storage or its database into one line."""
    try:
        yield
    except UsageError:
        raise
    except Exception as error:  # they have no common base
        raise UsageError(f"the study in {storage}: {one_line(error)}") from error


def _import_optuna() -> Any:
    try:
        import optuna
        import optuna.storages.journal
    except ModuleNotFoundError as error:
        raise UsageError(
            f"{error.name} is not installed, which proposes the trials of a sweep: pip install "
            "'hvdtrain[sweep]'"
        ) from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


@contextmanager
def _alone_in(directory: Path) -> Iterator[None]:
    """Let one job at a time be in the block, where the file system has locks."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


class _Study:
    """Optuna's study of a sweep, and the files and the tracker that show it (rank 0 only)."""

    def __init__(self, asked: Sweep, directory: Path, maximizes: bool | None) -> None:
        """Open the study; `maximizes` is None where it is there already, and says so itself."""
        self._optuna, self._asked, self._directory = _import_optuna(), asked, directory
        self._storage = masked(asked.storage or str(directory / STUDY))
        direction: Literal["maximize", "minimize"] = "maximize" if maximizes else "minimize"
        with _optuna_errors(self._storage), _alone_in(directory):
            storage: Any = asked.storage
            if storage is None:
                backend = self._optuna.storages.journal.JournalFileBackend(str(directory / STUDY))
                storage = self._optuna.storages.JournalStorage(backend)
            self._study = self._optuna.create_study(
                storage=storage,
                study_name=directory.name,
                direction=direction,
                load_if_exists=True,
                pruner=None if asked.prune else self._optuna.pruners.NopPruner(),
            )
            if maximizes is not None and self._study.direction.name.lower() != direction:
                raise UsageError(
                    f"{directory} is a sweep by another --best: name another directory with --out"
                )
            known = self._study.get_trials()
        self._trackers = self._open_trackers(known[-1].number if known else None)
        self._trial: optuna.Trial | None = None
        self._reported = 0

    def _open_trackers(self, last: int | None) -> Trackers:
        """Open the run of which those of the trials are children."""
        options, asked = self._asked.options, self._asked
        names = "mlflow" * ("mlflow" in tracker_names(options.track))
        searched = {one.name: str(one.choices) for one in asked.search}
        info = RunInfo(self._directory.name, self._directory, searched, last)
        trackers = open_trackers(
            names, info, options.tracking_uri, options.experiment, options.run_name
        )
        if names:
            from hvdtrain.train.tracking.mlflow import KEPT

            kept = load_json(self._directory / KEPT, "run_id")
            assert kept is not None  # just opened
            os.environ[_PARENT] = kept["run_id"]
        return trackers

    def _counts(self) -> tuple[bool, int]:
        """Return whether trials have ended or run in enough number, and how many were stopped."""
        known = self._study.get_trials()
        interrupted = sum(trial.user_attrs.get("problem") == _INTERRUPTED for trial in known)
        ended = sum(trial.state.is_finished() for trial in known) - interrupted
        return ended + len(self._running()) >= self._asked.trials, interrupted

    def _running(self) -> list[Any]:
        """Return the trials that jobs of this start train, or did until their ranks were lost."""
        states, start = [self._optuna.trial.TrialState.RUNNING], self._asked.start
        trials = self._study.get_trials(states=states) if start else []
        return [trial for trial in trials if trial.user_attrs.get("start") == start]

    def ask(self) -> tuple[int, dict[str, Any]] | None:
        """Return the number and the values of the next trial; None if there are enough."""
        with _optuna_errors(self._storage):
            with _alone_in(self._directory):
                enough, interrupted = self._counts()
                if enough:
                    return None
                trial = self._trial = self._study.ask()
                if self._asked.start:
                    trial.set_user_attr("start", self._asked.start)
            # A sweep that goes on draws what it would have drawn in one go.
            number = trial.number - interrupted
            entropy = np.random.SeedSequence([self._asked.options.seed, number])
            seed = int(entropy.generate_state(1)[0])
            self._study.sampler = self._optuna.samplers.TPESampler(seed=seed)
            for parameter in self._asked.search:
                parameter.suggest(trial)
            self._reported = 0
            # As they are stored: the same numbers train again.
            return trial.number, dict(self._study.get_trials()[trial.number].params)

    def report(self, value: float) -> bool:
        """Add the value of an evaluation, and return whether to end the trial."""
        assert self._trial is not None
        with _optuna_errors(self._storage):
            self._reported += 1
            self._trial.report(value, self._reported)
            return bool(self._trial.should_prune())

    def tell(self, outcome: Outcome, values: Mapping[str, Any]) -> str:
        """End the trial, write the results, and return a line about it."""
        trial, states = self._trial, self._optuna.trial.TrialState
        assert trial is not None
        with _optuna_errors(self._storage):
            trial.set_user_attr("seconds", outcome.seconds)
            if outcome.problem:
                trial.set_user_attr("problem", outcome.problem)
            state = states[outcome.state]
            done = state is states.COMPLETE
            self._study.tell(trial.number, outcome.value if done else None, state)
        best = self._asked.options.best
        if outcome.value is not None:
            self._trackers.log({f"trial/{best}": outcome.value}, trial.number, outcome.seconds)
        self.write()
        ended = outcome.problem or f"{best} {outcome.value:.6g}{', pruned' * (not done)}"
        chosen = " ".join(f"{name}={value}" for name, value in values.items())
        return f"trial {trial.number}  {chosen}  {ended}  {outcome.seconds:.1f} s"

    def rows(self) -> list[dict[str, Any]]:
        """Return what is known of each trial, the best one first."""
        with _optuna_errors(self._storage):
            trials = self._study.get_trials()
        rows = [
            {
                "number": trial.number,
                "state": trial.state.name.lower(),
                "value": trial.value,
                "values": trial.params,
                **({"problem": "its ranks were lost"} if trial.state.name == "FAIL" else {}),
                **{n: v for n, v in trial.user_attrs.items() if n != "start"},
                "directory": _folder(trial.number),
            }
            for trial in trials
        ]
        sign = -1 if self._study.direction.name == "MAXIMIZE" else 1
        complete = [row for row in rows if row["state"] == "complete"]
        complete.sort(key=lambda row: sign * row["value"])
        return [*complete, *(row for row in rows if row["state"] != "complete")]

    def write(self) -> dict[str, Any]:
        """Write and return the results so far."""
        rows, options = self.rows(), self._asked.options
        best = rows[0] if rows and rows[0]["state"] == "complete" else None
        content = {
            "recipe": options.recipe,
            "by": options.best,
            "best": best,
            "command": best and masked(command_line(with_values(options, best["values"]))),
            "trials": rows,
        }
        with usage_errors(self._directory), replacing(self._directory / RESULTS) as file:
            file.write((json_text(content, indent=2) + "\n").encode())
        return content

    def end(self, status: Status) -> None:
        """End the tracker, unless it has been ended."""
        self._trackers.end(status)
        os.environ.pop(_PARENT, None)

    def lose_trials(self) -> bool:
        """Record trials of this start whose ranks are gone; return whether there are enough."""
        with _optuna_errors(self._storage):
            enough, _ = self._counts()
            for trial in self._running():
                self._study.tell(trial.number, state=self._optuna.trial.TrialState.FAIL)
            return enough

    def close(self, finished: bool) -> list[str]:
        """End the tracker, and return the last lines."""
        content = self.write()
        self._trackers.artifact(self._directory / RESULTS)
        self.end("finished" if finished else "stopped")
        rows = [row for row in content["trials"] if row["state"] == "complete"][:_SHOWN]
        if finished and not rows:
            problem = next((row["problem"] for row in content["trials"] if "problem" in row), "")
            raise TrainingError(f"no trial has ended well: {problem}")
        lines = [f"the best by {content['by']}:"] if rows else []
        lines += [
            f"  {row['value']:<12.6g} trial {row['number']:<4} "
            + " ".join(f"{name}={value}" for name, value in row["values"].items())
            for row in rows
        ]
        if rows:
            lines.append(f"the best again, on as many ranks: {content['command']}")
        lines.append(f"results in {self._directory}: {RESULTS}")
        lines.append(f"for a page: python -m hvdtrain report {self._directory}/trial-*")
        return lines


RESULTS, STUDY = "sweep.json", "study.journal"
_PARENT = "MLFLOW_RUN_ID"
_INTERRUPTED = "interrupted"
_SHOWN = 5


def _folder(number: int) -> str:
    return f"trial-{number}"


class _Reports(Callback):
    """Tells the study what evaluations give, and stops the trial on all ranks if it says so."""

    def __init__(self, study: _Study | None, name: str) -> None:
        self._study, self._name = study, name

    def on_test_end(self, state: CallbackState) -> None:
        if self._study is not None:
            value: Any = state.test[self._name]
            self.stop = self._study.report(float(value))


@dataclass(frozen=True)
class Outcome:
    """How a trial has ended."""

    state: str
    seconds: float
    value: float | None = None
    problem: str = ""


@dataclass(frozen=True)
class Sweep:
    """A sweep that is asked for."""

    options: TrainOptions  # of all trials; `out` is the directory of the sweep
    search: Sequence[Parameter]
    trials: int  # to end, those before a resume included
    storage: str | None = None  # address of Optuna's storage; None: a file in the directory
    prune: bool = True  # end trials early whose evaluations are worse than the median
    ranks_per_trial: int | None = None  # several trials train at once; None: each on all ranks
    start: str = ""  # the same for jobs that `run` has started at once to train these trials

    def __post_init__(self) -> None:
        for one in OPTIONS:
            value = getattr(self.options, one.name)
            if one.name in _NOT_OF_TRIALS and one.name != "virtual_shards" and value != one.default:
                raise UsageError(f"{one.given(value)} does not go with a sweep: leave it out")
        names = [one.name for one in self.search]
        if not names or len(set(names)) < len(names):
            raise UsageError("a sweep needs --search NAME=..., once for each name")


def prepare_sweep(asked: Sweep) -> Sweep:
    """Return a sweep that jobs can train at once, with its directory (before there are ranks)."""
    _import_optuna()
    if "mlflow" in tracker_names(asked.options.track):
        raise UsageError("--ranks-per-trial does not go with --track mlflow: leave one of them out")
    directory = _directory(asked.options)
    options = replace(asked.options, out=directory)
    return replace(asked, options=options, start=secrets.token_hex(4))


def close_sweep(asked: Sweep, codes: Sequence[int]) -> int:
    """Print the results of a sweep whose jobs have ended, and return the exit code (no rank)."""
    failed, directory = max(codes), asked.options.out
    assert directory is not None
    if failed and not (directory / RESULTS).exists():
        return failed
    study = _Study(asked, directory, None)
    enough = study.lose_trials()
    _print(asked.options, 0, *study.close(enough))
    return 0 if enough else failed


def _directory(options: TrainOptions) -> Path:
    directory = options.out or new_directory(RUNS, f"sweep-{options.recipe_title}")
    prepare_directory(directory)
    return directory


@collective
def run_sweep(asked: Sweep) -> bool:
    """Train trials until there are enough, or a signal stops them; return whether there are."""
    options, opened = asked.options, list[_Study]()
    rank, maximizes = join_world(options).topology.rank, _maximizes(asked)

    def open_study() -> Path:
        directory = _directory(options)
        opened.append(_Study(asked, directory, maximizes))
        return directory

    directory = call_on_root(open_study)
    study: Any = opened[0] if opened else None  # on rank 0, which alone is asked below
    enough, interrupted = False, False
    try:
        with StopSignals() as signals:
            while not (interrupted or vote([signals.asked], "stop").any()):
                proposed = call_on_root(lambda: study.ask())
                enough = proposed is None
                if enough:
                    break
                number, values = proposed
                outcome = _train(options, values, directory / _folder(number), study, signals)
                interrupted = outcome.problem == _INTERRUPTED
                _print(options, rank, call_on_root(partial(_Study.tell, study, outcome, values)))
            if not asked.start:
                _print(options, rank, *call_on_root(lambda: study.close(enough)))
    finally:
        if study is not None:
            study.end("failed")
    if signals.interrupted and not enough:
        raise KeyboardInterrupt
    return enough


def _print(options: TrainOptions, rank: int, *lines: str) -> None:
    for line in lines if rank == 0 and not options.quiet else ():
        print(line, flush=True)


@collective
def _maximizes(asked: Sweep) -> bool:
    """Return whether more is better of what decides."""
    name = asked.options.best
    if name == "loss":
        return False
    some = with_values(asked.options, {one.name: one.choices[0] for one in asked.search})
    setup = set_up(replace(some, out=None), None, NothingToResume(some))
    return improved(1.0, 0.0, name, setup.loop.test_metrics)


@collective
def _train(
    options: TrainOptions,
    values: Mapping[str, Any],
    directory: Path,
    study: _Study | None,
    signals: StopSignals,
) -> Outcome:
    began, value, problem, state = time.perf_counter(), None, "", "FAIL"
    try:
        options = with_values(options, values)
        reports = _Reports(study, options.best)
        quiet = not options.verbose
        asked = replace(options, out=directory, quiet=quiet, run_name=None)
        summary = train(asked, None, [reports], signals)
        if summary is None:
            problem = _INTERRUPTED
        elif summary.best is None:
            raise UsageError(
                f"{options.recipe} has no evaluation with a finite {options.best} to compare by"
            )
        else:
            value = float(summary.best["value"])
            state = "PRUNED" if reports.stop and summary.ended != "epochs" else "COMPLETE"
    except (RecipeError, TrainingError, UsageError) as error:  # which all ranks have
        if isinstance(error, OneRankError | TooFewRanksError):
            raise
        problem = str(error)
    return Outcome(state, time.perf_counter() - began, value, problem)
