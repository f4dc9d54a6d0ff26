"""What a training run leaves behind, read as other programs would read it."""

import json
from pathlib import Path
from typing import Any

SUMMARY_FIELDS = [
    *("world_size", "hosts", "host_names", "engine", "framework", "exchange", "global_batch_size"),
    *("base_lr", "scaled_lr", "epochs", "final", "samples", "samples_per_second", "seconds"),
    *("weights_sha256", "steps", "best", "ended", "parameter_server", "failures", "joins"),
]


def summary_of(directory: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((directory / "summary.json").read_text())
    return summary


def metrics_of(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def epochs_of(directory: Path) -> list[tuple[int, str]]:
    return [(line["epoch"], line["split"]) for line in metrics_of(directory)]


def both_splits(epochs: int) -> list[tuple[int, str]]:
    return [(epoch, split) for epoch in range(1, epochs + 1) for split in ("train", "test")]


def require_each_sample_once(directory: Path) -> None:
    """Check that two ranks have used each of the digits once in each of two epochs."""
    lines = [
        json.loads(line)
        for rank in range(2)
        for line in (directory / f"samples-{rank}.jsonl").read_text().splitlines()
    ]
    for epoch in range(2):
        used = [sample for of, samples in lines if of == epoch for sample in samples]
        assert sorted(used) == list(range(1437))
