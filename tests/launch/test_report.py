"""The page that `report` writes, looked at in a browser."""

import json
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import PATIENCE_MILLISECONDS, chromium, open_page
from made_runs import make_run
from paths import TRAINING
from playwright.sync_api import Browser, Locator, Page
from ranks import start

from hvdtrain.cli.main import main

pytestmark = pytest.mark.browser
PHONE = 375
HOSTILE = "</script><img src=x onerror='window.broken=1'>{{ 7*7 }}<!--"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    make_run(
        folder / "one",
        not_finite_from=1150,
        losses=((300, (1, 3)), (900, (0,))),
        joins=((600, (2, 3)),),
    )
    make_run(folder / "two", lr=0.05, seed=1, slow_rank=None)
    make_run(folder / "three", ranks=8, epochs=8, seed=2, options=(("optimizer", "adamw"),))
    (folder / "three" / "ranks.jsonl").unlink()
    report(folder / "one", out=folder / "one.html")
    report(*(folder / name for name in ("one", "two", "three")), out=folder / "all.html")
    return folder


def report(*runs: Path, out: Path) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["report", *map(str, runs), "--out", str(out)])
    assert stop.value.code == 0


def lines(run: Path) -> dict[tuple[str, int], dict[str, Any]]:
    text = "".join((run / f"{name}.jsonl").read_text() for name in ("metrics", "steps"))
    return {(line["split"], line["step"]): line for line in map(json.loads, text.splitlines())}


def chart(page: Page, metric: str) -> Locator:
    return page.locator(f"figure[data-metric='{metric}'] .plot")


def shown(plot: Locator, axis: str) -> dict[str, tuple[str, str]]:
    """Return what the box of a chart says: for each curve the text of its value, and of its x."""
    assert plot.locator(".reading").is_visible()
    where = plot.locator(".where").inner_text()
    assert where.startswith(f"{axis} ")
    found = {}
    for row in plot.locator(".reading tr").all():
        name, value, at = (cell.inner_text() for cell in row.locator("td").all())
        found[name.strip()] = value, (at or where).removeprefix("at ").removeprefix(f"{axis} ")
    return found


def test_a_value_read_from_a_curve_is_the_one_in_the_file(browser: Browser, runs: Path) -> None:
    known = lines(runs / "one")
    with open_page(browser, runs / "one.html") as opened:
        page = opened.page
        every = {"test", "train", "step"}
        for name, splits in (
            *(("loss", every), ("accuracy", every), ("samples_per_second", every - {"test"})),
            *(("samples_per_second.test", {"test"}), ("lr", {"step"})),
        ):
            plot, metric = chart(page, name), name.removesuffix(".test")
            plot.scroll_into_view_if_needed()
            box = plot.locator(".u-over").bounding_box()
            assert box is not None
            for share in (0.02, 0.2, 0.5, 0.77, 0.99):
                page.mouse.move(box["x"] + share * box["width"], box["y"] + 40)
                found = shown(plot, "step")
                assert set(found) == splits
                for split, (text, at) in found.items():
                    value = known[split, int(at)][metric]
                    assert text == "not finite" if value is None else float(text) == value
                    # It is the curve's point that is next to the pointer.
                    gap = min(abs(share * 1200 - step) for other, step in known if other == split)
                    assert abs(share * 1200 - int(at)) <= gap + 4
            page.mouse.move(0, 0)
            assert not plot.locator(".reading").is_visible()
        assert "not finite at 6 of its points, first at step 1150" in page.inner_text("#charts")
        assert (opened.faults, opened.requests) == ([], [])


def test_ranks_that_were_lost_or_joined_are_listed(browser: Browser, runs: Path) -> None:
    with open_page(browser, runs / "one.html") as opened:
        page = opened.page
        rows = [row.inner_text().split("\t") for row in page.locator("#losses tbody tr").all()]
        assert rows == [
            ["300", "1, 3", "ended", "2", "0.25 s", "128", "0.4"],
            ["900", "0", "asked to leave", "3", "0.25 s", "128", "0.4"],
        ]
        rows = [row.inner_text().split("\t") for row in page.locator("#joins tbody tr").all()]
        assert rows == [["600", "2, 3", "4", "2.50 s", "0.75 s", "128", "0.4"]]
        assert opened.faults == []
    with open_page(browser, runs / "all.html") as opened:
        assert opened.page.locator("#losses table").count() == 1
        assert opened.page.inner_text("#losses h3") == "one"


def test_the_slow_rank_is_named_and_seen(browser: Browser, runs: Path) -> None:
    with open_page(browser, runs / "one.html") as opened:
        page = opened.page
        assert page.inner_text(".verdict").startswith("Rank 2 on node02 is the slowest")
        rows = [row.inner_text().split() for row in page.locator(".bars tbody tr").all()]
        assert [row[0] for row in rows] == ["0", "1", "2", "3"]
        assert float(rows[2][2]) == 0.0
        assert all(float(row[2]) > 1 for row in rows if row[0] != "2")
        heat = page.locator("figure", has_text="Slower than the median rank").locator(".plot")
        heat.focus()
        for key in ("ArrowRight", "ArrowDown", "ArrowDown"):
            page.keyboard.press(key)
        assert heat.locator(".where").inner_text().endswith("rank 2")
        against = heat.locator(".reading .value").first.inner_text()
        assert 30 < float(against.removeprefix("+").removesuffix(" %")) < 70
        assert page.locator(".cells tbody tr").count() == 10
        assert opened.faults == []


def test_names_cannot_break_out_of_the_page(browser: Browser, tmp_path: Path) -> None:
    run = make_run(tmp_path / HOSTILE.replace("/", "\N{DIVISION SLASH}"))
    text = (run / "metrics.jsonl").read_text()
    for name in ("accuracy", "train", "confusion"):
        text = text.replace(f'"{name}"', json.dumps(HOSTILE + name))
    # Names that an object of JavaScript has from the start.
    text = text.replace('"samples_per_second"', '"constructor"').replace('"test"', '"__proto__"')
    (run / "metrics.jsonl").write_text(text)
    (run / "config.yaml").write_text(json.dumps({HOSTILE: {HOSTILE: HOSTILE}}))
    report(run, make_run(tmp_path / "other", seed=1), out=tmp_path / "report.html")
    with open_page(browser, tmp_path / "report.html") as opened:
        page = opened.page
        page.get_by_label("time", exact=True).check(force=True)
        chart(page, "loss").hover()
        assert page.evaluate("window.broken") is None
        assert page.locator("img").count() == 0
        assert page.inner_text(".runs tbody th bdi") == run.name
        assert HOSTILE + "accuracy" in page.inner_text("#charts")
        assert f"{HOSTILE}.{HOSTILE}" in page.inner_text("#configuration")
        assert (opened.faults, opened.requests) == ([], [])
    with open_page(browser, tmp_path / "report.html", width=PHONE) as opened:
        assert opened.page.evaluate("document.documentElement.scrollWidth") == PHONE


def test_a_live_page_shows_what_was_written_since(tmp_path: Path, browser: Browser) -> None:
    metrics = tmp_path / "metrics.jsonl"
    with start([sys.executable, "-m", "hvdtrain", "report", tmp_path, "--live"]) as job:
        job.wait_for(lambda: job.stdout.endswith("\n"), "said an address")
        address = job.stdout.strip()
        assert address.startswith("http://127.0.0.1:")
        page = browser.new_page()
        page.set_default_timeout(PATIENCE_MILLISECONDS)
        assert page.goto(address)
        assert "is not a run: it has no metrics.jsonl" in page.content()
        make_run(tmp_path / "made")
        metrics.write_bytes((tmp_path / "made" / "metrics.jsonl").read_bytes())
        lines = [f"line {number}" for number in range(150)]
        (tmp_path / "log.txt").write_text("\n".join([*lines, HOSTILE]))
        reply = page.reload()
        assert reply is not None
        assert page.inner_text("#log pre").splitlines() == [*lines[51:], HOSTILE]
        assert page.locator("img").count() == 0
        assert reply.headers["refresh"] == "15"
        assert page.locator("figure[data-metric='loss']").count() == 1
        for wrong in (address[:-1], address.rpartition("/")[0]):
            refused = page.request.get(wrong)
            assert (refused.status, refused.headers["content-type"][:9]) == (404, "text/html")
        job.process.send_signal(signal.SIGINT)
        assert job.ended(code=0).stderr == ""


def test_training_serves_its_page_on_the_loopback_device_while_it_lasts(
    tmp_path: Path, browser: Browser
) -> None:
    words = [
        "run",
        "-np",
        2,
        "--",
        "train",
        TRAINING / "point_recipes.py",
        "--out",
        tmp_path / "out",
    ]
    words += ["--live", "--epochs", 10**6]
    with start([sys.executable, "-m", "hvdtrain", *words]) as job:
        job.wait_for_output("  live     http://")
        metrics = tmp_path / "out" / "metrics.jsonl"
        job.wait_for(lambda: metrics.exists() and "\n" in metrics.read_text(), "wrote metrics")
        found = re.search(r"\n  live     (http://127\.0\.0\.1:(\d+)/\S+)\n", job.stdout)
        assert found is not None, job.stdout
        address, port = found[1], int(found[2])
        page = browser.new_page()
        page.set_default_timeout(PATIENCE_MILLISECONDS)
        page.goto(address)
        assert page.locator("figure[data-metric='loss']").count() == 1
        log = page.inner_text("#log pre")
        assert "training" in log.partition("\n")[0]
        assert "\nepoch       1/1000000  train loss " in log
        assert "http" not in log
        open_ends = "".join(Path(f"/proc/net/{name}").read_text() for name in ("tcp", "tcp6"))
        assert re.findall(rf" (\w+):{port:04X} \w+:0000 0A ", open_ends) == ["0100007F"]
        job.interrupt()
        assert "Traceback" not in job.ended(code=130).stderr
