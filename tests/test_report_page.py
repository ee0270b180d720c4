"""The log of a run, how it is read and thinned out, what the page holds, and every bad input as a sentence."""

import http.client
import json
import math
import multiprocessing
import os
import pickle
import random
import re
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger, Logger

from lightning_taco import CompressionConfig
from lightning_taco.callbacks import RunLogger
from lightning_taco.callbacks.events import Event, EventLogger
from lightning_taco.callbacks.run_logger import FILE_NAME, compression_words
from lightning_taco.report import command, page, report, report_of
from lightning_taco.report.heat import heat_of
from lightning_taco.report.reading import RunReader
from lightning_taco.report.run_data import RunData
from lightning_taco.report.series import Series, buckets, downsample, gap_in_percent
from lightning_taco.report.server import LiveReport, LiveServer
from lightning_taco.report.tables import free_table
from lightning_taco.report.tags import SiteTag, site_tag
from tests.run_logs import DOWN, UP, error_tag, event, run_line, scalars, usual_run, write_log

NASTY = "</script><script>window.hacked=1</script><img src=x onerror=window.hacked=2>&amp;"


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / FILE_NAME).read_text().splitlines()]


def series_of(values: list[float], steps: list[float] | None = None) -> Series:
    series = Series()
    for step, value in zip(range(len(values)) if steps is None else steps, values, strict=True):
        series.add(step, value)
    return series


def data_of(folder: Path) -> RunData:
    data = RunReader(folder).data
    data.sort()
    return data


def content_of(folder: Path, baseline: Path | None = None) -> dict[str, Any]:
    """What the page would show, as the browser gets it."""
    return json.loads(page.as_json(report_of(folder, baseline).content()))


def refusal(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    with pytest.raises(SystemExit) as raised:
        report(args)
    assert raised.value.code == 2
    message = capsys.readouterr().err
    assert "Traceback" not in message
    return message.partition("error: ")[2].strip()


# RunLogger


def test_logger_writes_a_run_then_numbers_and_events(tmp_path: Path) -> None:
    logger = RunLogger(tmp_path / "run")
    assert isinstance(logger, Logger)
    assert isinstance(logger, EventLogger)
    logger.log_hyperparams({"lr": 1e-3, "path": Path("a"), "shape": (2, 3)})
    assert not logger.path.exists(), "nothing is logged yet"
    logger.log_metrics({"loss": torch.tensor(2.5), "a": math.nan, "b": math.inf, "c": -math.inf}, step=3)
    happened = Event(4, "guard", "suspend", DOWN, "error 7%")
    logger.log_event(happened)
    logger.log_metrics({"loss": 1})
    logger.log_hyperparams({"late": True})
    logger.finalize("success")
    run, first, second, third, late, end = lines_of(tmp_path / "run")
    assert run["kind"] == "run"
    assert run["hyperparameters"] == {"lr": 1e-3, "path": "a", "shape": [2, 3]}
    assert run["versions"]["torch"] == torch.__version__
    assert first["values"] == {"loss": 2.5, "a": "NaN", "b": "Infinity", "c": "-Infinity"}
    assert (first["step"], third["step"]) == (3, 4), "without a step it is the next one"
    assert Event(**{name: second[name] for name in ("step", "source", "action", "site", "reason")}) == happened
    assert late == {"kind": "hyperparameters", "time": late["time"], "values": {"late": True}}
    assert (end["kind"], end["status"]) == ("end", "success")
    assert abs(end["time"] - time.time()) < 60


def test_every_line_is_on_disk_when_the_call_returns_and_a_resume_begins_a_new_one(tmp_path: Path) -> None:
    RunLogger(tmp_path).log_metrics({"loss": 1.0}, step=0)
    with (tmp_path / FILE_NAME).open("a") as file:
        file.write('{"kind": "scalars", "step": 1, "val')  # the process died here
    logger = pickle.loads(pickle.dumps(RunLogger(tmp_path)))
    logger.log_metrics({"loss": 0.5}, step=2)
    texts = (tmp_path / FILE_NAME).read_text().splitlines()
    assert [json.loads(texts[place])["kind"] for place in (0, 1, 3, 4)] == ["run", "scalars", "run", "scalars"]
    data = data_of(tmp_path)
    assert list(data.series["loss"].values) == [1.0, 0.5]
    assert data.num_unreadable == 1
    assert [each.action for each in data.events] == ["resume"]


def test_logger_that_cannot_write_warns_once_and_lets_the_training_go_on(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    logger = RunLogger(tmp_path / "file" / "run")
    with pytest.warns(UserWarning, match=r"cannot be written \(Not a directory\).*training goes on"):
        logger.log_metrics({"loss": 1.0}, step=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        logger.log_metrics({"loss": 1.0}, step=1)
        logger.finalize("success")


def test_logger_goes_into_the_folder_of_another_one(tmp_path: Path) -> None:
    class Remote(CSVLogger):  # as a logger of a service: no folder of its own
        log_dir = None

    assert RunLogger.beside(CSVLogger(tmp_path, "name"), "root").path == tmp_path / "name" / "version_0" / FILE_NAME
    remote = Remote(tmp_path, "name", version="id")
    assert RunLogger.beside(remote, "root").path == tmp_path / "name" / "id" / FILE_NAME


def test_logger_of_a_trainer_and_of_fabric(tmp_path: Path) -> None:
    class Logging(BoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("train_loss", 1.0)
            return super().training_step(batch, batch_idx)

    quiet = dict.fromkeys(("enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    limits = {"max_steps": 2, "limit_val_batches": 0, "log_every_n_steps": 1}
    for _ in range(2):
        L.Trainer(logger=[RunLogger(tmp_path / "trainer")], accelerator="cpu", **limits, **quiet).fit(Logging())
    lines = lines_of(tmp_path / "trainer")
    run, *numbers, end = lines[: len(lines) // 2]
    assert [line["step"] for line in numbers if "train_loss" in line["values"]] == [0, 1]
    assert run["settings"]["strategy"] == "SingleDeviceStrategy"
    assert run["settings"]["max_steps"] == 2
    assert run["settings"]["model"] == "Logging"
    assert (end["kind"], end["status"]) == ("end", "success")
    assert data_of(tmp_path / "trainer").num_other_runs == 1

    fabric = L.Fabric(accelerator="cpu", devices=1, loggers=[RunLogger(tmp_path / "fabric")])
    fabric.log_dict({"loss": 2.0}, step=5)
    assert list(data_of(tmp_path / "fabric").series["loss"].steps) == [5]


def test_compression_is_told_in_words() -> None:
    assert compression_words(None) == "off: tensors travel as they are"
    words = compression_words(CompressionConfig(backward=None, exclude=["head"]))
    assert isinstance(words, dict)
    assert words["backward"] == "as it is"
    assert "block 128, Hadamard, 8.25 bits a value" in words["forward"]
    assert words["exclude"] == ["head"]


# Reading


def test_two_starts_are_a_resume_when_steps_go_on_and_two_runs_when_they_begin_again(tmp_path: Path) -> None:
    first = [run_line(), scalars(0, loss=9.0), event(1), scalars(2, loss=8.0), scalars(4, loss=7.0), event(4)]
    resumed = write_log(tmp_path / "resumed", [*first, run_line(settings={"lr": 2}), scalars(3, loss=5.0)])
    data = data_of(resumed)
    assert list(zip(data.series["loss"].steps, data.series["loss"].values, strict=True)) == [(0, 9), (2, 8), (3, 5)]
    assert [(each.step, each.action) for each in data.events] == [(1, "suspend"), (3, "resume")]
    assert data.settings_changed
    assert content_of(resumed)["notes"] == [
        "The run was resumed with other settings; those of the last start are shown."
    ]

    again = write_log(tmp_path / "again", [*first, run_line(settings={"lr": 3}), scalars(0, loss=6.0)])
    data = data_of(again)
    assert list(data.series["loss"].values) == [6.0]
    assert data.events == []
    assert data.info["settings"] == {"lr": 3}
    assert (
        "The log holds 1 earlier run(s), whose steps begin again; the last one is shown." in content_of(again)["notes"]
    )


GARBAGE = [
    "",
    "garbage",
    "{}",
    "[1, 2]",
    '{"kind": "scalars"}',
    '{"kind": "scalars", "step": "x", "values": {}}',
    '{"kind": "scalars", "step": NaN, "values": {"loss": 1}}',
    '{"kind": "scalars", "step": 1, "values": [1]}',
    '{"kind": "event"}',
    '{"kind": "hyperparameters", "values": 3}',
    "[" * 100_000,
    "\ud800".encode("utf-8", "surrogatepass").decode("utf-8", "replace"),
]


def test_garbage_between_lines_is_counted_and_left_out(tmp_path: Path) -> None:
    odd_values = {"loss": 2.0, "text": "x", "none": None, "list": [1], "flag": True, "huge": 10**400}
    folder = write_log(tmp_path, [run_line(), *GARBAGE, scalars(1, **odd_values), *GARBAGE])
    data = data_of(folder)
    assert {tag: list(series.values) for tag, series in data.series.items()} == {"loss": [2.0], "huge": [math.inf]}
    num_bad = 2 * (len(GARBAGE) - 1)  # an empty line is no garbage
    assert data.num_unreadable == num_bad
    assert content_of(folder)["notes"] == [f"{num_bad} line(s) of {FILE_NAME} could not be read and are left out."]


def test_settings_of_any_shape_are_shown(tmp_path: Path) -> None:
    deep: Any = {"end": 1}
    for _ in range(200):
        deep = {"a": deep, "b": [[deep]]} if _ < 3 else {"a": deep}
    folder = write_log(tmp_path, [run_line(settings=deep, versions=["odd"], hyperparameters=3), scalars(0, loss=1.0)])
    assert content_of(folder)["settings"][0][0] == "settings"


@pytest.mark.parametrize("cut", [1, 5, 40])
def test_half_written_last_line_is_left_out_until_it_is_whole(tmp_path: Path, cut: int) -> None:
    last = json.dumps(scalars(7, loss=1.5))
    folder = write_log(tmp_path, [run_line(), scalars(0, loss=2.0), last[:-cut]], end="")
    reader = RunReader(folder)
    assert list(reader.data.series["loss"].values) == [2.0]
    assert reader.notes() == [f"The last line of {FILE_NAME} is half-written and left out."]
    assert not reader.update()
    with reader._log.path.open("a") as file:
        file.write(last[-cut:])
    assert reader.update()
    assert list(reader.data.series["loss"].values) == [2.0, 1.5]
    with reader._log.path.open("a") as file:
        file.write("\n" + json.dumps(scalars(8, loss=1.0)) + "\n")
    assert reader.update()
    assert (list(reader.data.series["loss"].values), reader.notes()) == ([2.0, 1.5, 1.0], [])
    write_log(tmp_path, [run_line(), scalars(0, loss=3.0)])  # made anew, and shorter
    assert reader.update()
    assert list(reader.data.series["loss"].values) == [3.0]


def test_table_of_csv_logger_is_read_too(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, name="", version="")
    logger.log_metrics({"train_loss": 2.0, error_tag(DOWN): 0.02}, step=0)
    logger.log_metrics({"train_loss": math.nan}, step=1)
    logger.log_metrics({"val_loss": math.inf}, step=1)
    logger.save()
    content = content_of(tmp_path)
    assert "Read from metrics.csv" in content["notes"][0]
    assert content["tables"]["sites"]["rows"][0][0][0] == "model.mlp.down"
    data = data_of(tmp_path)
    assert list(data.series["train_loss"].steps) == [0, 1]
    assert math.isnan(data.series["train_loss"].values[1])
    path = tmp_path / "metrics.csv"
    path.write_text(path.read_text() + "x,y\n1,2,3,4,5,6\n\0,\n7,0.1234,")
    reader = RunReader(tmp_path)
    assert (reader.data.num_unreadable, reader.data.is_truncated) == (3, True)
    assert reader.data.last_step == 1


def test_log_of_run_logger_wins_unless_nothing_is_in_it(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("step,loss\n3,4.0\n")
    write_log(tmp_path, [run_line()])
    assert RunReader(tmp_path).source == "metrics.csv"
    write_log(tmp_path, [run_line(), scalars(0, loss=1.0)])
    assert RunReader(tmp_path).source == FILE_NAME


@pytest.mark.parametrize("site", ["model.mlp.down", "a/b/c", NASTY, "forward", " "])
def test_tag_of_a_site_is_taken_apart_whatever_the_name_holds(site: str) -> None:
    tag = site_tag(f"compression/relative_error/backward/{site}/all_gather")
    assert tag == SiteTag("relative_error", "backward", site, "all_gather")


# Thinning out


def test_buckets_cut_without_loss() -> None:
    steps = sorted(random.Random(0).sample(range(10_000), 700))
    parts = list(buckets(steps, 13))
    assert [index for part in parts for index in part] == list(range(700))
    width = (steps[-1] - steps[0]) / 13
    assert all(steps[part[-1]] - steps[part[0]] <= width for part in parts)
    assert [list(part) for part in buckets([5.0, 5.0, 5.0], 4)] == [[0, 1, 2]]


def test_extremes_of_each_bucket_survive() -> None:
    """Against a plain search in each bucket, with single peaks anywhere."""
    generator = random.Random(1)
    values = [generator.gauss(0, 1) for _ in range(20_000)]
    for place in (1, 777, 12_345, 19_998):
        values[place] = 100.0 + place
    series = series_of(values)
    line = downsample(series, 50)
    assert len(line.x) <= 102
    assert line.x == sorted(line.x)
    shown = dict(zip(line.x, line.y, strict=True))
    for part in buckets(series.steps, 50):
        for extreme in (min(part, key=values.__getitem__), max(part, key=values.__getitem__)):
            assert shown[extreme] == pytest.approx(values[extreme], rel=1e-5)
    assert {0, 19_999, 1, 777, 12_345, 19_998} <= shown.keys()


def test_short_series_is_kept_whole_and_what_is_not_finite_is_a_gap_with_a_mark() -> None:
    line = downsample(series_of([1.0, math.nan, 2.0, math.inf, -math.inf], [0, 10, 20, 30, 40]))
    assert line.x == [0, 10, 20, 30, 40]
    assert line.y == [1, None, 2, None, None]
    assert line.marks == [(10, "NaN"), (30, "Inf"), (40, "-Inf")]


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 5_000, 9_999])
def test_one_odd_value_among_many_is_not_thinned_out_and_hides_no_extreme(odd: float, place: int) -> None:
    values = [float(index % 7) for index in range(10_000)]
    values[place] = odd
    values[5_001] = 50.0
    line = downsample(series_of(values), 20)
    assert [mark.step for mark in line.marks] == [place]
    assert line.y[line.x.index(place)] is None
    assert 50 in line.y
    assert len(line.x) <= 20 * 3 + 2


def test_gap_to_the_baseline() -> None:
    baseline = series_of([2.0, 4.0, 0.0, math.nan, 1.0], [0, 10, 20, 30, 40])
    run = series_of([2.2, 3.3, 4.0, 9.0, 9.0, 1.1, 9.0], [0, 5, 10, 20, 25, 40, 50])
    gap = gap_in_percent(run, baseline)
    assert list(gap.steps) == [0, 5, 10, 40], "not beside 0 or NaN, and not outside"
    assert list(gap.values) == pytest.approx([10, 10, 0, 10])


def test_heat_map_holds_the_largest_of_each_cell() -> None:
    generator = random.Random(2)
    first = series_of([generator.random() for _ in range(1000)])
    second = series_of([0.5, math.nan, 0.25, math.inf], [3, 500, 501, 999])
    heat = heat_of({"first": first, "second": second}, 10)
    assert len(heat.columns) == 10
    for (start, end), cell in zip(heat.columns, heat.cells[0], strict=True):
        assert cell == pytest.approx(max(first.values[int(start) : int(end) + 1]), rel=1e-5)
    assert heat.cells[1] == [0.5, None, None, None, None, 0.25, None, None, None, None]
    assert heat.marks == [(5, 1, "NaN"), (9, 1, "Inf")]
    assert heat.middles == pytest.approx([49.95 + 99.9 * column for column in range(10)]), "even: drawn as an image"
    few = heat_of({"a": series_of([1.0, 2.0], [0, 50]), "b": series_of([3.0], [20])})
    assert (few.columns, few.cells) == ([(0, 0), (20, 20), (50, 50)], [[1, None, 2], [None, 3, None]])
    assert few.middles == [0, 20, 50]


# The page


def test_content_of_a_usual_run(tmp_path: Path) -> None:
    folder = write_log(tmp_path / "run", usual_run())
    (folder / "break_even.json").write_text('{"rows": [{"bytes": 1024, "us": 2.5}, {"bytes": 2048, "link": "tcp"}]}')
    (folder / "config.yaml").write_text("seed: 0\n")
    slower = [scalars(line["step"], train_loss=2.0) for line in usual_run() if line["kind"] == "scalars"]
    content = content_of(folder, write_log(tmp_path / "other", [run_line(), *slower]))
    assert set(content["figures"]) == {"loss", "error", "gradients", "bytes", "events"}
    assert [trace["name"] for trace in content["figures"]["loss"]["data"]] == [
        "train_loss",
        "val_loss",
        "train_loss (baseline)",
        "train_loss",
    ]
    cards = {card["label"]: card["value"] for card in content["cards"]}
    assert cards["last step"] == "59"
    assert cards["gap to the baseline"] == f"{100 * ((4 - 59 / 60) / 2 - 1):+.2f}%"
    assert cards["compression"] == "3.9x"
    assert cards["worst site now"] == "2.5%"
    sites = content["tables"]["sites"]
    assert [row[0][0] for row in sites["rows"]] == ["model.mlp.up", "model.mlp.down"], "the worst first"
    names = [name for name, _ in sites["columns"]]
    worst = {name: cell[0] for name, cell in zip(names, sites["rows"][1], strict=True)}
    assert worst["largest error"] == "1.5%"
    assert worst["at step"] == "50"
    assert worst["largest, dB"] == f"{20 * math.log10(0.015):.1f}"
    assert worst["state"] == "sent as it is since step 30"
    assert content["tables"]["break_even"]["rows"][1] == [["2,048", 2048.0], ["", -1e308], ["tcp", "tcp"]]
    assert dict(content["settings"][0][1])["compression.forward"] == "int8, block 128"
    assert content["files"] == {"config.yaml": "seed: 0\n"}


def test_figures_are_valid_for_plotly(tmp_path: Path) -> None:
    import plotly.graph_objects as go

    lines = [*usual_run(), scalars(60, train_loss="NaN", **{error_tag(DOWN): "Infinity"})]
    for figure in content_of(write_log(tmp_path, lines))["figures"].values():
        go.Figure(figure)


class Elements(HTMLParser):
    """Names of the elements of a page, and the attributes that make one fetch or run something."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.names: list[str] = []
        self.active: list[tuple[str, str, str | None]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.active += [(tag, name, value) for name, value in attrs if name in ("src", "href") or name.startswith("on")]


def test_nothing_of_a_log_becomes_html_or_script(tmp_path: Path) -> None:
    """The page has the same elements as one of a harmless log, fetches nothing, and still shows the names."""
    lines = [
        run_line(settings={NASTY: NASTY}, versions={NASTY: NASTY}),
        scalars(0, **{f"loss {NASTY}": 1.0, error_tag(f"forward/{NASTY}/{NASTY}"): 0.5, "gradient_norm": 1.0}),
        event(0, action=NASTY, site=NASTY, reason=NASTY) | {"source": NASTY},
    ]
    folder = write_log(tmp_path / "x<script>", lines)
    (folder / "break_even.json").write_text(json.dumps([{NASTY: NASTY}]))
    (folder / "hparams.yaml").write_text(NASTY)
    report([str(folder)])
    text = (folder / "report.html").read_text()
    report([str(write_log(tmp_path / "good", usual_run()))])
    found, usual = Elements(text), Elements((tmp_path / "good" / "report.html").read_text())
    assert found.names == usual.names
    assert {value for _, _, value in found.active} == {"data:,", "#main"}
    assert "<img" not in text.replace(page._plotly_script(), "")
    content = re.search(r'<script id="content" type="application/json">(.*?)</script>', text, re.DOTALL)
    assert content is not None
    assert json.loads(content[1])["tables"]["sites"]["rows"][0][0][0].endswith(NASTY.rpartition("/")[0])
    allowed = re.search(r"""content="default-src 'none'; script-src 'nonce-([\w-]+)';""", text)
    assert allowed is not None
    assert text.count(f'<script nonce="{allowed[1]}">') == 2, "no other script runs"


def test_texts_for_plotly_are_escaped(tmp_path: Path) -> None:
    lines = [scalars(0, **{f"loss {NASTY}": 1.0, error_tag(f"forward/{NASTY}/k"): 0.5}), event(0, site=NASTY)]
    figures = content_of(write_log(tmp_path, [run_line(), *lines]))["figures"]
    text = json.dumps(figures)
    assert not re.search(r"<(?!br>|extra>|/extra>)", text)


def test_rows_of_any_json_are_a_table() -> None:
    assert free_table(None) is None
    assert free_table([]) is None
    lists = free_table([[1, "a"], [2]])
    assert lists is not None
    assert (lists.columns, [[cell.text for cell in row] for row in lists.rows]) == (
        [("1", True), ("2", False)],
        [["1", "a"], ["2", ""]],
    )
    single = free_table({"a": 1, "b": {"c": [2]}})
    assert single is not None
    assert [cell.text for cell in single.rows[0]] == ["1", '{"c": [2]}']
    long = free_table([{"a": index} for index in range(3000)])
    assert long is not None
    assert (len(long.rows), long.note) == (2000, "1,000 more rows are not shown.")


def test_a_long_run_stays_small(tmp_path: Path) -> None:
    """100 sites of 5000 steps, every tenth measured: the page holds what a screen can show."""
    sites = [f"forward/blocks.{index}.down/all_reduce" for index in range(100)]
    content = content_of(write_log(tmp_path, usual_run(5000, sites)))
    assert max(len(trace["x"]) for trace in content["figures"]["loss"]["data"]) <= 1502
    heat = content["figures"]["error"]["data"][0]
    assert (len(heat["z"]), len(heat["z"][0])) == (100, 240)
    assert len(page.as_json(content)) < 2_500_000


# Bad input


def test_report_is_written_beside_the_log_or_where_it_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_log(tmp_path / "run", usual_run())
    report([str(folder)])
    assert capsys.readouterr().out == f"Wrote {folder / 'report.html'}\n"
    report([str(folder), "--output", str(tmp_path / "page.html")])
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
    assert sorted(path.name for path in folder.iterdir()) == [FILE_NAME, "report.html"], "no half-written file is left"


def test_what_cannot_be_shown_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    assert f"{empty} holds no log (neither {FILE_NAME} nor metrics.csv)" in refusal(capsys, str(empty))
    write_log(tmp_path / "runs" / "gpt" / "version_0", usual_run())
    assert "but folders in it do: gpt/version_0; give one of them" in refusal(capsys, str(tmp_path / "runs"))
    assert "does not exist" in refusal(capsys, str(tmp_path / "nowhere"))
    assert "is not a folder" in refusal(capsys, str(tmp_path / "runs/gpt/version_0" / FILE_NAME))
    assert "cannot be read (File name too long)" in refusal(capsys, "x" * 5000)
    garbage = write_log(tmp_path / "garbage", ["one", "two"])
    assert "has no line that could be read; is it a log of RunLogger" in refusal(capsys, str(garbage))
    good = str(tmp_path / "runs/gpt/version_0")
    assert f"--baseline: {empty} holds no log" in refusal(capsys, good, "--baseline", str(empty))
    assert "is a folder; give --output the name of a file" in refusal(capsys, good, "--output", str(tmp_path))
    assert "--output writes a file and --live serves" in refusal(capsys, good, "--output", "a", "--live")
    assert "give --live too" in refusal(capsys, good, "--port", "1")
    assert "'x' is not a port; give a number from 0 to 65535" in refusal(capsys, good, "--live", "--port", "x")


def test_what_cannot_be_written_is_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As root no folder is read-only, so the system's answer is made up; the other way is a folder that is none."""
    folder = write_log(tmp_path / "run", usual_run(3))
    with monkeypatch.context() as patch:
        patch.setattr(command.tempfile, "mkstemp", _refuse)
        assert "report.html cannot be written (Read-only file system); choose another place with --output FILE" in (
            refusal(capsys, str(folder))
        )
    message = refusal(capsys, str(folder), "--output", str(tmp_path / "nowhere" / "page.html"))
    assert "cannot be written (No such file or directory)" in message
    monkeypatch.setattr(Path, "open", _refuse)
    assert f"{FILE_NAME} cannot be read (Read-only file system)" in refusal(capsys, str(folder))


def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise OSError(30, os.strerror(30))


def test_without_plotly_one_sentence_says_how_to_get_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page, "find_spec", lambda name: None)
    message = refusal(capsys, str(write_log(tmp_path, usual_run(3))))
    assert message == "The report needs plotly, which is not installed; pip install 'lightning-taco[report]'."


@pytest.mark.parametrize(
    "lines",
    [
        [run_line()],
        [event(3)],
        [scalars(0)],
        [scalars(0, loss="NaN"), scalars(1, loss="Infinity")],
        [scalars(1e300, loss=1e300), scalars(-1e300, loss=-1e300)],
        [scalars(0, gradient_norm="NaN", **{"compression/ratio": "NaN", error_tag(DOWN): "NaN", error_tag(UP): 0})],
        [scalars(0, val_loss=0.0), event(0) | {"time": 1e300}],
        [scalars(0, **{"": 1.0, "/": 2.0, "compression///": 3.0, "\ud800": 4.0, "loss\n\0": 5.0})],
        [scalars(0, **{error_tag("forward/blocks." + "9" * 5000 + "/k"): 1.0})],
    ],
    ids=["run", "event", "empty", "nonfinite", "huge", "nan", "zero", "names", "digits"],
)
def test_odd_logs_make_a_page(tmp_path: Path, lines: list[dict[str, Any]]) -> None:
    folder = write_log(tmp_path / "run", lines)
    report([str(folder), "--baseline", str(folder)])
    assert (folder / "report.html").stat().st_size > 1_000_000


# The live page


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LiveServer]:
    folder = write_log(tmp_path / "run", usual_run())
    with LiveServer(LiveReport(report_of(folder)), 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(server: LiveServer, path: str, **headers: str) -> tuple[int, bytes, str | None]:
    connection = http.client.HTTPConnection(*server.server_address[:2], timeout=10)
    connection.request("GET", path, headers={name.replace("_", "-"): value for name, value in headers.items()})
    answer = connection.getresponse()
    found = answer.status, answer.read(), answer.getheader("ETag")
    connection.close()
    return found


def test_live_numbers_follow_the_log(server: LiveServer, tmp_path: Path) -> None:
    status, body, tag = ask(server, "/data.json")
    assert (status, json.loads(body)["poll_seconds"]) == (200, 2.0)
    assert tag is not None
    assert ask(server, "/data.json", If_None_Match=tag)[0] == 304
    with (tmp_path / "run" / FILE_NAME).open("a") as file:
        file.write(json.dumps(scalars(61, train_loss=0.5)) + "\n")
    status, body, other = ask(server, "/data.json", If_None_Match=tag)
    assert (status, other != tag) == (200, True)
    assert json.loads(body)["cards"][0]["value"] == "61"
    (tmp_path / "run" / FILE_NAME).unlink()
    assert ask(server, "/data.json")[1] == body, "the last state stays"
    assert ask(server, "/")[1].startswith(b"<!doctype html>")


def test_live_page_is_for_this_machine_only(server: LiveServer) -> None:
    assert server.server_address[0] == "127.0.0.1"
    assert ask(server, "/data.json", Host="evil.example:80")[0] == 403
    assert ask(server, "/../../etc/passwd")[0] == 404


def test_port_that_is_used_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_log(tmp_path, usual_run(3))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        message = refusal(capsys, str(folder), "--live", "--port", str(port))
    assert message == f"Port {port} is in use; choose another with --port, or any free one with --port 0."


def test_ctrl_c_ends_the_live_page(tmp_path: Path) -> None:
    folder = write_log(tmp_path, usual_run(3))
    receiver, sender = os.pipe()

    def serve() -> None:
        # A suite that was started in the background ignores Ctrl-C, and so would this process.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.dup2(sender, 1)
        sys.stdout = os.fdopen(1, "w")
        report([str(folder), "--live", "--port", "0"])

    process = multiprocessing.get_context("fork").Process(target=serve, daemon=True)
    process.start()
    os.close(sender)
    with os.fdopen(receiver) as out:
        assert re.match(r"Serving http://127\.0\.0\.1:\d+/", out.readline())
        assert process.pid is not None
        os.kill(process.pid, signal.SIGINT)
        process.join(timeout=30)
        assert (process.exitcode, out.read()) == (0, "\nEnded.\n")
