"""Checkpoints: whole, the newest good one, of this model, and never silently none."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from refusing import refused
from safetensors.torch import save_file
from torch import nn

from hvdtrain.errors import UsageError
from hvdtrain.train.checkpoints import (
    Saver,
    best_file,
    load_checkpoint,
    mark_best,
    write_checkpoint,
)
from hvdtrain.train.metrics import Totals
from hvdtrain.train.options import TrainOptions
from hvdtrain.train.resume import (
    BestEvaluation,
    Progress,
    RunState,
    StateLoader,
    checkpoint_content,
)
from hvdtrain.train.run import weights_digest
from hvdtrain.train.torch.state import TorchTrainingState

Trainee = tuple[nn.Module, torch.optim.Optimizer]


def trainee(width: int = 3, bias: bool = True, seed: int = 0) -> Trainee:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(2, width, bias=bias), nn.Linear(width, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return model, optimizer


def weights_of(model: nn.Module) -> str:
    return weights_digest(TorchTrainingState(model, torch.optim.SGD(model.parameters())).weights())


def options(out: Path | None, resume: str | Path = "never", **more: Any) -> TrainOptions:
    return TrainOptions(out=out, resume=str(resume), **{"optimizer": "adam", **more})


def save(directory: Path, epoch: int, trained: Trainee, **more: Any) -> Path:
    directory.mkdir(exist_ok=True)
    times = {"total_seconds": 2.0 * epoch, "communicate_seconds": 0.5 * epoch}
    progress = Progress(epoch, step=10 * epoch, samples=100 * epoch, **{**times, **more})
    about = checkpoint_content(progress, options(directory), 100)
    with Saver(directory, keep=3) as saver:
        saver.save(epoch, progress.done, TorchTrainingState(*trained), about)
    assert saver.newest is not None
    return saver.newest


def start(asked: TrainOptions, trained: Trainee) -> RunState:
    loader = StateLoader(asked)
    loader.find("pt")
    return loader.begin_run(100, TorchTrainingState(*trained))


def resume(directory: Path, what: str | Path = "auto", **more: Any) -> tuple[RunState, Trainee]:
    fresh = trainee(seed=99)
    return start(options(directory, what, **more), fresh), fresh


def renamed(content: dict[str, Any], directory: Path, name: str) -> Path:
    return write_checkpoint(directory, 1, 0, content, "pt").rename(directory / name)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def test_a_best_that_a_killed_run_had_not_marked_is_marked(tmp_path: Path) -> None:
    best_before = mark_best(save(tmp_path, 1, trainee(), best=BestEvaluation("loss", 0.5, 1, 10)))
    path = save(tmp_path, 2, trainee(), best=BestEvaluation("loss", 0.4, 2, 20))
    resume(tmp_path)
    assert best_file(tmp_path) == path.with_name(path.name.replace("checkpoint", "best"))
    assert not best_before.exists()


def test_what_is_no_better_is_not_marked(tmp_path: Path) -> None:
    best = mark_best(save(tmp_path, 1, trainee(), best=BestEvaluation("loss", 0.5, 1, 10)))
    save(tmp_path, 2, trainee(), best=BestEvaluation("loss", 0.5, 1, 10, since=1))
    resume(tmp_path)
    assert best_file(tmp_path) == best


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(tmp_path: Path) -> None:
    model, optimizer = trainee()
    save(tmp_path, 1, (model, optimizer))
    cut(bad := save(tmp_path, 2, trainee(seed=1)))
    loader = StateLoader(options(tmp_path, "auto"))
    loader.find("pt")
    (warning,) = loader.found.bad
    assert f"{bad} is damaged" in warning
    begun, (restored, adam) = resume(tmp_path)
    assert begun.progress == Progress(1, 0, 10, 100, 2.0, 0.5)
    assert weights_of(restored) == weights_of(model)
    torch.testing.assert_close(adam.state_dict(), optimizer.state_dict(), rtol=0, atol=0)
    with pytest.raises(UsageError, match=bad.name):
        resume(tmp_path, bad)


def test_only_damaged_checkpoints_are_never_a_start_from_zero(tmp_path: Path) -> None:
    paths = [save(tmp_path, epoch, trainee(seed=epoch)) for epoch in (1, 2)]
    for path in paths:
        cut(path)
    with refused(*(path.name for path in paths)):
        resume(tmp_path)


@pytest.mark.parametrize(
    "more",
    [{"dtype": "float64"}, {"optimizer": "sgd"}, {"optimizer": "adamw"}, {"weight_decay": 0.1}],
)
def test_other_settings_are_named(tmp_path: Path, more: dict[str, Any]) -> None:
    path = save(tmp_path, 1, trainee())
    ((name, value),) = more.items()
    with pytest.raises(UsageError, match=f"was made with {name} .*, not {value}"):
        resume(tmp_path, path, **more)


def test_a_checkpoint_of_the_removed_framework_tensorflow_goes_on_with_keras(
    tmp_path: Path,
) -> None:
    path = save(tmp_path, 1, trainee())
    content = load_checkpoint(path, "pt")
    content["settings"]["framework"] = "tensorflow"
    old = tmp_path / "old"
    old.mkdir()
    path = renamed(content, old, "old.safetensors")
    assert resume(old, path, framework="keras")[0].progress.epoch == 1
    with pytest.raises(UsageError, match="was made with framework tensorflow, not torch"):
        resume(old, path)


def test_files_of_others_are_no_checkpoints(tmp_path: Path) -> None:
    path = tmp_path / "foreign.safetensors"
    save_file({"weight": torch.ones(2)}, path)
    with pytest.raises(UsageError, match=r"foreign\.safetensors is not a checkpoint"):
        resume(tmp_path / "out", path)


@pytest.mark.parametrize("missing", ["settings", "optimizer", "extras", "step", "part", "best"])
def test_what_a_checkpoint_lacks_is_named(tmp_path: Path, missing: str) -> None:
    content = load_checkpoint(save(tmp_path, 1, trainee()), "pt")
    del content[missing]
    path = renamed(content, tmp_path, "partial.safetensors")
    with pytest.raises(UsageError, match=f"partial.safetensors lacks .*{missing}"):
        resume(tmp_path / "out", path)


def without_betas(content: dict[str, Any]) -> None:
    del content["optimizer"]["param_groups"][0]["betas"]


def with_text_as_lr(content: dict[str, Any]) -> None:
    content["optimizer"]["param_groups"][0]["lr"] = "fast"


def with_small_state(content: dict[str, Any]) -> None:
    content["optimizer"]["state"][0]["exp_avg"] = torch.ones(7)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda content: content.update(model=5), "is not a checkpoint"),
        (lambda content: content["model"].update({"0.weight": 5}), "it has no 0.weight"),
        (lambda content: content.update(epoch="x"), "epoch is 'x'"),
        (lambda content: content.update(samples=True), "samples is True"),
        (lambda content: content.update(total_seconds=float("nan")), "total_seconds is nan"),
        (lambda content: content["part"].update(loss="much"), "loss is 'much'"),
        (lambda content: content.update(best={"value": 1.0}), "lacks"),
        (lambda content: content.update(optimizer=5), "lacks"),
        (without_betas, "no proper betas"),
        (with_text_as_lr, "no proper lr"),
        (with_small_state, r"exp_avg has shape \(7,\)"),
    ],
)
def test_a_checkpoint_of_the_wrong_form_is_named(tmp_path: Path, spoil: Any, words: str) -> None:
    content = load_checkpoint(save(tmp_path, 1, trainee()), "pt")
    spoil(content)
    path = renamed(content, tmp_path, "spoilt.safetensors")
    with pytest.raises(UsageError, match=rf"spoilt\.safetensors .*{words}"):
        resume(tmp_path / "out", path)


def test_within_an_epoch_order_and_end_must_be_the_same(tmp_path: Path) -> None:
    counts = np.array([[2.0, 1.0], [0.0, 27.0]])
    part = Totals(30, 1.25, {"confusion": counts})
    best = BestEvaluation("loss", 0.5, 4.5, 47, since=1)
    save(tmp_path, 5, trainee(), done=30, part=part, best=best)
    with pytest.raises(UsageError, match="5 epochs and 30 samples, more than --epochs 5"):
        resume(tmp_path, epochs=5)
    with pytest.raises(UsageError, match="was made with seed 0, not 9"):
        resume(tmp_path, seed=9)
    progress = resume(tmp_path)[0].progress
    assert (progress.done, progress.best) == (30, best)
    assert (progress.part.samples, progress.part.loss) == (30, 1.25)
    assert (progress.part.counts["confusion"] == counts).all()


def test_a_run_of_nearly_that_name_is_named(tmp_path: Path) -> None:
    save(tmp_path / "digits-7", 1, trainee())
    for name, hint in (("digits_7", f" (did you mean {tmp_path}/digits-7?)"), ("mnist", "")):
        begun = resume(tmp_path / name)[0]
        none = f"no checkpoint in {tmp_path}/{name}: starting with epoch 1"
        assert begun.origin == none + hint


def test_results_of_another_run_are_kept(tmp_path: Path) -> None:
    save(tmp_path, 1, trainee())
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    other = save(elsewhere, 1, trainee())
    with pytest.raises(UsageError, match="another run"):
        resume(tmp_path, other)
    with pytest.raises(UsageError, match="--resume auto"):
        start(options(tmp_path), trainee())


@pytest.mark.parametrize("name", ["metrics.jsonl", "summary.json"])
def test_results_without_a_checkpoint_are_kept_too(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("")
    with pytest.raises(UsageError, match="another run"):
        start(options(tmp_path), trainee())


def test_going_back_before_a_later_checkpoint_is_refused(tmp_path: Path) -> None:
    earlier, later = (save(tmp_path, epoch, trainee()) for epoch in (1, 2))
    with pytest.raises(UsageError, match=later.name):
        resume(tmp_path, earlier)
    assert resume(tmp_path, later)[0].progress.epoch == 2


def test_default_directory_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = [start(options(None), trainee()).directory for _ in range(2)]
    assert made[0] != made[1]
    assert all(path.is_dir() and path.parent == Path("runs") for path in made)


def test_digest_sees_names_types_shapes_bytes_and_buffers() -> None:
    moved = nn.BatchNorm1d(2)
    assert moved.running_mean is not None
    moved.running_mean[0] = 1e-30
    models = [
        nn.Linear(2, 2), nn.Linear(2, 2).double(), nn.Sequential(nn.Linear(2, 2)),
        nn.BatchNorm1d(2), moved, nn.Linear(4, 1),
    ]  # fmt: skip
    with torch.no_grad():
        for model in models:
            for parameter in model.parameters():
                parameter.fill_(0.5)
    digests = [weights_of(model) for model in models]
    for one, other in itertools.combinations(digests, 2):
        assert one != other
    assert digests[0] == weights_of(models[0])
