"""Recipes in files of the user's: found, given their arguments, and told apart from bad input."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.errors import RecipeError, UsageError
from hvdtrain.train.options import TrainOptions
from hvdtrain.train.recipe_loader import load_recipe
from hvdtrain.train.recipes.recipe import Recipe

HEAD = """
from __future__ import annotations
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from hvdtrain.train.recipe import Recipe
if TYPE_CHECKING:
    from nowhere import Unknown

def made(**arguments):
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


def made(file: Path, body: str, *, function: str = "", **options: Any) -> Recipe:
    """Write a file, and make the recipe in it."""
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
    return made(**locals())

def plain(width=3, rate=0.5, deep=False, sizes=(1, 2), name=None, names=[], other: Unknown = 1):
    return made(**locals())

def free(width: int = 3, **rest):
    return made(width=width, **rest)
"""
    file = tmp_path / "my recipe.py"
    said = {
        "width": "1_024", "rate": "1e-3", "norm": "no", "name": "no", "kind": "3",
        "sizes": "1, 2,3", "pair": "4,5", "many": "", "some": ["1", "2.5"], "most": "none",
        "title": "none", "path": "a/b", "mixed": "2.5",
    }  # fmt: skip
    assert made(file, body, set=said, data_dir=Path("data")).model == {
        "width": 1024, "rate": 0.001, "norm": False, "name": "no", "kind": 3,
        "sizes": [1, 2, 3], "pair": (4, 5.0), "many": (), "some": (1.0, 2.5), "most": None,
        "title": "none", "path": Path("a/b"), "mixed": 2.5, "data_dir": Path("data"),
    }  # fmt: skip
    # From Python, values are what they are.
    typed = {"width": 3, "rate": 1, "title": None, "sizes": (1, 2), "mixed": 2}
    model = made(file, body, set=typed).model
    assert [model[name] for name in typed] == [3, 1.0, None, [1, 2], 2]
    said = {"width": "4", "rate": "1", "deep": "yes", "sizes": "3", "name": "n", "names": "a,b"}
    assert made(file, body, function="plain", set=said).model == {
        "width": 4, "rate": 1.0, "deep": True, "sizes": (3,), "name": "n", "names": ["a", "b"],
        "other": 1,
    }  # fmt: skip
    said = {"width": "4", "what": "ever"}
    assert made(file, body, function="free", set=said).model == {"width": 4, "what": "ever"}


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
        ("a: int", {"set": {"a": "1.5"}}, ["--set a must be a whole number, got '1.5'"]),
        ("a: int", {"set": {"a": True}}, ["--set a must be a whole number, got True"]),
        ("a: int", {"set": {"a": None}}, ["--set a must be a whole number, got None"]),
        ("a: int", {"set": {"a": ["1"]}}, ["--set a must be a whole number, got ['1']"]),
        ("a: float", {"set": {"a": "fast"}}, ["--set a must be a number, got 'fast'"]),
        ("a: bool", {"set": {"a": "1"}}, ["--set a must be true or false, got '1'"]),
        ("a=False", {"set": {"a": "maybe"}}, ["--set a must be true or false, got 'maybe'"]),
        ("a: str", {"set": {"a": 1}}, ["--set a must be text, got 1"]),
        ("a: int | None", {"set": {"a": "x"}}, ["--set a must be a whole number or none"]),
        ("a: Literal['b', 'c']", {"set": {"a": "d"}}, ["--set a must be one of b, c, got 'd'"]),
        ("a: list[int]", {"set": {"a": "1,x"}}, ["values with commas between", "'1,x'"]),
        ("a: tuple[int, int]", {"set": {"a": "1"}}, ["2 values with commas between", "'1'"]),
        ("a: dict[str, int]", {"set": {"a": "1"}}, ["--set a", "dict", "annotate it with int"]),
    ],
)
def test_bad_arguments(
    signature: str, options: dict[str, Any], words: list[str], tmp_path: Path
) -> None:
    with pytest.raises(UsageError) as refusal:
        made(tmp_path / "it.py", f"def recipe({signature}): return made()", **options)
    assert "\n" not in str(refusal.value)
    for word in words:
        assert word in str(refusal.value)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("def recpie(): pass", ["has no function recipe: did you mean recpie?"]),
        ("def f(): pass", ["has no function recipe: it has made, f"]),
        ("recipe = made()", ["recipe in", "is a Recipe: write a function that returns"]),
        ("def recipe(): pass", [":recipe returned None, expected a", "Recipe"]),
        ("def recipe(): return 3", [":recipe returned a int, expected a", "Recipe"]),
        ("def recipe(:\n  pass", ["it.py:13: invalid syntax"]),
        ("\n  x = 1", ["it.py:14: ", "indent"]),
        ("import neighbour_a", ["neighbour_a.py:2: "]),
        ("x = 'a\0b'", ["it.py", "null bytes"]),
    ],
)
def test_bad_files(body: str, words: list[str], tmp_path: Path) -> None:
    (tmp_path / "neighbour_a.py").write_text("x = 1\ny = = 2\n")
    with pytest.raises(UsageError) as refusal:
        made(tmp_path / "it.py", body)
    assert "\n" not in str(refusal.value)
    for word in words:
        assert word in str(refusal.value)


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
    return made(width=WIDTH, depth=DEPTH, zen=this.s[:3], model=Model())
"""
    sys.modules.pop("this", None)
    model = made(tmp_path / "torch.py", body).model
    assert (model["width"], model["depth"], model["zen"]) == (3, 4, "Gur")
    assert "torch" not in sys.modules or hasattr(sys.modules["torch"], "Tensor")
    # It is a module that pickle finds.
    assert type(pickle.loads(pickle.dumps(model["model"]))) is type(model["model"])


def test_what_the_users_code_raises_is_not_bad_input(tmp_path: Path) -> None:
    (tmp_path / "neighbour_d.py").write_text("def fail():\n    raise ValueError('mine')\n")
    with pytest.raises(RecipeError, match=r"it\.py:recipe failed") as failure:
        made(tmp_path / "it.py", "from neighbour_d import fail\ndef recipe(): fail()")
    trace = failure.value.__cause__.__traceback__ if failure.value.__cause__ else None
    assert trace is not None
    assert trace.tb_frame.f_code.co_filename == str(tmp_path / "it.py")
    with pytest.raises(RecipeError, match=r"it\.py cannot be loaded") as failure:
        made(tmp_path / "it.py", "import neighbour_of_nobody")
    assert isinstance(failure.value.__cause__, ModuleNotFoundError)
    with pytest.raises(UsageError, match="no data here"):
        made(
            tmp_path / "it.py",
            "from hvdtrain.errors import UsageError\n"
            "def recipe(): raise UsageError('no data here')",
        )


def test_built_in_recipes() -> None:
    assert load_recipe(TrainOptions(set={"label_smoothing": "0.1"}))().model is not None
    with pytest.raises(UsageError, match="--set width: recipe digits has no such argument"):
        load_recipe(TrainOptions(set={"width": "3"}))
    with pytest.raises(UsageError, match="recipe digits takes no data_dir"):
        load_recipe(TrainOptions(data_dir=Path("d")))


def test_the_command_line(tmp_path: Path) -> None:
    """Bad input is one line and 2; an error of the user's is their traceback, and 1."""
    file = tmp_path / "mine.py"
    file.write_text(
        "def recipe(width: int):\n"
        "    try:\n"
        "        1 / 0\n"
        "    except ZeroDivisionError as error:\n"
        "        raise ValueError(width) from error\n"
    )

    def train(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "hvdtrain", "train", "mine.py", *words],
            capture_output=True,
            text=True,
            timeout=120,
            cwd=tmp_path,
        )

    refused = train("--set", "width=x")
    assert refused.returncode == 2
    assert refused.stderr.endswith("hvdtrain: --set width must be a whole number, got 'x'\n")
    assert "Traceback" not in refused.stderr
    failed = train("--set", "width=64")
    assert failed.returncode == 1
    assert "ZeroDivisionError" in failed.stderr
    assert failed.stderr.rstrip().endswith("ValueError: 64")
    last = failed.stderr.rpartition("Traceback")[2]
    assert f'File "{file}", line 5, in recipe' in last
    assert "click" not in last
    assert "session.py" not in failed.stderr
    assert list(tmp_path.iterdir()) == [file]
