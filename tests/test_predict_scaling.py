"""Predictions: the checked-in inputs, hand-made ones with exact answers, the table and the plot."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from examples.benchmarks import predict_scaling as prediction
from examples.benchmarks.link_model import Assumptions
from examples.benchmarks.plot_scaling import plot
from examples.benchmarks.predict_scaling import ALL_REDUCE, STEP, THREE_D, Inputs, Prediction
from examples.benchmarks.scaling import Outcome, Run

FILE = Path(__file__).parents[1] / "examples/results/scaling_inputs_2x_h200_2026-11-30.json"


@pytest.fixture(scope="module")
def inputs() -> Inputs:
    return Inputs.read(FILE)


def free_kernels(tmp_path: Path, **step: Any) -> Inputs:
    """One link of 1 byte a microsecond for every collective, and kernels that take no time."""
    rate = [[size, size * 2**20] for size in (16, 64)]
    half = [[size, us / 2] for size, us in rate]
    link = {
        "stock_us": {"all_reduce": rate, "reduce_scatter": half, "all_gather": half},
        "send_recv_gb_s": [[8, 1e-3], [32, 1e-3]],
        "compressed_us": {},
        "contention": [0, 1],
        "hop_us": [0, 0],
    }
    names = ("encode_us", "decode_us", "requantize_us", "decode_sum_us")
    exchange = {"kind": "all_reduce", "count": 1, "mebi_values": 32, "bytes_per_value": 2}
    content = {
        "host_us_per_launch": 0,
        "kernels_us": {codec: dict.fromkeys(names, 0.0) for codec in ("int8", "int6g", "int4gs")},
        "links": {"shm": link},
        "step": {
            "exchanges": {"forward": [exchange], "backward": []},
            "measured_ms": [{"link": "shm", "recipe": "none", "ms": 2 * 64 * 2**20 / 1000}],
            "divided": [1, 1],
        }
        | step,
    }
    path = tmp_path / "inputs.json"
    path.write_text(json.dumps(content))
    return Inputs.read(path)


def test_without_kernels_an_all_reduce_gains_what_bytes_say(tmp_path: Path) -> None:
    inputs = free_kernels(tmp_path)
    bits = {"int8": 8.25, "int6g": 6.25, "int4gs": 4.25}
    for each in prediction.predict(inputs):
        if each.what == ALL_REDUCE:
            assert (each.low, each.speedup, each.high) == (pytest.approx(16 / bits[each.codec]),) * 3


def test_a_step_of_half_exchange_by_hand(tmp_path: Path) -> None:
    """Two ranks: half of it is computing. Eight: a quarter of that is left, and the exchange takes 7/4 of its time."""
    inputs = free_kernels(tmp_path)
    link, exchange_ms = inputs.links["shm"], 64 * 2**20 / 1000
    assert prediction.compute_ms(inputs) == pytest.approx(exchange_ms)
    both = Assumptions(divided=1.0)
    assert prediction.step_ms(inputs, link, 2, "none", both) == pytest.approx(2 * exchange_ms)
    assert prediction.step_ms(inputs, link, 8, "none", both) == pytest.approx((0.25 + 1.75) * exchange_ms)
    share = 8.25 / 16
    assert prediction.step_ms(inputs, link, 8, "int8", both) == pytest.approx((0.25 + 1.75 * share) * exchange_ms)
    nothing_forward = prediction.step_ms(inputs, link, 8, "int8", both, ["backward"])
    assert nothing_forward == pytest.approx(2 * exchange_ms)
    undivided = prediction.step_ms(inputs, link, 8, "none", Assumptions(divided=0.5))
    assert undivided == pytest.approx((0.5 + 0.125 + 1.75) * exchange_ms)


def test_more_of_the_step_is_exchange_with_more_ranks(tmp_path: Path) -> None:
    steps = {
        each.num_ranks: each for each in prediction.predict(free_kernels(tmp_path)) if each.key[:2] == (STEP, "int8")
    }
    assert steps[2].speedup < steps[4].speedup < steps[8].speedup < 16 / 8.25
    assert steps[8].high > steps[8].low  # contention


def test_a_step_that_was_not_measured_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no step without compression was measured"):
        prediction.compute_ms(free_kernels(tmp_path, measured_ms=[]))


def test_the_model_gives_back_what_two_gpus_measured(inputs: Inputs) -> None:
    """The figures have one speed of NVLink, shm and computing: within 6%; tcp's own scatter by 10%."""
    rows = prediction.residuals(inputs)
    assert len(rows) == 44
    for name, measured, model in rows:
        limit = 0.11 if "tcp" in name else 0.07
        assert abs(model / measured - 1) < limit, name


def test_two_links_agree_on_what_is_computed(inputs: Inputs) -> None:
    by_link = prediction.compute_ms_by_link(inputs)
    assert set(by_link) == {"nvlink", "shm"}
    assert max(by_link.values()) / min(by_link.values()) < 1.06


def test_predictions_lie_in_their_range(inputs: Inputs) -> None:
    predictions = prediction.predict(inputs)
    assert {each.num_ranks for each in predictions} == {2, 4, 8}
    for each in predictions:
        assert 0 < each.low <= each.speedup * (1 + 1e-9), each
        assert each.speedup <= each.high * (1 + 1e-9), each
        if each.what == ALL_REDUCE and each.num_ranks == 2:
            assert each.high == pytest.approx(each.low)  # nothing is assumed of two ranks
    assert [each.codec for each in predictions if each.what == THREE_D] == ["int8", "balanced"]


def test_three_axes_share_one_link(inputs: Inputs) -> None:
    """With contention eight ranks take four times as long for each exchange of two, kernels left out."""
    link = replace(inputs.links["tcp"], host_us_per_launch=0)
    once = prediction.three_d_ms(inputs, link, "none", Assumptions(), 0, 1)
    shared = prediction.three_d_ms(inputs, link, "none", Assumptions(contention=1), 0, 1)
    assert 3.9 < shared / once <= 4.0  # latencies do not grow
    compute = prediction.three_d_ms(inputs, link, "none", Assumptions(), 50, 1)
    assert compute == pytest.approx(once + 50)
    hidden = prediction.three_d_ms(inputs, link, "none", Assumptions(), 0, 0)
    tensor = 64 * 20 + 4 * 40  # MiB of all-reduces
    assert hidden == pytest.approx(tensor * 2**20 * link.all_reduce.us_per_byte / 1000, rel=1e-3)


def test_measured_figures_stand_beside_the_predicted(inputs: Inputs) -> None:
    two = prediction.measured_by_two(inputs)
    assert two[ALL_REDUCE, "int8", "shm", 2] == pytest.approx(2311 / 1499)
    assert two[ALL_REDUCE, "int6g", "shm", 2] == pytest.approx(2348 / 1241)
    assert not any(what == STEP for what, *_ in two)  # backward only is another thing
    row = {"kind": "all_reduce", "codec": "int8", "MiB": 64.0, "algorithm": "two_shot", "speedup": 1.5}
    rows = [row, {**row, "algorithm": "one_shot", "speedup": 0.5}, {**row, "algorithm": "peer_memory", "speedup": 2.0}]
    steps = {"rows": [{"variant": "none"}, {"variant": "int8+mapped", "speedup": 1.25}]}
    outcomes = [
        Outcome(Run("collectives", "nvlink", 8), "ok", result={"collectives": rows}),
        Outcome(Run("step_time", "nvlink", 4), "ok", result=steps),
        Outcome(
            Run("three_d", "tcp", 8), "ok", result={"rows": [{"variant": "none"}, {"variant": "all", "speedup": 1.6}]}
        ),
        Outcome(Run("three_d", "shm", 8), "cut", "cut after 9 s"),
    ]
    more = prediction.measured_by(outcomes)
    assert more == {
        (ALL_REDUCE, "int8", "nvlink", 8): 1.5,
        (ALL_REDUCE, "int8, mapped", "nvlink", 8): 2.0,
        (STEP, "int8, mapped", "nvlink", 4): 1.25,
        (THREE_D, "int8", "tcp", 8): 1.6,
    }
    given = {each.key: each.measured for each in prediction.with_measured(prediction.predict(inputs), more)}
    assert {key: value for key, value in given.items() if value is not None} == more


def test_the_table_by_hand() -> None:
    rows = [
        Prediction(STEP, "int8", "shm", 2, 1.2, 1.2, 1.2, measured=1.25),
        Prediction(STEP, "int8", "shm", 8, 1.5, 1.25, 1.75),
    ]
    assert prediction.table(rows).splitlines()[2] == (
        "| step | int8 | shm | 1.20x; measured **1.25x** |  | 1.50x (1.25 to 1.75) |"
    )
    assert prediction.residual_table([("step, us", 1000.0, 1100.0)]).splitlines()[2] == (
        "| step, us | 1,000 | 1,100 | +10% |"
    )


def test_the_command_prints_and_plots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "scaling.html"
    monkeypatch.setattr(sys, "argv", ["predict_scaling", str(FILE), "--plot", str(page)])
    prediction.main()
    text = capsys.readouterr().out
    assert f"| {ALL_REDUCE} | int8 | shm | 1.56x; measured **1.54x** |" in text
    assert "| 8 | int8 | 1.18x | 3.39x |" in text
    assert "| on two ranks | measured | model | off by |" in text
    assert "plotly" in page.read_text()[:20000]


def test_the_plot_has_bands_lines_and_points(inputs: Inputs) -> None:
    figure = plot(prediction.with_measured(prediction.predict(inputs), prediction.measured_by_two(inputs)))
    names = [trace.name for trace in figure.data if trace.showlegend]
    assert sorted(names) == ["balanced", "int4gs", "int6g", "int8", "int8, mapped"]
    markers = [trace for trace in figure.data if trace.mode == "markers"]
    assert [(trace.name, list(trace.x)) for trace in markers] == [
        ("int8, measured", [2]),
        ("int8, mapped, measured", [2]),
        ("int8, measured", [2]),
        ("int6g, measured", [2]),
        ("int4gs, measured", [2]),
        ("int8, measured", [2]),
        ("int4gs, measured", [2]),
    ]
    band = next(trace for trace in figure.data if trace.fill == "toself")
    assert list(band.x) == [2, 4, 8, 8, 4, 2]
