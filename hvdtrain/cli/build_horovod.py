"""`hvdtrain build-horovod`: build and install Horovod for the installed frameworks."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from hvdtrain.errors import UsageError
from hvdtrain.horovod.build.plan import HOROVOD_VERSION, make_plan
from hvdtrain.horovod.build.workshop import BuildFailedError, build_and_install
from hvdtrain.world import promised_world


@click.command()
@click.option("--force", is_flag=True, help="Build even where the cache has a wheel.")
@click.option("--wheel-only", is_flag=True, help="Do not install; print the path of the wheel.")
@click.option("--without-torch", is_flag=True, help="Leave horovod.torch out.")
@click.option("--without-tensorflow", is_flag=True, help="Leave horovod.tensorflow out.")
def command(force: bool, wheel_only: bool, without_torch: bool, without_tensorflow: bool) -> None:
    """Build Horovod for the installed torch and TensorFlow, install it and try it.

    The wheel is kept in ~/.cache/hvdtrain (or XDG_CACHE_HOME) and taken from there next time.
    """
    promised = promised_world(os.environ)
    if promised is not None and promised.size > 1:
        raise UsageError(f"'build-horovod' is for one process: call it without {promised.launcher}")
    left_out = {"torch": without_torch, "tensorflow": without_tensorflow}
    plan = make_plan(os.environ, [name for name in left_out if left_out[name]], force)
    frameworks = " and ".join(" ".join(pair) for pair in plan.target.frameworks.items())
    click.echo(f"Horovod {HOROVOD_VERSION} for {frameworks}, {plan.mpi}")
    if isinstance(plan.source, Path):
        click.echo(f"its wheel is in the cache: {plan.source}")
    try:
        if wheel_only and isinstance(plan.source, Path):
            wheel = plan.source
        else:
            wheel = build_and_install(plan, wheel_only)
    except BuildFailedError as error:
        click.echo(f"hvdtrain: {error}", err=True)
        sys.exit(error.exit_code)
    if wheel_only:
        click.echo(wheel)
        return
    click.echo(
        "CVE-2024-10190 and CVE-2026-31234 are open in horovodrun, horovod.run and Horovod's "
        "elastic jobs: start ranks with mpirun or hvdtrain"
    )
    click.echo(f"Horovod {HOROVOD_VERSION} is installed: set HVDTRAIN_ENGINE=horovod to use it")
