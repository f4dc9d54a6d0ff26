"""`evaluate` and `predict`: any number of ranks uses what was trained, with the same numbers."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from job import Completed
from outcomes import outcomes
from paths import TRAINING
from point_recipes import points, recipe
from run_files import summary_of
from safetensors.torch import load_file

from hvdtrain.train.checkpoints import best_file, checkpoint_files

RECIPES = TRAINING / "point_recipes.py"


def outputs_of(results: Sequence[Completed]) -> list[str]:
    for result in results:
        assert result.returncode == 0, result
    return [result.stdout for result in results]


def refusals_of(results: Sequence[Completed]) -> list[str]:
    for result in results:
        assert result.returncode == 2, result
        assert result.stderr.startswith("hvdtrain: ")
        assert result.stderr.count("\n") == 1
    return [result.stderr for result in results]


@dataclass(frozen=True)
class Trained:
    directory: Path
    asked: list[list[object]]
    told: list[str]
    refused: str


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("trained")
    shutil.copy(RECIPES, folder / "my_points.py")
    np.save(folder / "a.npy", points(5, 8).inputs)
    np.save(folder / "b.npy", points(400, 9).inputs)
    first = ["train", "my_points.py", "--set", "width=9", "--ema", 0.9, "--lr", 0.01]
    first += ["--best", "size", "--quiet"]
    train: list[list[object]] = [
        [*first, "--epochs", 2, "--out", "run"],
        ["train", "--config", "run/config.yaml", "--out", "again"],
        [*first, "--epochs", 2, "--compile", "aot_eager", "--out", "compiled"],
        ["train", "my_points.py:stream", "--quiet", "--epochs", 2, "--out", "stream"],
    ]
    asked: list[list[object]] = [
        ["evaluate", "run"],
        ["evaluate", "run", "--checkpoint", "newest"],
        ["predict", "run", "a.npy", "b.npy"],
        ["predict", "run", "b.npy", "--out", "outputs.npy"],
        ["predict", "stream", "c.csv"],
    ]
    np.savetxt(folder / "c.csv", points(5, 8).inputs, delimiter=",")
    results = outcomes([*train, *asked, ["predict", "run", "missing.npy"]], folder, 2)
    outputs_of(results[: len(train)])
    (refused,) = refusals_of(results[-1:])
    return Trained(folder, asked, outputs_of(results[len(train) : -1]), refused)


def averaged_weights(path: Path) -> dict[str, torch.Tensor]:
    start = "extras/ema/module."
    return {n.removeprefix(start): t for n, t in load_file(path).items() if n.startswith(start)}


def test_numbers_are_those_of_the_averaged_weights(trained: Trained) -> None:
    folder = trained.directory
    best, newest = best_file(folder / "run"), checkpoint_files(folder / "run")[0]
    assert best is not None
    assert (best.name[:9], newest.name[:15]) == ("best-0001", "checkpoint-0002")
    model = recipe(9).model
    model.load_state_dict(averaged_weights(best))
    test = points(301, 1)
    with torch.no_grad():
        scores = model(torch.from_numpy(test.inputs))
        loss = torch.nn.functional.cross_entropy(scores, torch.from_numpy(test.labels))
        outputs = model(torch.from_numpy(points(400, 9).inputs)).numpy()
    taken = scores.argmax(dim=1).numpy()
    evaluated = json.loads(trained.told[0])
    assert evaluated["checkpoint"] == f"run/{best.name}"
    assert evaluated["samples"] == 301
    assert json.loads(trained.told[1])["checkpoint"] == f"run/{newest.name}"
    assert json.loads(trained.told[1])["loss"] != evaluated["loss"]
    assert evaluated["loss"] == pytest.approx(float(loss), rel=1e-6)
    assert evaluated["accuracy"] == np.mean(taken == test.labels)
    matrix = np.zeros((3, 3), int)
    np.add.at(matrix, (test.labels, taken), 1)
    assert evaluated["confusion"] == matrix.tolist()
    last, own = scores[:, 2].numpy(), test.labels == 2
    assert evaluated["area"] == np.mean(last[own][:, None] > last[~own][None, :])
    np.testing.assert_allclose(np.load(folder / "outputs.npy"), outputs, rtol=1e-5, atol=1e-6)


def test_lines_of_a_prediction(trained: Trained) -> None:
    outputs = np.load(trained.directory / "outputs.npy")
    lines = [json.loads(line) for line in trained.told[2].splitlines()]
    assert [(line["file"], line["row"]) for line in lines[:6]] == [
        *(("a.npy", row) for row in range(5)),
        ("b.npy", 0),
    ]
    assert len(lines) == 405
    for line, scores in zip(lines[5:], outputs.astype(np.float64), strict=True):
        assert line["class"] == ["red", "green", "blue"][int(scores.argmax())]
        part = np.exp(scores.max()) / np.exp(scores).sum()
        assert line["probability"] == pytest.approx(part, rel=1e-6)
    from_text = [json.loads(line) for line in trained.told[4].splitlines()]
    assert [(line["file"], line["row"]) for line in from_text] == [("c.csv", n) for n in range(5)]
    assert all(1 / 3 < line["probability"] < 1 for line in from_text)
    assert "missing.npy" in trained.refused


def test_other_ways_to_the_same_weights(trained: Trained) -> None:
    """From the file of options that a run left; and compiled, but for rounding."""
    runs = [trained.directory / name for name in ("run", "again", "compiled")]
    first, again, _ = (summary_of(path) for path in runs)
    assert again["weights_sha256"] == first["weights_sha256"]
    assert len(set(first["weights_sha256"])) == 1
    tensors = [load_file(checkpoint_files(path)[0]) for path in (runs[0], runs[2])]
    assert tensors[0].keys() == tensors[1].keys()
    for name, tensor in tensors[0].items():
        torch.testing.assert_close(tensors[1][name], tensor, rtol=1e-6, atol=1e-6)
    assert summary_of(trained.directory / "stream")["samples"] == 2 * 60


def test_one_rank_prints_the_same_and_refuses_what_it_cannot_use(
    trained: Trained, tmp_path: Path
) -> None:
    folder = tmp_path / "all"
    shutil.copytree(trained.directory, folder)
    np.save(folder / "wide.npy", np.zeros((4, 7), np.float32))
    np.save(folder / "number.npy", np.float32(3))
    newest = checkpoint_files(folder / "run")[0]
    damaged = folder / "damaged" / newest.name
    damaged.parent.mkdir()
    content = bytearray(newest.read_bytes())
    content[-3] ^= 1
    damaged.write_bytes(content)
    shutil.copytree(folder / "run", folder / "bare", ignore=shutil.ignore_patterns("*.safetensors"))
    cases: list[tuple[list[object], list[str]]] = [
        (["evaluate", "nowhere"], ["nowhere is not the directory of a run", "config.yaml"]),
        (["evaluate", "bare"], ["no checkpoint in bare"]),
        (["evaluate", "run", "--checkpoint", damaged], [str(damaged), "damaged"]),
        (["evaluate", "run", "--checkpoint", "last"], ["no checkpoint last"]),
        (
            ["evaluate", "run", "--recipe", "my_points.py:stream"],
            ["--set width", "no such argument"],
        ),
        (["predict", "run", "wide.npy"], ["does not take these inputs", "7"]),
        (["predict", "run", "number.npy"], ["number.npy", "[samples, ...]"]),
        (["predict", "run", "my_points.py"], ["my_points.py is not an array in numpy's .npy"]),
        (["predict", "run", "a.npy", "wide.npy"], ["one shape", "a.npy: (6,)", "wide.npy: (7,)"]),
        (["predict", "run", "a.npy", "--out", "x.txt"], ["x.txt", ".npy"]),
        (["predict", "run", "a.npy", "--out", "no/x.npy"], ["no/x.npy", "cannot be written"]),
        (["predict", "stream", "a.npy"], ["a.npy is not what the recipe reads"]),
        (["train", "my_points.py", "--best", "nosuch"], ["--best nosuch", "loss, accuracy, top2"]),
        (["train", "my_points.py", "--best", "confusion"], ["--best confusion"]),
        (["train", "my_points.py", "--compile", "inducter"], ["inducter", "inductor"]),
        (["train", "my_points.py:without_test", "--early-stop", 2], ["--early-stop 2", "no test"]),
        (["train", "my_points.py:without_test", "--best", "area"], ["--best area", "no test"]),
        (["train", "my_points.py:of_vectors", "--quiet"], ["one number", "(16,)"]),
        (["train", "my_points.py:endless"], ["is a stream (Stream)", "samples_per_epoch"]),
        (
            ["train", "my_points.py:stream", "--set", "samples=61", "--quiet"],
            ["ended before sample 61", "samples_per_epoch"],
        ),
        (["train", "my_points.py:of_one_number", "--quiet"], ["TopK(2) of 1 classes"]),
        (["train", "my_points.py:nothing"], ["my_points.py:nothing returned None"]),
        (["train", "mnist", "--data-dir", "damaged"], ["train-images-idx3-ubyte", "damaged"]),
    ]
    results = outcomes([*trained.asked, *(command for command, _ in cases)], folder, 1)
    same, refused = results[: len(trained.asked)], results[len(trained.asked) :]
    assert outputs_of(same) == trained.told
    outputs = (folder / "outputs.npy").read_bytes()
    assert outputs == (trained.directory / "outputs.npy").read_bytes()
    for (command, words), line in zip(cases, refusals_of(refused), strict=True):
        assert all(word in line for word in words), (command, line)
