"""What `report` reads from the files of a run, and what it refuses."""

import json
import math
from pathlib import Path

import pytest
from hvdtrain_report.curves import read_curves, thinned
from hvdtrain_report.ranks import read_ranks
from hvdtrain_report.run import distinct_names, read_run
from hvdtrain_report.tables import facts, side_by_side, verdict
from hypothesis import given
from hypothesis import strategies as st
from made_runs import make_run

from hvdtrain.cli.main import main

LINE = {"epoch": 1, "step": 1, "split": "test", "loss": 0.5}
SPAN = {"step": 10, "seconds": 5.0, "span": 5.0, "compute": [4, 2], "waiting": [0, 2]}


def run(*words: object) -> int:
    with pytest.raises(SystemExit) as stop:
        main(["report", *map(str, words)])
    assert isinstance(stop.value.code, int)
    return stop.value.code


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("metrics.jsonl", '{"epoch": 1\n{}\n', "metrics.jsonl, line 1: not a JSON object"),
        ("metrics.jsonl", "{}\n", "line 1: split or step is missing"),
        ("metrics.jsonl", '{"split": "test", "step": 1, "epoch": []}\n', "line 1: epoch is not a"),
        ("metrics.jsonl", "[" * 100_000 + "\n{}\n", "line 1: not a JSON object"),
        ("ranks.jsonl", json.dumps(SPAN | {"moving": [0, "x"]}), "line 1: step, seconds, span or"),
        ("summary.json", "{", "summary.json: not a JSON object"),
        ("config.yaml", "a: [", "config.yaml: not YAML"),
        ("config.yaml", "a: \0", "config.yaml: not YAML"),
    ],
)
def test_a_damaged_file_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str, said: str
) -> None:
    directory = make_run(tmp_path / "run", epochs=1, steps=10)
    (directory / name).write_text(text)
    assert run(directory) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.startswith(f"hvdtrain: {directory}")
    assert error.count("\n") == 1
    assert not (directory / "report.html").exists()


def test_what_is_no_run_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = make_run(tmp_path / "good", epochs=1, steps=10)
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "odd" / "metrics.jsonl").mkdir(parents=True)
    for words, said in (
        ((tmp_path / "none",), "there is no such directory"),
        ((tmp_path / "file",), "is a file: name the directory of a run"),
        ((good, tmp_path / "empty"), "is not a run: it has no metrics.jsonl"),
        ((tmp_path / "odd",), "Is a directory"),
        ((good, "--out", tmp_path / "no" / "page.html"), "cannot be written: No such file"),
        ((good, "--out", tmp_path / "empty"), "cannot be written: Is a directory"),
        ((), "Missing argument 'RUN...'"),
    ):
        assert run(*words) == 2
        error = capsys.readouterr().err
        assert said in error
        assert error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_the_page_lies_beside_the_run_or_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [make_run(tmp_path / name, epochs=1, steps=10) for name in ("a", "b")]
    monkeypatch.chdir(tmp_path)
    assert run("a") == 0
    assert run(*runs) == 0
    written = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in written] == ["a/report.html", "report.html"]
    assert "<title>a, b" in (tmp_path / "report.html").read_text()


def test_what_is_missing_or_left_out_is_said(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", epochs=2, steps=10)
    files = ("summary.json", "config.yaml", "environment.json", "ranks.jsonl", "steps.jsonl")
    for name in files:
        (directory / name).unlink()
    with open(directory / "metrics.jsonl", "a") as file:
        file.write(json.dumps(LINE | {"step": 20, "word": "x", "classes": [1, 2]}) + "\n")
        file.write('{"epoch": 3, "lo')
    assert read_run(directory).notes == [
        "summary.json is missing: the run has not ended, or was stopped.",
        "ranks.jsonl is missing: the page cannot say where the time went.",
        "config.yaml is missing: the options are not known.",
        "environment.json is missing: versions and hosts are not known.",
        "The last line of metrics.jsonl is torn and left out.",
        "classes is neither a number nor a square matrix, and is not shown.",
        "word is neither a number nor a square matrix, and is not shown.",
        "loss (test): 1 line more than steps; of two lines of a step the later counts.",
    ]
    (directory / "metrics.jsonl").write_text("")
    assert "metrics.jsonl has no number yet: there is no curve." in read_run(directory).notes
    assert run(directory) == 0


def test_lines_of_all_kinds_come_in_order(tmp_path: Path) -> None:
    lines: list[dict[str, object]] = [
        LINE | {"step": 3, "loss": 3},
        LINE | {"step": 1, "loss": None},
        LINE | {"step": 2, "split": "train", "hits": 7},
        LINE | {"step": 3, "loss": 1e300, "confusion": [[1, 2], [3, 4]], "seconds": 0.5},
    ]
    path = tmp_path / "metrics.jsonl"
    infinite = '{"epoch": 2, "step": 4, "split": "test", "loss": Infinity}'
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + infinite)
    found = read_curves([path])
    curves = {(curve.split, curve.metric): curve for curve in found.curves}
    loss = curves["test", "loss"]
    assert (loss.step, loss.lines, loss.not_finite) == ([1, 3, 4], 3, 2)
    assert [repr(value) for value in loss.value] == ["nan", "1e+300", "nan"]
    assert [repr(value) for value in loss.seconds] == ["nan", "0.5", "nan"]
    assert curves["train", "hits"].value == [7.0]
    assert found.matrices[0].rows == [[1, 2], [3, 4]]


@given(st.lists(st.floats(-1e308, 1e308) | st.just(math.nan), max_size=60), st.integers(1, 20))
def test_each_stretch_keeps_its_extremes(values: list[float], buckets: int) -> None:
    places = thinned(values, buckets)
    assert places == sorted(set(places))
    if len(values) <= 2 * buckets:
        assert places == list(range(len(values)))
        return
    assert len(places) <= 3 * buckets + 2
    for bucket in range(buckets):
        low, high = (end * len(values) // buckets for end in (bucket, bucket + 1))
        finite = [value for value in values[low:high] if math.isfinite(value)]
        shown = [values[place] for place in places if low <= place < high]
        assert any(map(math.isnan, shown)) == (len(finite) < high - low)
        if finite:
            assert min(finite) in shown
            assert max(finite) in shown


def test_ranks_that_come_and_go(tmp_path: Path) -> None:
    path = tmp_path / "ranks.jsonl"
    more = SPAN | {"compute": [1, 2, 4], "waiting": [3, 2, 0], "moving": [1, 1, 1], "step": 20}
    path.write_text("\n".join(json.dumps(each) for each in (SPAN | {"moving": [1, 1]}, more)))
    times = read_ranks(path)
    assert times.totals == [[5, 4, 4], [3, 4, 0], [2, 2, 1]]
    assert times.last_to_arrive == [5, 0, 5]
    assert times.notes == [
        "From step 20 on there are 3 ranks, before 2: a rank that was not there has no time."
    ]
    assert verdict(times).startswith(
        "Rank 2 is the slowest: it computed 80\u00a0% of its time, the median rank 50\u00a0%"
    )
    path.write_text(json.dumps(SPAN | {"compute": [1, 3], "waiting": [2, 0], "moving": [1, 1]}))
    said = "Rank 1 is the slowest: it computed 75\u00a0% of its time, the other 25\u00a0%."
    assert verdict(read_ranks(path)).startswith(said)


def test_the_best_evaluation_and_no_text_of_a_machine(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    summary = json.loads((run / "summary.json").read_text())
    summary["best"] = {"name": "loss", "value": 0.123456, "epoch": 3.0, "step": 9, "since": 0}
    banner = "Open MPI v5.0.11, package: Open MPI me@there Distribution, ident: 5.0.11"
    (run / "summary.json").write_text(json.dumps({**summary, "mpi": banner, "none": None}))
    found = read_run(run)
    assert facts([found])["best"] == ["loss 0.1235, epoch 3"]
    rows = {row.name: row.texts for row in side_by_side([found.summary])}
    assert (rows["mpi"], rows["none"]) == (["Open MPI v5.0.11"], ["-"])


def test_many_lines_of_many_ranks_are_added_up(tmp_path: Path) -> None:
    path, ranks, count = tmp_path / "ranks.jsonl", 50, 1700
    with open(path, "w") as file:
        for place in range(1, count + 1):
            compute = [4.0 if rank == place % ranks else 2.0 for rank in range(ranks)]
            parts = {"compute": compute, "waiting": [4 - c for c in compute], "moving": [1] * ranks}
            file.write(json.dumps({"step": place, "seconds": 5 * place, "span": 5} | parts) + "\n")
    times = read_ranks(path)
    assert 400 <= len(times.intervals) < 800
    assert [interval.step for interval in times.intervals] == sorted(
        interval.step for interval in times.intervals
    )
    assert times.totals[0] == [2.0 * count + 2 * count / ranks] * ranks
    assert math.fsum(interval.length for interval in times.intervals) == 5 * count
    assert verdict(times).startswith("No rank stands out")


def test_staleness_of_a_parameter_server_is_shown(tmp_path: Path) -> None:
    plain, served = make_run(tmp_path / "plain"), make_run(tmp_path / "served")
    summary = json.loads((served / "summary.json").read_text())
    summary["parameter_server"] = {"mean_staleness": 0.25, "staleness": {"0": 3, "1": 1}}
    (served / "summary.json").write_text(json.dumps(summary))
    runs = [read_run(plain), read_run(served)]
    assert facts(runs)["mean staleness"] == ["", "0.25"]
    assert "mean staleness" not in facts(runs[:1])
    rows = {row.name: row.texts for row in side_by_side([run.summary for run in runs])}
    assert rows["parameter_server.staleness.1"] == ["-", "1"]


def test_runs_have_distinct_names() -> None:
    paths = [Path("/x/a/1"), Path("/x/b/1"), Path("/x/b/1"), Path("/y/2")]
    assert distinct_names(paths) == ["a/1", "b/1", "b/1 (2)", "y/2"]
    assert distinct_names([Path("/x/\udcff")]) == ["\ufffd"]


def test_a_run_of_256_ranks_lists_none_of_them_one_by_one(tmp_path: Path) -> None:
    lost = ((300, tuple(range(32, 64))), (900, tuple(range(0, 256, 2))))
    run = read_run(make_run(tmp_path / "run", ranks=256, losses=lost))
    few = "0, 2, 4, 6, 8, 10, 12, 14, and 120 more up to 254"
    assert [change.texts[1] for change in run.failures] == ["32-63", few]
    rows = {row.name: row.texts for row in side_by_side([run.environment])}
    assert rows["hosts"] == ["node01 (x128), node02 (x128)"]
    assert "failures" not in {row.name for row in side_by_side([run.summary])}
