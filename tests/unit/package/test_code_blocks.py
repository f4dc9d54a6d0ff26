"""Code on pages is run by a test, and commands on pages have the options that there are."""

import ast
import re
from pathlib import Path

import click
import pytest
from page_blocks import PAGES, ROOT, blocks, command_lines, parse, words

# What is run in other words than those of the page.
ELSEWHERE = {"docs/spark-and-ray.md": "tests/launch/test_spark_and_ray.py"}
# Pages that a test works through as they are, each named there without its suffix.
WORKED_THROUGH = {page for page in PAGES if page.parent.name == "tutorials"}
# Commands that are not ours. Schedulers: tests/launch submits job scripts to them.
UNKNOWN = "a command that no test knows"
OTHERS = {"cd", "git", "mpirun", "python", "sbatch", "tensorboard"}
TESTS = {
    path: path.read_text(encoding="utf-8")
    for path in sorted(ROOT.glob("tests/**/*.py"))
    if path != Path(__file__)
}


def of(language: str) -> list[object]:
    return [
        pytest.param(page, id=str(page.relative_to(ROOT)))
        for page in PAGES
        if blocks(page, language)
    ]


def names(test: str, page: Path) -> bool:
    """Return whether a test reads a page: it has the path, or its last parts, as a string."""
    *_, folder, name = page.relative_to(ROOT.parent).parts
    path = rf'"(?:[\w/-]*/)?{re.escape(name)}"'
    if name == "README.md" and folder != ROOT.name:
        path = rf'"(?:[\w/-]*/)?{folder}/README\.md"|"{folder}" / "README\.md"'
    return re.search(path, test) is not None


@pytest.mark.parametrize("page", of("python"))
def test_python_is_run_by_a_test(page: Path) -> None:
    for code in blocks(page, "python"):
        ast.parse(code)
    name = page.relative_to(ROOT).as_posix()
    if name in ELSEWHERE:
        assert name in (ROOT / ELSEWHERE[name]).read_text(encoding="utf-8")
        return
    if page in WORKED_THROUGH:
        test = ROOT / "tests/scripts/test_tutorials.py"
        assert re.search(rf'"{page.stem}(?:\.md)?"', test.read_text(encoding="utf-8"))
        return
    assert [path for path, test in TESTS.items() if names(test, page)], f"no test runs {name}"


def test_scripts_for_bash_are_run_by_a_test() -> None:
    pages = [page for page in PAGES if blocks(page, "bash")]
    assert [page for page in pages if not any(names(test, page) for test in TESTS.values())] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_have_these_options(page: Path) -> None:
    faults = {line: objection(line) for line in command_lines(page)}
    ignored = {None, UNKNOWN} if page in WORKED_THROUGH else {None}
    assert {line: fault for line, fault in faults.items() if fault not in ignored} == {}


def objection(line: str) -> str | None:
    parts = words(line)
    try:
        if not parts or parse(parts):
            return None
    except click.ClickException as error:
        return error.format_message()
    if parts[0] == "pip":
        wanted = {name for each in re.findall(r"\[([\w,]+)\]", line) for name in each.split(",")}
        missing = wanted - extras()
        return f"no extra {missing}" if missing else None
    if parts[0] == "make":
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        target = next((part for part in parts[1:] if "=" not in part), "help")
        return None if re.search(rf"^{target}:", makefile, re.MULTILINE) else f"no {target}"
    return None if parts[0] in OTHERS else UNKNOWN


def extras() -> set[str]:
    (found,) = [
        node.value
        for node in ast.walk(ast.parse((ROOT / "setup.py").read_text(encoding="utf-8")))
        if isinstance(node, ast.keyword) and node.arg == "extras_require"
    ]
    assert isinstance(found, ast.Dict)
    return {str(key.value) for key in found.keys if isinstance(key, ast.Constant)}
