"""Checkpoints: whole, the newest good one, of this model, and never silently none."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hvdtrain.errors import UsageError
from hvdtrain.train.checkpoint import checkpoint_files, load_checkpoint
from hvdtrain.train.digest import weights_digest
from hvdtrain.train.frameworks.torch_state import TorchState
from hvdtrain.train.options import TrainOptions
from hvdtrain.train.progress import Progress, save_progress
from hvdtrain.train.results import Sums
from hvdtrain.train.start import Start, begin

Trainee = tuple[nn.Module, torch.optim.Optimizer]


def trainee(width: int = 3, bias: bool = True, seed: int = 0) -> Trainee:
    """Make a model and its optimizer, which has taken one step."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(2, width, bias=bias), nn.Linear(width, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return model, optimizer


def weights_of(model: nn.Module) -> str:
    return weights_digest(TorchState(model, torch.optim.SGD(model.parameters())).weights())


def options(out: Path | None, resume: str | Path = "never", **more: Any) -> TrainOptions:
    return TrainOptions(out=out, resume=str(resume), **{"optimizer": "adam", **more})


def save(directory: Path, epoch: int, trained: Trainee, part: Sums | None = None) -> Path:
    directory.mkdir(exist_ok=True)
    done = (10 * epoch, 100 * epoch, 2.0 * epoch, 0.5 * epoch)
    progress = Progress(epoch, *done, part or Sums())
    return save_progress(directory, progress, options(directory), TorchState(*trained))


def resume(directory: Path, what: str | Path = "auto", **more: Any) -> tuple[Start, Trainee]:
    fresh = trainee(seed=99)
    return begin(options(directory, what, **more), TorchState(*fresh)), fresh


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    model, optimizer = trainee()
    path = save(tmp_path, 3, (model, optimizer))
    start, (restored, adam) = resume(tmp_path)
    assert start.progress == Progress(3, 30, 300, 6.0, 1.5)
    assert str(path) in start.origin
    assert weights_of(restored) == weights_of(model)
    for own, other in zip(
        adam.state_dict()["state"].values(),
        optimizer.state_dict()["state"].values(),
        strict=True,
    ):
        assert all(torch.equal(own[key], other[key]) for key in other)


def test_checkpoint_opens_with_plain_torch(tmp_path: Path) -> None:
    content = torch.load(save(tmp_path, 1, trainee()), weights_only=True)
    assert content["epoch"] == 1
    assert "0.weight" in content["model"]


def test_one_checkpoint_per_epoch(tmp_path: Path) -> None:
    save(tmp_path, 1, trainee(seed=1))
    newer = save(tmp_path, 1, trainee(seed=2))
    assert checkpoint_files(tmp_path) == [newer]
    assert sorted(tmp_path.iterdir()) == [newer]


def test_epochs_are_ordered_as_numbers(tmp_path: Path) -> None:
    saved = [save(tmp_path, epoch, trainee()) for epoch in (9999, 10000, 3)]
    assert checkpoint_files(tmp_path) == [saved[1], saved[0], saved[2]]


@pytest.mark.parametrize("damage", [cut, flip, lambda path: path.write_bytes(b"")])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(
    tmp_path: Path, damage: Any
) -> None:
    save(tmp_path, 1, trainee())
    bad = save(tmp_path, 2, trainee(seed=1))
    damage(bad)
    start, _ = resume(tmp_path)
    assert start.progress.epoch == 1
    (warning,) = start.warnings
    assert str(bad) in warning
    assert "damaged" in warning
    with pytest.raises(UsageError, match=bad.name):
        resume(tmp_path, bad)


def test_every_flipped_byte_is_noticed(tmp_path: Path) -> None:
    path = save(tmp_path, 1, trainee())
    whole = path.read_bytes()
    for position in range(0, len(whole), 97):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 4]) + whole[position + 1 :])
        with pytest.raises(UsageError, match="damaged"):
            load_checkpoint(path)


def test_only_damaged_checkpoints_are_never_a_start_from_zero(tmp_path: Path) -> None:
    paths = [save(tmp_path, epoch, trainee(seed=epoch)) for epoch in (1, 2)]
    for path in paths:
        cut(path)
    with pytest.raises(UsageError) as refusal:
        resume(tmp_path)
    assert all(path.name in str(refusal.value) for path in paths)


def test_no_checkpoint_at_all_starts_from_zero_and_says_so(tmp_path: Path) -> None:
    start, _ = resume(tmp_path / "new")
    assert start.progress == Progress()
    assert "no checkpoint" in start.origin


@pytest.mark.parametrize("name", ["renamed.pt", "model.ckpt"])
def test_a_renamed_checkpoint_is_proved_by_its_structure(tmp_path: Path, name: str) -> None:
    path = save(tmp_path, 1, trainee()).rename(tmp_path / name)
    start, _ = resume(tmp_path / "other", path)
    assert start.progress.epoch == 1
    cut(path)
    with pytest.raises(UsageError, match=name):
        resume(tmp_path / "another", path)


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (trainee(width=4), r"0\.weight has shape \(4, 2\), and \(3, 2\) here"),
        (trainee(bias=False), r"no 0\.bias"),
        ((nn.Linear(2, 3), trainee()[1]), r"no 0\.weight"),
    ],
)
def test_another_model_is_named(tmp_path: Path, other: Trainee, difference: str) -> None:
    path = save(tmp_path, 1, other)
    with pytest.raises(UsageError, match=f"another model.*{difference}") as refusal:
        resume(tmp_path, path)
    assert str(path) in str(refusal.value)
    with pytest.raises(UsageError, match="another model"):
        resume(tmp_path, "auto")


def test_a_model_with_more_is_another_model(tmp_path: Path) -> None:
    model, optimizer = trainee()
    longer = nn.Sequential(*model.children(), nn.Linear(1, 1))
    path = save(tmp_path, 1, (longer, optimizer))
    with pytest.raises(UsageError, match=r"another model.*2\.weight"):
        resume(tmp_path, path)


@pytest.mark.parametrize("more", [{"dtype": "float64"}, {"optimizer": "sgd"}])
def test_other_settings_are_named(tmp_path: Path, more: dict[str, str]) -> None:
    path = save(tmp_path, 1, trainee())
    ((name, value),) = more.items()
    with pytest.raises(UsageError, match=f"was made with {name} .*, not {value}"):
        resume(tmp_path, path, **more)


@pytest.mark.parametrize("content", [{}, [1, 2], {"weight": torch.ones(2)}])
def test_files_of_others_are_no_checkpoints(tmp_path: Path, content: Any) -> None:
    path = tmp_path / "foreign.pt"
    torch.save(content, path)
    with pytest.raises(UsageError, match=r"foreign\.pt is not a checkpoint"):
        resume(tmp_path / "out", path)


@pytest.mark.parametrize("missing", ["settings", "optimizer", "step"])
def test_what_a_checkpoint_lacks_is_named(tmp_path: Path, missing: str) -> None:
    content = load_checkpoint(save(tmp_path, 1, trainee()))
    del content[missing]
    path = tmp_path / "partial.pt"
    torch.save(content, path)
    with pytest.raises(UsageError, match=f"partial.pt lacks .*{missing}"):
        resume(tmp_path / "out", path)


def without_betas(content: dict[str, Any]) -> None:
    del content["optimizer"]["param_groups"][0]["betas"]


def with_text_as_lr(content: dict[str, Any]) -> None:
    content["optimizer"]["param_groups"][0]["lr"] = "fast"


def with_small_state(content: dict[str, Any]) -> None:
    content["optimizer"]["state"][0]["exp_avg"] = torch.ones(7)


def with_no_state(content: dict[str, Any]) -> None:
    content["optimizer"]["state"] = [5]


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda content: content.update(model=5), "is not a checkpoint"),
        (lambda content: content["model"].update({"0.weight": 5}), "is not a checkpoint"),
        (lambda content: content.update(epoch="x"), "epoch is 'x'"),
        (lambda content: content.update(epoch=-3), "epoch is -3"),
        (lambda content: content.update(epoch=1.5), "epoch is 1.5"),
        (lambda content: content.update(samples=True), "samples is True"),
        (lambda content: content.update(total_seconds=float("nan")), "total_seconds is nan"),
        (lambda content: content.update(settings=5), "lacks"),
        (lambda content: content.update(optimizer=5), "lacks"),
        (without_betas, "no proper betas"),
        (with_text_as_lr, "no proper lr"),
        (with_small_state, r"exp_avg has shape \(7,\)"),
        (with_no_state, "lacks"),
    ],
)
def test_a_checkpoint_of_the_wrong_form_is_named(tmp_path: Path, spoil: Any, words: str) -> None:
    content = load_checkpoint(save(tmp_path, 1, trainee()))
    spoil(content)
    path = tmp_path / "spoilt.pt"
    torch.save(content, path)
    with pytest.raises(UsageError, match=rf"spoilt\.pt .*{words}"):
        resume(tmp_path / "out", path)


def test_paths_that_cannot_be_looked_at(tmp_path: Path) -> None:
    endless = tmp_path / ("x" * 300)
    with pytest.raises(UsageError, match=r"x{300} cannot be used .*--out"):
        begin(options(endless), TorchState(*trainee()))
    with pytest.raises(UsageError, match=r"x{300} cannot be used .*--out"):
        resume(endless)
    with pytest.raises(UsageError, match=r"x{300} cannot be read .*--resume"):
        resume(tmp_path / "out", endless)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may look everywhere")
@pytest.mark.parametrize("mode", [0o000, 0o600, 0o300])
def test_a_directory_that_may_not_be_looked_into(tmp_path: Path, mode: int) -> None:
    path = save(tmp_path / "run", 1, trainee())
    path.parent.chmod(mode)
    try:
        for what in ("never", "auto"):
            with pytest.raises(UsageError, match=r"run.* cannot be .*--out"):
                resume(path.parent, what)
    finally:
        path.parent.chmod(0o700)


@pytest.mark.parametrize("what", ["absent.pt", "."])
def test_a_path_that_is_no_file(tmp_path: Path, what: str) -> None:
    with pytest.raises(UsageError, match="no checkpoint"):
        resume(tmp_path, tmp_path / what)


def test_fewer_epochs_than_done(tmp_path: Path) -> None:
    save(tmp_path, 5, trainee())
    with pytest.raises(UsageError, match="5 epochs, more than --epochs 4"):
        resume(tmp_path, epochs=4)


def test_within_an_epoch_order_and_end_must_be_the_same(tmp_path: Path) -> None:
    save(tmp_path, 5, trainee(), part=Sums(1.0, 2, 30))
    with pytest.raises(UsageError, match="5 epochs and 30 samples, more than --epochs 5"):
        resume(tmp_path, epochs=5)
    with pytest.raises(UsageError, match="was made with seed 0, not 9"):
        resume(tmp_path, seed=9)
    start, _ = resume(tmp_path)
    assert start.progress.part == Sums(1.0, 2, 30)


def test_a_checkpoint_of_before_there_were_parts(tmp_path: Path) -> None:
    content = load_checkpoint(save(tmp_path, 1, trainee()))
    del content["part"], content["settings"]["seed"]
    torch.save(content, tmp_path / "old.pt")
    start, _ = resume(tmp_path / "out", tmp_path / "old.pt", seed=9)
    assert (start.progress.epoch, start.progress.part) == (1, Sums())


def test_results_of_another_run_are_kept(tmp_path: Path) -> None:
    save(tmp_path, 1, trainee())
    with pytest.raises(UsageError, match="--resume auto"):
        begin(options(tmp_path), TorchState(*trainee()))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    other = save(elsewhere, 1, trainee())
    with pytest.raises(UsageError, match="another run"):
        resume(tmp_path, other)


@pytest.mark.parametrize("name", ["metrics.jsonl", "summary.json"])
def test_results_without_a_checkpoint_are_kept_too(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("")
    with pytest.raises(UsageError, match="another run"):
        begin(options(tmp_path), TorchState(*trainee()))


def test_going_back_before_a_later_checkpoint_is_refused(tmp_path: Path) -> None:
    earlier, later = (save(tmp_path, epoch, trainee()) for epoch in (1, 2))
    with pytest.raises(UsageError, match=later.name):
        resume(tmp_path, earlier)
    start, _ = resume(tmp_path, later)
    assert start.progress.epoch == 2


def test_default_directory_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = [begin(options(None), TorchState(*trainee())).directory for _ in range(2)]
    assert made[0] != made[1]
    assert all(path.is_dir() and path.parent == Path("runs") for path in made)


def test_digest_sees_names_types_shapes_bytes_and_buffers() -> None:
    moved = nn.BatchNorm1d(2)
    assert moved.running_mean is not None
    moved.running_mean[0] = 1e-30
    models = [
        nn.Linear(2, 2),
        nn.Linear(2, 2).double(),
        nn.Sequential(nn.Linear(2, 2)),
        nn.BatchNorm1d(2),
        moved,
        nn.Linear(4, 1),
    ]
    with torch.no_grad():
        for model in models:
            for parameter in model.parameters():
                parameter.fill_(0.5)
    digests = [weights_of(model) for model in models]
    for one, other in itertools.combinations(digests, 2):
        assert one != other
    assert digests[0] == weights_of(models[0])
