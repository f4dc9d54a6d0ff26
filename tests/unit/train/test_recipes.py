"""Recipes: the built-in ones for torch, and those in files of the user's."""

import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_files import write_cifar10, write_images, write_mnist
from refusing import refused

from hvdtrain.data import sample_generator
from hvdtrain.data.dataset import Samples
from hvdtrain.errors import RecipeError, UsageError
from hvdtrain.train.metrics import Accuracy
from hvdtrain.train.options import TrainOptions
from hvdtrain.train.recipe import Recipe
from hvdtrain.train.recipe_loader import load_recipe
from hvdtrain.train.recipes.torch_recipes import (
    cifar10,
    digits,
    imagefolder,
    mapfile,
    mnist,
    synthetic,
    text,
)


def images(folder: Path) -> None:
    names = [f"{part}/{name}.png" for part in ("train", "test") for name in ("a/0", "a/1", "b/0")]
    write_images([folder / name for name in names])
    for part in ("train", "test"):
        rows = [f"{part}/{name}.png\t{label}\n" for name, label in (("a/0", 2), ("b/0", 0))]
        (folder / f"{part}.txt").write_text("".join(rows))


def samples_of(recipe: Recipe, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    data = recipe.train
    rows = zip(data.inputs, data.labels, strict=True) if isinstance(data, Samples) else data
    inputs, targets = zip(*(row for row, _ in zip(rows, range(count), strict=False)), strict=True)
    if recipe.augment is not None:
        inputs = tuple(
            recipe.augment(one, sample_generator(0, 0, index)) for index, one in enumerate(inputs)
        )
    # Weights are in float64, so that only the order of sums can make a difference.
    batch = torch.from_numpy(np.stack(inputs))
    return batch.double() if batch.is_floating_point() else batch, torch.tensor(np.stack(targets))


def gradient(recipe: Recipe, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    recipe.model.zero_grad()
    recipe.loss(recipe.model(inputs), targets).backward()
    return torch.cat([parameter.grad.flatten() for parameter in recipe.model.parameters()])


CASES: list[tuple[Callable[[Path], Recipe], tuple[int, ...], int]] = [
    # What makes it, the shape of the scores of two samples, the number of parameters.
    (lambda _: digits(), (2, 10), 38282),
    # That of the example of PyTorch has as many.
    (lambda folder: mnist(folder / "mnist"), (2, 10), 1199882),
    (lambda folder: cifar10(folder / "cifar10", width=4), (2, 10), 17534),
    (lambda folder: imagefolder(folder, width=4, size=48, crop=40), (2, 2), 44838),
    (lambda folder: mapfile(folder, width=4, size=48, crop=40, blocks=1), (2, 3), 20151),
    (lambda folder: text(folder / "text", context=9, width=8), (2, 5, 9), 1917),
    (lambda _: synthetic(samples=8), (2, 10), 78042),
    (lambda _: synthetic("7", classes=3, samples=8), (2, 3), 68611),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for name in ("mnist", "cifar10", "text"):
        (folder / name).mkdir()
    write_mnist(folder / "mnist", train=4, test=2)
    write_cifar10(folder / "cifar10", 2, python=False)
    (folder / "text" / "a.txt").write_text("abcd\n" * 40)
    images(folder)
    return folder


@pytest.mark.parametrize(("make", "shape", "parameters"), CASES)
def test_networks(
    folder: Path, make: Callable[[Path], Recipe], shape: tuple[int, ...], parameters: int
) -> None:
    torch.manual_seed(0)
    recipe = make(folder)
    assert sum(parameter.numel() for parameter in recipe.model.parameters()) == parameters
    recipe.model.double()
    for module in recipe.model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    inputs, targets = samples_of(recipe, 2)
    assert recipe.model(inputs).shape == shape
    assert isinstance(recipe.metrics["accuracy"], Accuracy)
    whole = gradient(recipe, inputs, targets)
    parts = [gradient(recipe, inputs[i : i + 1], targets[i : i + 1]) for i in range(2)]
    assert whole.abs().max() > 0
    torch.testing.assert_close(whole, (parts[0] + parts[1]) / 2, rtol=1e-9, atol=1e-12)
    tested = recipe.test.inputs[0] if isinstance(recipe.test, Samples) else recipe.test[0][0]
    assert tested.shape == inputs[0].shape
    assert recipe.classes is None or len(recipe.classes) == shape[1]


def test_files_to_predict_from(folder: Path) -> None:
    numbers = mnist(folder / "mnist")
    inputs = numbers.read(folder / "mnist" / "t10k-images-idx3-ubyte")  # type: ignore[misc]
    assert np.array_equal(inputs, numbers.test.inputs)
    photographs = imagefolder(folder, size=48, crop=40)
    inputs = photographs.read(photographs.test.paths[1])  # type: ignore[misc]
    assert np.array_equal(inputs, photographs.test[1][0][None])
    small = cifar10(folder / "cifar10").read
    assert small is not None
    assert small(photographs.test.paths[1]).shape == (1, 3, 32, 32)


def test_label_smoothing() -> None:
    scores, labels = torch.tensor([[2.0, 0.0, 1.0]]), torch.tensor([0])
    logs = scores.log_softmax(1)[0]
    expected = -0.7 * logs[0] - 0.3 * logs.mean()
    torch.testing.assert_close(digits(0.3).loss(scores, labels), expected)


@pytest.mark.parametrize(
    ("function", "arguments", "fault"),
    [
        (digits, {"label_smoothing": 1.0}, "label_smoothing must be .* below 1, got 1.0"),
        (imagefolder, {"size": 8, "crop": 9}, "crop must be from 1 to size, got crop 9"),
        (synthetic, {"shape": "3x32"}, "shape must be like 3x32x32 or 100, got '3x32'"),
        (mnist, {}, "mnist needs --data-dir DIR, with train-images-idx3-ubyte"),
    ],
)
def test_bad_arguments(
    function: Callable[..., Recipe], arguments: dict[str, Any], fault: str
) -> None:
    with pytest.raises(UsageError, match=fault):
        function(**arguments)


def test_heads_must_share_the_width(folder: Path) -> None:
    with pytest.raises(UsageError, match="width must be a multiple of heads, got 10 and 4"):
        text(folder / "text", context=9, width=10)


HEAD = """
from __future__ import annotations
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from hvdtrain.train.recipe import Recipe
if TYPE_CHECKING:
    from nowhere import Unknown

def made_from(**arguments):
    return Recipe(model=arguments, train=[], loss=len)

"""


@pytest.fixture(autouse=True)
def _modules_as_before() -> Any:
    modules, path = dict(sys.modules), list(sys.path)
    yield
    assert sys.path == path
    for name in sys.modules.keys() - modules.keys():
        if name.startswith(("_hvdtrain_recipe", "neighbour")):
            del sys.modules[name]


def made_from(file: Path, body: str, *, function: str = "", **options: Any) -> Recipe:
    file.write_text(HEAD + body, encoding="utf-8")
    name = f"{file}:{function}" if function else str(file)
    return load_recipe(TrainOptions(recipe=name, **options))()


def test_a_recipe_is_called_with_its_arguments(tmp_path: Path) -> None:
    body = """
def recipe(
    width: int, rate: float = 0.5, *, norm: bool = True, name: str = "x",
    data_dir: Path | None = None,
    kind: Literal["a", "b", 3] = "a", sizes: list[int] = [1], pair: tuple[int, float] = (1, 2.0),
    many: tuple[str, ...] = (), some: Sequence[float] = (), most: int | None = 4,
    title: str | None = None, path: Path | str = "p", mixed: int | float = 0,
):
    return made_from(**locals())

def plain(width=3, rate=0.5, deep=False, sizes=(1, 2), name=None, names=[], other: Unknown = 1):
    return made_from(**locals())

def free(width: int = 3, **rest):
    return made_from(width=width, **rest)
"""
    file = tmp_path / "my recipe.py"
    said = {
        "width": "1_024", "rate": "1e-3", "norm": "no", "name": "no", "kind": "3",
        "sizes": "1, 2,3", "pair": "4,5", "many": "", "some": ["1", "2.5"], "most": "none",
        "title": "none", "path": "a/b", "mixed": "2.5",
    }  # fmt: skip
    assert made_from(file, body, set=said, data_dir=Path("data")).model == {
        "width": 1024, "rate": 0.001, "norm": False, "name": "no", "kind": 3,
        "sizes": [1, 2, 3], "pair": (4, 5.0), "many": (), "some": (1.0, 2.5), "most": None,
        "title": "none", "path": Path("a/b"), "mixed": 2.5, "data_dir": Path("data"),
    }  # fmt: skip
    # From Python, values are what they are.
    typed = {"width": 3, "rate": 1, "title": None, "sizes": (1, 2), "mixed": 2}
    model = made_from(file, body, set=typed).model
    assert [model[name] for name in typed] == [3, 1.0, None, [1, 2], 2]
    said = {"width": "4", "rate": "1", "deep": "yes", "sizes": "3", "name": "n", "names": "a,b"}
    assert made_from(file, body, function="plain", set=said).model == {
        "width": 4, "rate": 1.0, "deep": True, "sizes": (3,), "name": "n", "names": ["a", "b"],
        "other": 1,
    }  # fmt: skip
    said = {"width": "4", "what": "ever"}
    assert made_from(file, body, function="free", set=said).model == {"width": 4, "what": "ever"}


@pytest.mark.parametrize(
    ("signature", "options", "words"),
    [
        ("width: int = 1", {"set": {"witdh": "2"}}, ["no such argument: did you mean width?"]),
        ("a=1, b=2, data_dir=''", {"set": {"zzz": "2"}}, ["no such argument: it takes a, b"]),
        ("", {"set": {"a": "2"}}, ["--set a", "it takes none"]),
        ("width: int, deep: int", {}, ["needs --set width=VALUE and --set deep=VALUE"]),
        ("data_dir: Path", {}, ["needs --data-dir DIR"]),
        ("width=1", {"data_dir": Path("d")}, ["--data-dir d", "takes no data_dir"]),
        ("data_dir: Path", {"set": {"data_dir": "d"}}, ["say --data-dir instead"]),
        ("a: int", {"set": {"a": "x"}}, ["--set a must be a whole number, got 'x'"]),
        ("a: int", {"set": {"a": True}}, ["--set a must be a whole number, got True"]),
        ("a: int", {"set": {"a": ["1"]}}, ["--set a must be a whole number, got ['1']"]),
        ("a: bool", {"set": {"a": "1"}}, ["--set a must be true or false, got '1'"]),
        ("a: str", {"set": {"a": 1}}, ["--set a must be text, got 1"]),
        ("a: int | None", {"set": {"a": "x"}}, ["--set a must be a whole number or none"]),
        ("a: Literal['b', 'c']", {"set": {"a": "d"}}, ["--set a must be one of b, c, got 'd'"]),
        ("a: list[int]", {"set": {"a": "1,x"}}, ["values with commas between", "'1,x'"]),
        ("a: tuple[int, int]", {"set": {"a": "1"}}, ["2 values with commas between", "'1'"]),
        ("a: dict[str, int]", {"set": {"a": "1"}}, ["--set a", "dict", "annotate it with int"]),
    ],
)
def test_bad_arguments_of_a_file(
    signature: str, options: dict[str, Any], words: list[str], tmp_path: Path
) -> None:
    with refused(*words):
        made_from(tmp_path / "it.py", f"def recipe({signature}): return made_from()", **options)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("def recpie(): pass", ["has no function recipe: did you mean recpie?"]),
        ("recipe = made_from()", ["recipe in", "is a Recipe: write a function that returns"]),
        ("def recipe(): pass", [":recipe returned None, expected a", "Recipe"]),
        ("def recipe(:\n  pass", ["it.py:13: invalid syntax"]),
        ("\n  x = 1", ["it.py:14: ", "indent"]),
        ("import neighbour_a", ["neighbour_a.py:2: "]),
        ("x = 'a\0b'", ["it.py", "null bytes"]),
    ],
)
def test_bad_files(body: str, words: list[str], tmp_path: Path) -> None:
    (tmp_path / "neighbour_a.py").write_text("x = 1\ny = = 2\n")
    with refused(*words):
        made_from(tmp_path / "it.py", body)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "folder.py").mkdir()
    for name, reason in [("none.py", "No such file"), ("folder.py", "Is a directory")]:
        with pytest.raises(UsageError, match=f"{name} cannot be read: {reason}"):
            load_recipe(TrainOptions(recipe=str(tmp_path / name)))
    (tmp_path / "latin.py").write_bytes(b"x = 1\ny = '\xff'\n")
    with pytest.raises(UsageError, match=r"latin\.py:2: .*"):
        load_recipe(TrainOptions(recipe=str(tmp_path / "latin.py")))


def test_a_file_finds_its_neighbours_and_hides_nothing(tmp_path: Path) -> None:
    (tmp_path / "neighbour_b.py").write_text("WIDTH = 3\n")
    (tmp_path / "neighbour_c.py").write_text("DEPTH = 4\n")
    # Installed, and not imported yet: what is installed must win.
    (tmp_path / "this.py").write_text("raise RuntimeError('shadowed')\n")
    body = """
import contextlib, io
from neighbour_b import WIDTH

class Model: pass

def recipe():
    from neighbour_c import DEPTH
    with contextlib.redirect_stdout(io.StringIO()):
        import this
    return made_from(width=WIDTH, depth=DEPTH, zen=this.s[:3], model=Model())
"""
    sys.modules.pop("this", None)
    model = made_from(tmp_path / "torch.py", body).model
    assert (model["width"], model["depth"], model["zen"]) == (3, 4, "Gur")
    assert "torch" not in sys.modules or hasattr(sys.modules["torch"], "Tensor")
    # It is a module that pickle finds.
    assert type(pickle.loads(pickle.dumps(model["model"]))) is type(model["model"])


def test_what_the_users_code_raises_is_not_bad_input(tmp_path: Path) -> None:
    (tmp_path / "neighbour_d.py").write_text("def fail():\n    raise ValueError('mine')\n")
    said = r"it\.py:recipe failed: /.*/neighbour_d\.py:2 in fail: ValueError: mine$"
    with pytest.raises(RecipeError, match=said):
        made_from(tmp_path / "it.py", "from neighbour_d import fail\ndef recipe(): fail()")
    with pytest.raises(RecipeError, match=r"it\.py cannot be loaded") as failure:
        made_from(tmp_path / "it.py", "import neighbour_of_nobody")
    assert isinstance(failure.value.__cause__, ModuleNotFoundError)
    with pytest.raises(UsageError, match="no data here"):
        made_from(
            tmp_path / "it.py",
            "from hvdtrain.errors import UsageError\n"
            "def recipe(): raise UsageError('no data here')",
        )
