"""`python -m hvdtrain lint`: its lines, its exit codes, and comments that silence it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hvdtrain_lint.command import check_script
from hvdtrain_lint.running.start import Fact, compare, read_facts
from lint_cases import DDP
from page_blocks import ROOT, blocks

MISTAKE = DDP + "torch.save(model.state_dict(), 'model.pt'){}\n"
LINE = MISTAKE.count("\n")


def lint(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hvdtrain", "lint", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def script(folder: Path, text: str, name: str = "train.py") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_a_finding_is_a_line_and_exit_code_1(tmp_path: Path) -> None:
    path = script(tmp_path, MISTAKE.format(""))
    done = lint(path)
    assert done.returncode == 1
    (line,) = done.stdout.splitlines()
    assert line.startswith(f"{path}:{LINE}: HVD401 torch.save() runs on all ranks: ")
    assert "; write it under `if rank() == 0:`" in line
    assert done.stderr == ""


def test_scripts_without_findings_end_with_0_and_a_line(tmp_path: Path) -> None:
    done = lint(script(tmp_path, DDP), script(tmp_path, "print(1)\n", "other.py"))
    said = "no mistakes found in 2 scripts\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, said, "")


def test_json(tmp_path: Path) -> None:
    path = script(tmp_path, MISTAKE.format(""))
    done = lint("--json", path)
    assert done.returncode == 1
    (finding,) = json.loads(done.stdout)["findings"]
    assert (finding["path"], finding["line"], finding["code"]) == (str(path), LINE, "HVD401")
    assert set(finding) == {"path", "line", "code", "reason", "mend"}
    assert json.loads(lint("--json", script(tmp_path, DDP)).stdout) == {"findings": []}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot be read: No such file or directory"),
        ("for\n", "train.py:1: invalid syntax"),
        ("x = 1\n  y = 2\n", "train.py:2: unexpected indent"),
        ("x = '\0'\n", "null bytes"),
        ("x = " + "-" * 50_000 + "1\n", "an expression has too many parts inside one another"),
        ("# coding: of-nobody\n", "cannot be read: unknown encoding"),
    ],
)
def test_what_is_no_script_is_one_line_and_exit_code_2(
    tmp_path: Path, text: str | None, words: str
) -> None:
    path = tmp_path / "train.py"
    if text is not None:
        path.write_text(text)
    done = lint(path)
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert words in line


def test_findings_come_before_the_errors_of_other_scripts(tmp_path: Path) -> None:
    good = script(tmp_path, MISTAKE.format(""))
    bad, worse = script(tmp_path, "for\n", "bad.py"), tmp_path / "none.py"
    done = lint(bad, worse, good)
    assert done.returncode == 2
    (line,) = done.stdout.splitlines()
    assert line.startswith(f"{good}:{LINE}: HVD401 ")
    first, second = done.stderr.splitlines()
    assert first.startswith(f"hvdtrain: {bad}:1: invalid syntax")
    assert second.startswith(f"hvdtrain: {worse} cannot be read: ")
    again = lint("--json", good, bad)
    assert again.returncode == 2
    assert len(json.loads(again.stdout)["findings"]) == 1


@pytest.mark.parametrize(
    "content",
    [
        b"\xef\xbb\xbf" + MISTAKE.format("").encode(),
        b"# coding: latin-1" + MISTAKE.format("  # \xe9\xe8").encode("latin-1"),
    ],
    ids=["byte order mark", "coding cookie"],
)
def test_scripts_are_read_as_python_reads_them(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "train.py"
    path.write_bytes(content)
    assert [(each.line, each.code) for each in check_script(path)] == [(LINE, "HVD401")]


def test_no_script_is_a_usage_error() -> None:
    done = lint()
    assert done.returncode == 2
    assert "SCRIPT" in done.stderr


@pytest.mark.parametrize(
    ("comment", "silent"),
    [
        ("  # hvdtrain: ignore", True),
        ("  # hvdtrain: ignore HVD401", True),
        ("  # hvdtrain: ignore HVD404, HVD401", True),
        ("  # kept for later  # hvdtrain: ignore[HVD401]", True),
        ("  # hvdtrain: ignore HVD404", False),
        ("  # ignore", False),
        ("; text = '# hvdtrain: ignore'", False),
    ],
)
def test_comments_silence_a_line(tmp_path: Path, comment: str, silent: bool) -> None:
    path = script(tmp_path, MISTAKE.format(comment))
    assert (check_script(path) == []) is silent


def test_a_comment_silences_a_call_of_several_lines(tmp_path: Path) -> None:
    text = DDP + "torch.save(\n    model.state_dict(),\n    'm.pt',  # hvdtrain: ignore\n)\n"
    assert check_script(script(tmp_path, text)) == []


def step(number: int, samples: str, weights: str = "w", rate: str = "0.1") -> list[Fact]:
    """Return the facts of a step in line 9, after the model was called in line 7."""
    facts = [("samples", 7, samples), ("rates", 9, rate), ("weights", 9, weights)]
    return [Fact(kind, number, line, what) for kind, line, what in facts]


def operation(number: int, what: str = "allreduce() of float32 [2]", line: int = 5) -> list[Fact]:
    return [Fact("operation", number, line, what)]


def found(first: list[Fact], second: list[Fact]) -> list[str]:
    return [str(each).partition(";")[0] for each in compare("a.py", first, second)]


# What is no mistake: nothing; different samples in all steps or one; samples that are not seen;
# a rank that has failed, and has come less far.
ONE = operation(0) + step(0, "0")
EQUAL: list[tuple[list[Fact], list[Fact]]] = [
    ([], []),
    (ONE, operation(0) + step(0, "1")),
    (step(0, "0") + step(1, "1"), step(0, "0") + step(1, "2")),
    (step(0, ""), step(0, "")),
    (ONE + operation(1), operation(0) + step(0, "1") + [Fact("failure", 1, 0, "")]),
]


@pytest.mark.parametrize(("first", "second"), EQUAL)
def test_ranks_that_do_the_same_are_right(first: list[Fact], second: list[Fact]) -> None:
    assert found(first, second) == []
    assert found(second, first) == []


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (
            step(0, "0", "a") + step(1, "1", "b"),
            step(0, "2", "a") + step(1, "3", "c"),
            "a.py:9: HVD901 the weights of rank 0 and rank 1 differ after step 2: ",
        ),
        (
            step(0, "0") + step(1, "1"),
            step(0, "0") + step(1, "1"),
            "a.py:7: HVD902 rank 0 and rank 1 had the same samples in 2 of 2 steps: ",
        ),
        (
            operation(0, "allreduce() of float32 [2]") + step(0, "0"),
            operation(0, "allgather() of float32 [2]", 6) + step(0, "1"),
            "a.py:5: HVD903 before step 1, rank 0 calls allreduce() of float32 [2], "
            "rank 1 allgather() of float32 [2] (line 6): ",
        ),
        (
            operation(0, "barrier()") + operation(0) + step(0, "0"),
            operation(0, "barrier()") + step(0, "1") + operation(1),
            "a.py:5: HVD903 before step 1, rank 0 calls allreduce() of float32 [2], "
            "and rank 1 does not: ",
        ),
        (
            step(0, "0"),
            step(0, "1") + operation(1, "barrier()"),
            "a.py:5: HVD903 after step 1, rank 1 calls barrier(), and rank 0 does not: ",
        ),
        (
            step(0, "0") + operation(1, "allreduce()"),
            step(0, "1") + operation(1, "allgather()") + [Fact("failure", 1, 0, "")],
            "a.py:5: HVD903 after step 1, rank 0 calls allreduce(), rank 1 allgather() (line 5): ",
        ),
        (
            step(0, "0", rate="0.1"),
            step(0, "1", rate="0.05"),
            "a.py:9: HVD904 the rates of rank 0 and rank 1 are 0.1 and 0.05 in step 1: ",
        ),
    ],
)
def test_a_difference_is_found(first: list[Fact], second: list[Fact], words: str) -> None:
    (line,) = found(first, second)
    assert line.startswith(words)


def test_what_a_rank_has_written_may_be_cut_off() -> None:
    assert read_facts([json.dumps(operation(2)[0]), '["operati']) == operation(2)


EXAMPLES = sorted(ROOT.glob("examples/*.py"))
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("*/*.md"), *ROOT.glob("docs/*/*.md")])


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_examples_have_no_findings(example: Path) -> None:
    assert [str(each) for each in check_script(example)] == []


def test_code_in_the_documentation_has_no_findings(tmp_path: Path) -> None:
    found = []
    programs = [(page, code) for page in PAGES for code in blocks(page, "python")]
    assert len(programs) > 20
    for number, (page, code) in enumerate(programs):
        script = tmp_path / f"{number}.py"
        script.write_text(code)
        found += [f"{page.relative_to(ROOT)}: {each}" for each in check_script(script)]
    assert found == []
