"""`python -m hvdtrain lint`: its lines, its exit codes, and comments that silence it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hvdtrain_lint.check import check_script
from lint_cases import DDP

MISTAKE = DDP + "torch.save(model.state_dict(), 'model.pt'){}\n"
LINE = MISTAKE.count("\n")


def lint(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the command."""
    command = [sys.executable, "-m", "hvdtrain", "lint", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def script(folder: Path, text: str, name: str = "train.py") -> Path:
    """Write a script."""
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


def test_scripts_without_findings_end_with_0_and_say_nothing(tmp_path: Path) -> None:
    done = lint(script(tmp_path, DDP), script(tmp_path, "print(1)\n", "other.py"))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


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


def test_long_sums_are_no_problem(tmp_path: Path) -> None:
    text = MISTAKE.format("") + "text = " + " + ".join(['"a"'] * 1200) + "\n"
    assert [each.line for each in check_script(script(tmp_path, text))] == [LINE]


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
