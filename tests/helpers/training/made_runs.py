"""Makes the directory of a run, with the files that `train` leaves, without training."""

import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

_CLASSES = 10


@dataclass(frozen=True)
class MadeRun:
    epochs: int = 6
    steps: int = 200
    log_every: int = 10
    ranks: int = 4
    slow_rank: int | None = 2
    lr: float = 0.1
    seed: int = 0
    not_finite_from: int | None = None
    options: tuple[tuple[str, str], ...] = ()
    joins: tuple[tuple[int, tuple[int, ...]], ...] = ()
    losses: tuple[tuple[int, tuple[int, ...]], ...] = ()


def make_run(directory: Path, run: MadeRun = MadeRun(), **changes: Any) -> Path:
    run = replace(run, **changes)
    directory.mkdir(parents=True)
    metrics = list(_metrics(run))
    for name, splits in (("metrics.jsonl", ("train", "test")), ("steps.jsonl", ("step",))):
        _write_lines(directory / name, (line for line in metrics if line["split"] in splits))
    _write_lines(directory / "ranks.jsonl", _ranks(run))
    (directory / "summary.json").write_text(json.dumps(_summary(run, metrics), indent=2) + "\n")
    (directory / "environment.json").write_text(json.dumps(_environment(run), indent=2) + "\n")
    options = {"recipe": "digits", "epochs": run.epochs, "batch_size": 32, "lr": run.lr}
    options |= {"optimizer": "sgd", "momentum": 0.9, "seed": run.seed, "set": {"width": 32}}
    options |= dict(run.options)
    # JSON is YAML.
    lines = [f"{json.dumps(key)}: {json.dumps(value)}\n" for key, value in options.items()]
    (directory / "config.yaml").write_text("".join(lines))
    return directory


def _metrics(run: MadeRun) -> Iterator[dict[str, Any]]:
    chance = random.Random(run.seed)
    for step in range(run.log_every, run.epochs * run.steps + 1, run.log_every):
        yield _line(run, chance, step, "step", 0.3)
        if step % run.steps == 0:
            yield _line(run, chance, step, "train", 0.03)
            test = _line(run, chance, step, "test", 0.06)
            right = round(36 * test["accuracy"])
            row = [right, 36 - right, *[0] * (_CLASSES - 2)]
            yield test | {"confusion": [row[-n:] + row[:-n] for n in range(_CLASSES)]}


def _line(
    run: MadeRun, chance: random.Random, step: int, split: str, noise: float
) -> dict[str, Any]:
    progress = step / (run.epochs * run.steps)
    loss = 2.3 * math.exp(-progress * 40 * run.lr) + 0.04 + (0.05 if split == "test" else 0)
    loss *= math.exp(chance.gauss(0, noise))
    finite = run.not_finite_from is None or step < run.not_finite_from
    rate = (2100 if split == "test" else 640) + chance.gauss(0, 20)
    return {
        "epoch": step / run.steps, "step": step, "split": split, "seconds": step * 0.05,
        "lr": run.lr * (1 + math.cos(math.pi * progress)) / 2,
        "samples_per_second": rate * run.ranks, "loss": loss if finite else None,
        "accuracy": 1 - 0.9 * loss / (loss + 1.2),
    }  # fmt: skip


def _ranks(run: MadeRun) -> Iterator[dict[str, Any]]:
    """Yield a line for about five seconds, in each of which 0.1 of the longest part is moved."""
    chance, total = random.Random(run.seed + 1), run.epochs * run.steps * 0.05
    count = max(1, round(total / 5))
    for place in range(1, count + 1):
        slow = [1.5 if rank == run.slow_rank else 1 for rank in range(run.ranks)]
        parts = [each * math.exp(chance.gauss(0, 0.03)) for each in slow]
        span = 0.97 * total / count  # all but what the evaluation took
        compute = [span / 1.1 / max(parts) * each for each in parts]
        yield {
            "step": run.epochs * run.steps * place // count, "seconds": total * place / count,
            "span": span, "compute": compute, "moving": [0.1 * max(compute)] * run.ranks,
            "waiting": [max(compute) - each for each in compute],
            "cpu_percent": [90 + chance.random() * 10 for _ in compute],
            "memory_bytes": [900_000_000 + 1_000_000 * place + rank for rank in range(run.ranks)],
            "gpu_memory_bytes": [None] * run.ranks,
            "sent_bytes": [40_000_000 for _ in compute],
        }  # fmt: skip


def _summary(run: MadeRun, metrics: list[dict[str, Any]]) -> dict[str, Any]:
    test: dict[str, Any] = next((line for line in reversed(metrics) if line["split"] == "test"), {})
    seconds = metrics[-1]["seconds"] if metrics else 0.0
    return {
        "world_size": run.ranks, "hosts": 2, "host_names": ["node01", "node02"], "engine": "mpi",
        "framework": "torch", "global_batch_size": 32 * run.ranks, "base_lr": run.lr,
        "scaled_lr": run.lr * run.ranks, "epochs": run.epochs, "steps": run.epochs * run.steps,
        "ended": "epochs", "final": {name: test.get(name) for name in ("loss", "accuracy")},
        "samples": run.epochs * run.steps * 32 * run.ranks,
        "samples_per_second": 32 * run.ranks / 0.05,
        "seconds": {"total": seconds, "compute": 0.7 * seconds, "communicate": 0.3 * seconds},
        "failures": [_loss(run, *at, left=at == run.losses[-1]) for at in run.losses],
        "joins": [_join(run, *at) for at in run.joins],
    }  # fmt: skip


def _loss(run: MadeRun, step: int, ranks: tuple[int, ...], left: bool) -> dict[str, Any]:
    lost = {"lost": list(ranks), "ranks": run.ranks - len(ranks), "seconds": 0.25, "left": left}
    return _change(run, step) | lost


def _join(run: MadeRun, step: int, ranks: tuple[int, ...]) -> dict[str, Any]:
    joined = {"joined": list(ranks), "ranks": run.ranks, "seconds": 0.75, "start_seconds": 2.5}
    return _change(run, step) | joined


def _change(run: MadeRun, step: int) -> dict[str, Any]:
    return {
        "step": step, "epoch": step / run.steps, "trained_seconds": step * 0.05,
        "global_batch_size": 32 * run.ranks, "scaled_lr": run.lr * run.ranks,
    }  # fmt: skip


def _environment(run: MadeRun) -> dict[str, Any]:
    return {
        "started_at": "2026-03-01T08:15:00+00:00",
        "command": f"python -m hvdtrain train digits --lr {run.lr} --seed {run.seed}",
        "hosts": [f"node{1 + 2 * rank // run.ranks:02}" for rank in range(run.ranks)],
        "versions": {"python": "3.11.2", "hvdtrain": "0.1.0", "torch": "2.13.0", "jax": None},
        "git": {"recipe": None, "working_directory": {"commit": f"{run.seed:040x}"}},
    }


def _write_lines(path: Path, lines: Any) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
