"""Calls that the documentation shows go with the functions as they are."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hvdtrain
import hvdtrain.torch as hvd

ROOT = Path(__file__).resolve().parents[3]
# What they show is run by the tests of these frameworks.
OF_OTHER_FRAMEWORKS = {"tensorflow.md", "keras.md"}
PAGES = [
    path
    for path in sorted([*ROOT.glob("*.md"), *ROOT.glob("*/*.md"), *ROOT.glob("docs/*/*.md")])
    if path.name not in OF_OTHER_FRAMEWORKS | {"CHANGELOG.md"}
]
FENCES = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`\n]+)`")


def calls_on(page: Path) -> Iterator[ast.Call]:
    """Yield every call of a function of ours, in blocks of Python and within sentences."""
    text = page.read_text(encoding="utf-8")
    blocks = [code for language, code in FENCES.findall(text) if language == "python"]
    for code in [*blocks, *INLINE.findall(FENCES.sub("", text))]:
        try:
            tree = ast.parse(code)
        except SyntaxError:  # words, a command line, or a part of a call
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and function_of(node) is not None:
                yield node


def function_of(call: ast.Call) -> Any:
    """Return our function of this name, if it is one."""
    function = call.func
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
        owners: dict[str, Any] = {"hvd": hvd, "hvdtrain": hvdtrain}
        return getattr(owners.get(function.value.id), function.attr, None)
    if isinstance(function, ast.Name) and function.id in hvd.__all__:
        return getattr(hvd, function.id)
    return None


def objection(call: ast.Call) -> str | None:
    """Return what is wrong with the arguments; a call without any only names its function."""
    if any(isinstance(each, ast.Starred) for each in call.args) or not (call.args or call.keywords):
        return None
    if any(isinstance(each, ast.Constant) and each.value is ... for each in call.args):
        return None
    function = function_of(call)
    names = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg is not None}
    try:
        given = inspect.signature(function).bind(*call.args, **names)
    except TypeError as error:
        return str(error)
    comm = given.arguments.get("comm") if function is hvd.init else None
    if isinstance(comm, ast.Constant) and comm.value is not None:
        return "the first argument is comm, not the engine"
    return None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_arguments_are_those_of_the_function(page: Path) -> None:
    wrong = {ast.unparse(call): problem for call in calls_on(page) if (problem := objection(call))}
    assert not wrong


def test_an_engine_in_the_place_of_ranks_is_refused_before_anything_is_joined() -> None:
    with pytest.raises(ValueError, match=r"init\('gloo'\): .*write init\(engine='gloo'\)"):
        hvd.init("gloo")
    assert not hvd.is_initialized()


def test_there_are_calls_to_check() -> None:
    assert sum(1 for page in PAGES for call in calls_on(page) if call.args or call.keywords) > 10
