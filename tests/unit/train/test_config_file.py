"""Files of options: what they say counts, and what is wrong in them is said with its line."""

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from page_blocks import ROOT, blocks
from refusing import refused

from hvdtrain.cli.train import command
from hvdtrain.errors import UsageError
from hvdtrain.train.config_file import config_text, read_config, resolve
from hvdtrain.train.options import DEFAULT_LR, OPTIONS, TrainOptions


def written(folder: Path, text: str | bytes) -> Path:
    path = folder / "it.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def read(folder: Path, text: str) -> dict[str, Any]:
    return read_config(written(folder, text))


def printed(*words: object) -> str:
    done = CliRunner().invoke(command, [*map(str, words), "--print-config"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


# Whatever a person may write, control characters and half surrogates included.
TEXTS = st.text(min_size=1, max_size=20)
WORDS = TEXTS.filter(str.strip)
RATES = st.floats(min_value=1e-300, max_value=1e300)
PATHS = st.text(st.characters(exclude_characters="\0"), min_size=1, max_size=20).map(Path)
ARGUMENTS = st.dictionaries(
    st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True),
    st.none() | TEXTS | st.just("") | st.lists(TEXTS, max_size=3),
    max_size=3,
)
CONFIGURATIONS = st.fixed_dictionaries(
    {},
    optional={
        "set": ARGUMENTS,
        "data_dir": PATHS,
        "epochs": st.integers(min_value=1, max_value=10**30),
        "batch_size": st.none() | st.integers(min_value=1),
        "seed": st.integers(min_value=0, max_value=2**63 - 1),
        "optimizer": st.sampled_from(list(DEFAULT_LR)),
        "lr": st.none() | RATES | st.integers(min_value=1, max_value=9),
        "clip_norm": st.none() | RATES,
        "amp": st.sampled_from(["none", "bf16", "fp16"]),
        "compile": st.none() | WORDS,
        "out": PATHS,
        "resume": WORDS.filter(lambda text: text != "auto"),
        "checkpoint_every": st.sampled_from(["5 steps", "1.5 minutes", "1 epoch"]),
        "best": WORDS,
        "quiet": st.booleans(),
        "track": st.just("mlflow"),
        "gpu_map": st.none() | st.sampled_from(["0", "01", "3, 2,1"]),
    },
)


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(CONFIGURATIONS)
def test_what_is_printed_says_the_same_when_it_is_read(
    tmp_path: Path, values: dict[str, Any]
) -> None:
    options = TrainOptions(**values)
    text = config_text(options)
    assert resolve({}, written(tmp_path, text)) == options
    # It is YAML to others, too, and has every option.
    assert yaml.safe_load(text).keys() == {option.key for option in OPTIONS}


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "recipe: mnist\nepochs: 3\nbatch_size: 8\nquiet: yes\nset:\n  width: 1\n  depth: 2\n",
    )
    text = printed(
        "--config", path, "--epochs", 5, "--no-quiet", "--set", "depth=3", "--set", "a-b=c=d"
    )
    assert resolve({}, written(tmp_path, text)) == TrainOptions(
        recipe="mnist", epochs=5, batch_size=8, set={"width": "1", "depth": "3", "a_b": "c=d"}
    )
    assert "recipe: cifar10 " in printed("cifar10", "--config", path)
    assert "recipe: mnist " in printed("--config", path)


def test_the_example_of_the_page(tmp_path: Path) -> None:
    (text,) = blocks(ROOT / "docs" / "training.md", "yaml")
    options = resolve({}, written(tmp_path, text))
    assert options.recipe_title == "my_recipe"
    assert options.set == {"width": "64", "sizes": ["32", "64"]}


def test_values_are_read_as_the_option_wants_them(tmp_path: Path) -> None:
    """Not as YAML 1.1 would: no is not False, 1e-3 is a number, 010 a name."""
    text = """
        lr: 1e-3
        warmup-epochs: 2        # a comment
        clip_norm: 1_0.5
        run-name: no
        experiment: 010
        best: off
        compile: 'null'
        data-dir: 1.0
        quiet: on
        share_gpus: No
        backend: ~
        ema:
        set: {norm: no, width: 1e2, list: [1, on, null], text: 'null', nothing: null, x-y: 007}
        track: wandb
        exchange: auto:allow=half+nbit:bits=2/block=64,steps=10
    """
    assert read(tmp_path, text) == {
        "lr": 0.001, "warmup_epochs": 2.0, "clip_norm": 10.5, "run_name": "no",
        "experiment": "010", "best": "off", "compile": "null", "data_dir": Path("1.0"),
        "quiet": True, "share_gpus": False, "backend": None, "ema": None, "track": "wandb",
        "set": {"norm": "no", "width": "1e2", "list": ["1", "on", None], "text": "null",
                "nothing": None, "x_y": "007"},
        "exchange": "auto:allow=half+nbit:bits=2/block=64,steps=10",
    }  # fmt: skip
    assert read(tmp_path, "set:\nepochs: 2") == {"set": {}, "epochs": 2}
    assert read_config(written(tmp_path, b"\xef\xbb\xbfepochs: 2")) == {"epochs": 2}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("epochs: 1\n\nepoch: 3", [":3:", "no option 'epoch'", "did you mean epochs?"]),
        ("warm_up_epochs: 1", [":1:", "did you mean warmup-epochs?"]),
        ("<<: {epochs: 1}", [":1:", "no option '<<'"]),
        ("epochs: 1\nlr: 1\nepochs: 2", [":3:", "epochs", "line 1 already"]),
        ("set: {a: 1,\n a: 2}", [":2:", "a stands in line 1 already"]),
        ("epochs: many", [":1: epochs must be a whole number, got 'many'"]),
        ("epochs: '3'", [":1: epochs must be a whole number, got the quoted text '3'"]),
        ("epochs: 010", [":1: epochs must be a whole number, got '010'"]),
        ("epochs: 1:30", ["a whole number", "'1:30'"]),
        ("epochs: [1]", ["epochs must be a whole number, got a list"]),
        ("epochs:", ["epochs must be a whole number, got nothing"]),
        ("seed: " + "9" * 5000, ["seed must be a whole number, got '999"]),
        ("lr: 1e", ["lr must be a number, got '1e'"]),
        ("quiet: 1", ["quiet must be true or false, got '1'"]),
        ("amp: null", ["amp must be text, got 'null'"]),
        ("set: 1", ["set must be names with values, got '1'"]),
        ("set: {a: {b: 1}}", [":1:", "one value or a list of values", "got names with values"]),
        ("set: {a: &x [*x]}", [":1:", "one value or a list of values", "got a list"]),
        # What makes no sense is told where it stands, too.
        ("\nepochs: 0", [":2: epochs must be at least 1, got 0"]),
        ("optimizer: sdg", [":1: optimizer must be one of sgd, adam", "got 'sdg'"]),
        ("exchange: averag", [":1: exchange 'averag': the name must be one of average, half,"]),
        # Nothing is made or run.
        ("out: !!python/name:os.system", ["must be a path, got the tag", "python/name"]),
        ("set: {a: !!python/object/apply:os.getcwd []}", ["got the tag", "os.getcwd"]),
        ("best: !secret x", ["must be text, got the tag '!secret'"]),
        ("[epochs, 3]", [":1:", "expected lines like 'epochs: 20', got a list"]),
        ("? [a]\n: 1", [":1:", "expected the name of an option, got a list"]),
        ("", ["holds no options"]),
        ("epochs: 1\n---\nepochs: 2", [":2:", "not YAML", "another document"]),
        ("epochs: 1\n  lr: 2", [":2:", "not YAML: mapping values are not allowed here"]),
        ("best: *x", [":1:", "not YAML: found undefined alias"]),
        ("best: \0", ["not YAML", "special characters"]),
        ("[" * 500, ["not YAML", "recursion"]),
    ],
)
def test_bad_files(text: str, words: list[str], tmp_path: Path) -> None:
    with refused(*words, start=str(tmp_path / "it.yaml"), most=400):
        resolve({}, written(tmp_path, text))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for content, reason in [
        (b"epochs: 1\nbest: \xff\n", ":2: not UTF-8"),
        ("epochs: 1".encode("utf-16"), ":1: not UTF-8"),
    ]:
        with pytest.raises(UsageError, match=reason):
            read_config(written(tmp_path, content))
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        read_config(tmp_path / "none.yaml")
    with pytest.raises(UsageError, match="cannot be read: Is a directory"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--set", "width"], "--set 'width': write it as NAME=VALUE"),
        (["--set", "=3"], "--set '=3': write it as NAME=VALUE"),
        (["--set", "a-b=3", "--set", "a_b=4"], "--set a_b is given twice: '3' and '4'"),
    ],
)
def test_bad_arguments_of_recipes(words: list[str], reason: str) -> None:
    with refused(start=reason, most=len(reason) + 1):
        printed(*words)


def test_without_pyyaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Options are printed all the same; only reading a file needs it."""
    monkeypatch.setitem(sys.modules, "yaml", None)
    assert printed().startswith("# What is trained\n")
    with pytest.raises(UsageError, match="--config needs PyYAML: pip install pyyaml"):
        read_config(written(tmp_path, "epochs: 1"))
