"""Weights & Biases: one run, resumed by its id; WANDB_MODE=offline writes it into the directory."""

from __future__ import annotations

import contextlib
import io
import secrets
from collections.abc import Mapping
from pathlib import Path

import wandb

from hvdtrain.errors import UsageError
from hvdtrain.train.tracking.tracker import RunInfo, Status, load_json, one_line, save_json

KEPT = "wandb.json"
_PROJECT = "hvdtrain"


class Wandb:
    """Tracker that passes values on to the process that wandb starts."""

    def __init__(self, info: RunInfo, project: str | None, run_name: str | None) -> None:
        path = info.directory / KEPT
        run_id = (load_json(path, "id") or {"id": secrets.token_hex(4)})["id"]
        try:
            _require_login()
            self._run = wandb.init(
                project=project or _PROJECT,
                name=run_name or info.name,
                id=run_id,
                resume="allow",
                dir=info.directory,
                config=dict(info.parameters),
                # The terminal belongs to the progress bar, and a resume may change options.
                settings=wandb.Settings(console="off", silent=True),
                allow_val_change=True,
            )
        except wandb.Error as error:
            raise UsageError(f"--track wandb: {one_line(error)}") from error
        # A resume goes back to steps that wandb would drop as too old.
        self._run.define_metric("*", step_metric="step")
        save_json(path, {"id": run_id})

    def log(self, values: Mapping[str, float], step: int, seconds: float) -> None:
        self._run.log({**values, "step": step, "seconds": seconds})

    def artifact(self, path: Path) -> None:
        """Upload a file; offline, link to it."""
        with contextlib.redirect_stderr(io.StringIO()):  # it says that it links
            self._run.save(path.absolute(), base_path=path.absolute().parent, policy="now")

    def end(self, status: Status) -> None:
        """Wait until everything is sent, as long as wandb does."""
        if status == "stopped":
            self._run.mark_preempting()
        self._run.finish(exit_code=0 if status == "finished" else 1)


def _require_login() -> None:
    mode = wandb.setup().settings.mode
    if mode == "online" and not wandb.login(prompt=False):
        raise UsageError(
            "--track wandb: nobody is logged in: run `wandb login`, set WANDB_API_KEY, or work "
            "without a network with WANDB_MODE=offline"
        )
