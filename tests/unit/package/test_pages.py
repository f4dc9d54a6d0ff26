"""Pages of the documentation name what there is."""

import ast
import functools
import json
import re
import runpy
from functools import reduce
from operator import or_, truediv
from statistics import median

import pytest
from bounds import lowest
from paths import ROOT

from hvdtrain import errors

PAGE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")


def test_each_stop_is_there() -> None:
    stops = re.findall(r"^\| \d+ \| `([^`]+)` \| `([^`]+)` \|", PAGE, re.MULTILINE)
    assert len(stops) == len(re.findall(r"^\| \d+ \|", PAGE, re.MULTILINE)) > 20
    for file, function in stops:
        body = ast.parse((ROOT / file).read_text(encoding="utf-8")).body
        *owner, name = function.split(".")
        if owner:
            (kind,) = [n for n in body if isinstance(n, ast.ClassDef) and n.name == owner[0]]
            body = kind.body
        assert name in {n.name for n in body if isinstance(n, ast.FunctionDef)}, (file, function)


def test_all_files_are_there() -> None:
    files = re.findall(r"`((?:hvdtrain|tests)/[\w/.]+)`", PAGE)
    assert len(files) > 10
    assert [file for file in files if not (ROOT / file).exists()] == []


TROUBLES = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
OWN = TROUBLES.partition("\n## Messages of mpirun, ssh and pip\n")[0]
MESSAGES = re.findall(r"^\| `([^`]+)` \|", OWN, re.MULTILINE)
VALUE = "\0"  # in place of what differs each time


@functools.cache
def texts() -> list[str]:
    found = []
    folders = [ROOT / "hvdtrain", *ROOT.glob("benchmarks/hvdtrain_*"), ROOT / "tools"]
    for path in sorted(path for folder in folders for path in folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [
                    part.value if isinstance(part, ast.Constant) else VALUE for part in node.values
                ]
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_is_in_the_code(message: str) -> None:
    # A quoted value has its marks from its repr.
    parts = [re.escape(part.strip("'")) for part in message.split("…")]
    pattern = re.compile(".*".join(parts), re.DOTALL)
    assert any(pattern.search(text) for text in texts()), message


def test_the_page_has_the_messages_that_it_is_for() -> None:
    assert len(MESSAGES) == len(set(MESSAGES)) >= 50


# The packages that users import, beside `hvdtrain` itself.
NOT_FOR_USERS = ("hvdtrain.cli.", "hvdtrain.horovod.")


def test_every_public_package_has_a_page() -> None:
    described = (ROOT / "docs" / "hooks" / "functions.py").read_text(encoding="utf-8")
    public = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for path in ROOT.glob("hvdtrain/**/__init__.py")
        if re.search(r"^__all__ = \[\s*\"", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    undescribed = {name for name in public if f'"{name}"' not in described}
    assert "hvdtrain.torch" in public
    assert [name for name in undescribed if not name.startswith(NOT_FOR_USERS)] == []


def test_every_exit_code_is_listed() -> None:
    page = (ROOT / "docs" / "variables.md").read_text(encoding="utf-8")
    table = page.partition("\n## Exit codes\n")[2]
    listed = {
        int(code)
        for cell in re.findall(r"^\| ([\d, ]+) \|", table, re.MULTILINE)
        for code in cell.split(",")
    }
    codes = {value for name, value in vars(errors).items() if name.startswith("EXIT_")}
    assert listed == codes | {0}
    # MPICH's mpiexec joins the codes of ranks by |.
    for code in codes:
        others = [other for other in codes - {code} if other & ~code == 0]
        assert reduce(or_, others, 0) != code


DOCS = ROOT / "docs"
# Packages of extras that no environment of `make test-versions` has.
NOT_RUN = {"lightning", "matplotlib", "mlflow", "mpich", "optuna", "pyarrow", "pyspark", "ray"}
NOT_RUN |= {"wandb"}


@pytest.mark.parametrize(
    ("name", "page", "reader", "arguments"),
    [
        ("exchanges_page", "exchanges/measured.md", "read_records", [DOCS / "exchanges/measured"]),
        ("gpu_page", "gpu.md", "read_record", [DOCS / "gpu-record.json"]),
        ("versions_page", "versions.md", "read_record", []),
        ("lint_page", "lint.md", None, []),
    ],
)
def test_a_page_is_what_its_record_says(
    name: str, page: str, reader: str | None, arguments: list[object]
) -> None:
    script = runpy.run_path(str(DOCS / f"{name}.py"))
    text = (DOCS / page).read_text(encoding="utf-8")
    records = [script[reader](*arguments)] if reader else []
    assert script["page"](text, *records) == text, f"run docs/{name}.py --write"


def test_lower_bounds_are_those_that_ran_and_all_passed() -> None:
    record = runpy.run_path(str(DOCS / "versions_page.py"))["read_record"]()
    ran, claimed = record["oldest"]["packages"], lowest((ROOT / "setup.py").read_text())
    assert claimed.keys() - ran.keys() == NOT_RUN

    def plain(version: str) -> str:
        return re.sub(r"(\.0)+$", "", version)

    assert [name for name in ran if plain(claimed[name]) != plain(ran[name])] == []
    for name, end in record.items():
        assert end["packages"].keys() == ran.keys()
        assert [title for title, outcome in end["runs"].items() if outcome != "passed"] == [], name


def test_times_in_the_readme_are_those_of_the_record() -> None:
    measured = json.loads((ROOT / "benchmarks/measured/steps.json").read_text())["cases"].values()
    text, front = (
        " ".join((ROOT / name).read_text(encoding="utf-8").split())
        for name in ("README.md", "docs/index.md")
    )
    assert len(measured) == 5
    for ours in ("hvdtrain", "hvdtrain, sharded"):
        ranges = []
        for peer in ("Horovod", "DDP"):
            ratios = [median(map(truediv, case[ours], case[peer])) for case in measured]
            ranges.append(f"{min(ratios):.2f} to {max(ratios):.2f} of {peer}'s")
        assert f"took {ranges[0]} time, and {ranges[1]}" in text
        assert ours != "hvdtrain" or f"takes {ranges[0]} time on [five models]" in front
