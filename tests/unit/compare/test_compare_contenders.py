"""The names on --with, and what each strategy says of itself."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest
from hvdtrain_compare.contenders import parse_contenders
from hvdtrain_compare.jobs import JobEnd
from hvdtrain_compare.protocol import Need, error_file, result_file, write_error
from hvdtrain_compare.strategies import strategies_of
from hvdtrain_compare.turns import failure

from hvdtrain.cli.main import main
from hvdtrain.errors import UsageError


def test_commas_between_options_of_an_exchange() -> None:
    found = parse_contenders(["hvdtrain:nbit:bits=1,warmup=10,ddp,hvdtrain:sharded"], {}, "torch")
    assert [(one.strategy.name, one.variant) for one in found] == [
        ("hvdtrain", "nbit:bits=1,warmup=10"),
        ("ddp", ""),
        ("hvdtrain", "sharded"),
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("hvdtrian", "no such strategy: did you mean hvdtrain"),
        ("ddp:fast", "ddp has no variants"),
        ("", "no such strategy: with --framework torch choose from hvdtrain"),
    ],
)
def test_wrong_names(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parse_contenders([text], {}, "torch")


def test_an_environment_for_a_strategy_that_does_not_take_part() -> None:
    with pytest.raises(UsageError, match="does not name ddp"):
        parse_contenders(["hvdtrain"], {"ddp": sys.executable}, "torch")


@pytest.mark.parametrize("framework", ["torch", "keras"])
def test_the_lines_to_change_are_python(framework: str) -> None:
    for name, strategy in strategies_of(framework).items():
        assert strategy.name == name
        ast.parse(strategy.code)
        assert strategy.lines == len(strategy.code.splitlines())


def test_a_missing_package_is_named_with_its_command() -> None:
    with pytest.raises(UsageError, match="no_such_module is not installed: pip install it"):
        Need("no_such_module.part", "pip install it").require()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--with", "none"], "--with 'none': no such strategy"),
        (["--with", "hvdtrain", "--python", "hvdtrain=/no/such"], "with the path of an interp"),
        (["nothing"], "unknown recipe 'nothing'"),
        (["--framework", "keras", "--with", "ddp"], "no such strategy"),
        (["--repeats", "0"], "Invalid value for '--repeats'"),
    ],
)
def test_wrong_words_are_refused_in_one_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["compare", *words])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_the_cause_of_a_failure_in_one_line(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("all went well\nSegmentation fault\n-----\n\n")

    def said(processes: int, end: JobEnd) -> str:
        return failure(tmp_path, processes, end, log, 5)

    assert said(2, JobEnd(139)) == "it ended with exit code 139: Segmentation fault"
    result_file(tmp_path, 0).touch()
    assert said(1, JobEnd(0)) == ""
    assert said(2, JobEnd(0)) == "rank 1 ended without a result: Segmentation fault"
    write_error(tmp_path, 1, UsageError("torch is\nnot installed"))
    assert said(2, JobEnd(0, late=True)).startswith("it did not end within 5 s")
    assert said(2, JobEnd(1)) == "torch is not installed (rank 1 of 2)"
    write_error(tmp_path, 1, ValueError("x"))
    assert error_file(tmp_path, 1).read_text() == "ValueError: x"
