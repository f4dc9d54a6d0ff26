"""The sections of `hvdtrain check`, in the order in which they are reported."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from functools import partial

from hvdtrain import __version__
from hvdtrain.check.machine import check_cores, check_memory
from hvdtrain.check.mpi import check_engines, check_mpi, check_trial
from hvdtrain.check.packages import check_compiler, check_frameworks, check_gpus, check_packages
from hvdtrain.check.probe import Section, guarded
from hvdtrain.config import Config
from hvdtrain.errors import UsageError


def all_sections(engines: Sequence[str]) -> Iterator[Section]:
    """Run all checks, and yield each section as soon as it is known."""
    yield guarded("python", check_python)
    yield guarded("packages", check_packages)
    settings = guarded("settings", partial(check_settings, engines))
    yield settings
    mpi = guarded("MPI", check_mpi)
    yield mpi
    ready = guarded("engines", partial(check_engines, engines, bool(mpi.problems)))
    yield ready
    frameworks = guarded("frameworks", check_frameworks)
    yield frameworks
    yield guarded("GPUs", partial(check_gpus, frameworks))
    yield guarded("cores", check_cores)
    yield guarded("memory", check_memory)
    yield guarded("compiler", check_compiler)
    yield guarded("trial", partial(check_trial, settings, mpi, ready))


def check_python() -> Section:
    """Report the interpreter and hvdtrain's version."""
    number = ".".join(map(str, sys.version_info[:3]))
    facts = {"hvdtrain": __version__, "version": number, "executable": sys.executable}
    return Section("python", facts, (f"{number} ({sys.executable})",))


def check_settings(engines: Sequence[str]) -> Section:
    """Report the HVDTRAIN_* variables."""
    given = {name: text for name, text in os.environ.items() if name.startswith("HVDTRAIN_")}
    lines = tuple(f"{name}={text}" for name, text in sorted(given.items())) or ("none",)
    try:
        engine = Config.from_environ(os.environ).engine
    except UsageError as error:
        return Section("settings", given, lines, (f"{error}: set another, or unset it",))
    problems = []
    if engine not in ("auto", *engines):
        problems.append(f"HVDTRAIN_ENGINE={engine}: set one of {', '.join(['auto', *engines])}")
    if engine == "local":
        problems.append("HVDTRAIN_ENGINE=local leaves every rank alone: unset it")
    return Section("settings", given, lines, tuple(problems))
