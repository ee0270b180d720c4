"""``lightning-taco bench``: its options, what it refuses, its tables, and one real launch."""

import io
import json
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rich.console import Console

from lightning_taco import CodecConfig, cli
from lightning_taco.bench import bench, checks, plot, settings
from lightning_taco.bench.exchanges import Exchanges
from lightning_taco.bench.launch import BenchError, chosen_device, run_ranks
from lightning_taco.bench.plot import speed_ups
from lightning_taco.bench.settings import BenchSettings, parse_bytes
from lightning_taco.bench.table import bytes_allow, print_figures
from lightning_taco.collectives import calibration
from lightning_taco.collectives.algorithms import DATA_PARALLEL_KINDS, KINDS, MEASURED_KINDS
from lightning_taco.collectives.break_even import BreakEven
from lightning_taco.collectives.break_even_file import from_json, load, to_json
from lightning_taco.collectives.calibration import RankGroup
from lightning_taco.config import RECIPES
from lightning_taco.data_parallel.settings import weight_differences
from tests.ranks import run_forked
from tests.test_launch import launch
from tests.timings import INT4, INT8, TOPOLOGY, all_algorithms, hand_made, timing

GRADIENTS, WEIGHTS = CodecConfig(rounding="stochastic"), weight_differences()

# Options


def test_default_options_are_ready_for_the_recipes() -> None:
    codecs = BenchSettings().codec_configs()
    for name in BenchSettings().codecs:
        recipe = RECIPES[name]
        assert recipe is not None
        assert set(recipe.codecs) <= set(codecs)
    assert len(set(codecs)) == len(codecs) == 4
    assert BenchSettings(codecs=["int5", "int5", "int8"]).codec_configs() == (CodecConfig(element="int5"), INT8)


def test_sizes_are_sorted_and_once_each() -> None:
    assert BenchSettings(sizes=["1MiB", "4096", "1024 KiB"]).num_bytes("cpu") == (4096, 1 << 20)
    for device, names in (("cuda", settings.CUDA_SIZES), ("cpu", settings.CPU_SIZES)):
        assert BenchSettings().num_bytes(device) == tuple(parse_bytes(name) for name in names)


@pytest.mark.parametrize("text", ["", "x", "-1", "0", "0.4", "1 parsec", "1,5MiB", "MiB", "1e3"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{text!r} is not a size; give bytes, or a number with KiB")):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--codecs", "int9"], "codecs: 'int9' is unknown; use one or more of default, taco, int8, balanced, smallest"),
        (["--codecs", "none"], "codecs: 'none' is unknown"),
        (["--kinds", "broadcast"], "kinds: 'broadcast' is unknown; use one or more of all_reduce, reduce_scatter"),
        (["--sizes", "1MB"], "'1MB' is not a size; give bytes, or a number with KiB, MiB or GiB, such as 64KiB"),
        (["--rounds", "0"], "rounds=0 is below 1; give the number of rounds"),
        (["--rounds", "few"], "rounds"),
        (["--num_ranks", "1"], "num_ranks=1: it takes two ranks to exchange anything; give 2 or more"),
        (["--output", "."], "output=. is a folder; give the name of a file"),
        (["--device", "tpu"], "device"),
        (
            ["--device", "cuda", "--num_ranks", "64"],
            "device=cuda needs a GPU for each of 64 ranks, but this machine has",
        ),
        (["--speed", "9"], "speed"),
    ],
)
def test_impossible_options_are_refused_in_words(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, options: list[str], message: str
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit) as raised:
        bench(options)
    assert raised.value.code == 2
    assert re.search(message, capsys.readouterr().err)


def test_one_rank_of_torchrun_speaks_for_all(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {"RANK": "1", "WORLD_SIZE": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    for options in (["--rounds", "0"], []):
        with pytest.raises(SystemExit) as raised:
            bench(options)
        assert raised.value.code == 2
    assert capsys.readouterr().err == ""
    with pytest.raises(BenchError, match=re.escape("torchrun has started 1 process(es); it takes two or more")):
        run_ranks(BenchSettings())


def test_plot_without_plotly_is_refused_first(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_taco.bench.command.has_plotly", lambda: False)
    with pytest.raises(SystemExit):
        bench(["--plot", "plot.html"])
    assert "--plot needs plotly; install it with: pip install 'lightning-taco[report]'" in capsys.readouterr().err


def test_options_come_from_a_file_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[BenchSettings] = []
    monkeypatch.setattr("lightning_taco.bench.command.run_ranks", lambda given: seen.append(given) or 0)
    (tmp_path / "bench.yaml").write_text("codecs: [int4]\nrounds: 3\nsizes: [64KiB]\n")
    monkeypatch.setattr(
        sys, "argv", ["lightning-taco", "bench", "--config", str(tmp_path / "bench.yaml"), "--rounds=4"]
    )
    cli.main()
    (given,) = seen
    assert given == BenchSettings(codecs=["int4"], rounds=4, sizes=["64KiB"], kinds=list(MEASURED_KINDS))
    monkeypatch.setattr("lightning_taco.bench.command.run_ranks", lambda given: 1)
    with pytest.raises(SystemExit) as raised:
        cli.main()
    assert raised.value.code == 1


@pytest.mark.parametrize(
    ("device", "num_gpus", "num_ranks", "chosen"),
    [
        ("auto", 0, None, "cpu"),
        ("auto", 1, None, "cpu"),  # one GPU has nobody to talk to
        ("auto", 2, None, "cuda"),
        ("auto", 2, 4, "cpu"),
        ("cuda", 4, 4, "cuda"),
        ("cpu", 8, None, "cpu"),
    ],
)
def test_device_is_cuda_where_each_rank_has_one(device: Any, num_gpus: int, num_ranks: int | None, chosen: str) -> None:
    assert chosen_device(BenchSettings(device=device), num_gpus, num_ranks) == chosen


# Checks before timing


def test_wrong_results_are_found_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(rank: int) -> list[str | None]:
        assert dist.group.WORLD is not None
        ranks = RankGroup(dist.group.WORLD, torch.device("cpu"))
        call = calibration.compressed_call
        exchanges = Exchanges.over(ranks, BenchSettings().codec_configs(), MEASURED_KINDS)
        found = [checks.problem_of(exchanges, MEASURED_KINDS)]
        changes = (lambda result: result * 1.2, lambda result: result * float("nan"), lambda result: result + 1e-6)
        for change in changes:

            def wrong(*arguments: Any, change: Any = change) -> Any:
                result = call(*arguments)()
                return lambda: change(result) if rank == 1 else result

            pytest.MonkeyPatch().setattr(calibration, "compressed_call", wrong)
            only_int8 = Exchanges.over(ranks, [INT8], ("all_reduce", "all_gather"))
            found.append(checks.problem_of(only_int8, ("all_reduce", "all_gather")))
        return found

    first, second = run_forked(2, check)
    assert first[0] is None
    assert second[0] is None
    for text, other in zip(first[1:3], second[1:3], strict=True):
        assert text is not None
        assert other is not None
        assert text.startswith("all_reduce by one_shot, int8, block 128, Hadamard: the relative error on rank 0 is 0.0")
        assert "on a rank above 0.1" in other
    assert first[3] == second[3] == "all_reduce by one_shot, int8, block 128, Hadamard: the ranks hold different bits"


def test_gradients_between_nodes_go_in_two_levels_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")

    def check(rank: int) -> tuple[list[str], str | None]:
        assert dist.group.WORLD is not None
        ranks = RankGroup(dist.group.WORLD, torch.device("cpu"))
        exchanges = Exchanges.over(ranks, [INT8], DATA_PARALLEL_KINDS)
        return list(exchanges.gradients), checks.problem_of(exchanges, DATA_PARALLEL_KINDS)

    inside, between = str(GRADIENTS), str(replace(GRADIENTS, element="int4"))
    assert run_forked(4, check) == 4 * [([inside, between, f"{inside} inside nodes, {between} between"], None)]


# Tables


def shown(measured: Any, codecs: Sequence[CodecConfig]) -> str:
    console = Console(file=io.StringIO(), width=140)
    print_figures(measured, {str(codec): codec for codec in codecs}, 12.5, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_tables_show_every_timing_and_the_break_even() -> None:
    both = BreakEven.of((*hand_made(4096).break_even.timings, *hand_made(None, (INT4,)).break_even.timings))
    text = shown(hand_made()._replace(break_even=both), (INT8, INT4))
    for kind in KINDS:
        assert f"{kind}, int8, block 128, Hadamard" in text
    assert re.search(r"4\.0 KiB │ one_shot │ +1\.0 │ +0\.5 │ +2\.00x │ +3\.\d\dx │ +1\.00%", text)
    assert re.search(r"100 B │ one_shot │ +1\.0 │ +2\.0 │ +0\.50x", text)
    assert re.search(r"int8, block 128, Hadamard(?: +│ +4\.0 KiB){4}", text)
    assert re.search(r"int4, block 128, Hadamard(?: +│ +never){4}", text)
    assert "a copy moves 12.5 GB/s of memory" in text
    assert "lightning_taco bench: 2 ranks, gloo on cpu (x), float32, torch 2" in text


def test_tables_show_data_parallel_exchanges_beside_the_others() -> None:
    rows = [
        timing(size, 4.0, kind, codec, **all_algorithms(kind, size / (1 << 20)))
        for size in (1 << 20, 1 << 23)
        for kind, codec in (("gradient_reduce_scatter", GRADIENTS), ("weight_all_gather", WEIGHTS))
    ]
    measured = hand_made(4096)
    both = measured._replace(break_even=BreakEven.of((*measured.break_even.timings, *rows)))
    text = shown(both, (INT8, GRADIENTS, WEIGHTS))
    assert f"gradient_reduce_scatter, {GRADIENTS}" in text
    assert re.search(r"1\.0 MiB │ all_to_all │ +4\.0 │ +1\.0 │ +4\.00x │ +3\.88x │ +1\.00%", text)
    assert re.search(r"1\.0 MiB │ all_gather │ +4\.0 │ +1\.0 │ +4\.00x │ +7\.97x", text)
    data_parallel = text[text.index("compressing pays between data-parallel ranks from this size on") :]
    assert re.search(rf"{GRADIENTS} +│ +never │ +│", data_parallel)
    assert re.search(rf"{WEIGHTS} +│ +│ +never │", data_parallel)
    assert "gradient_reduce_scatter sends" in text
    assert from_json(to_json(both)) == both


@pytest.mark.parametrize(
    ("num_ranks", "dtype", "algorithm", "expected"),
    [
        (2, "bfloat16", "one_shot", "1.94x"),
        (2, "float32", "one_shot", "3.88x"),
        (4, "bfloat16", "two_shot", "1.94x"),
        (4, "bfloat16", "one_shot", "0.97x"),
        (4, "bfloat16", "hierarchical", ""),
    ],
)
def test_bytes_allow(num_ranks: int, dtype: str, algorithm: str, expected: str) -> None:
    row = timing(1 << 20, 1.0, "all_reduce", one_shot=1.0, two_shot=1.0)
    measured = hand_made()._replace(topology=replace(TOPOLOGY, num_ranks=num_ranks, dtype=dtype))
    assert bytes_allow(row, algorithm, INT8, measured) == expected


def test_plot_has_a_line_for_each_kind_and_codec(tmp_path: Path) -> None:
    found = hand_made(64, (INT8, INT4)).break_even
    assert speed_ups(found)["all_reduce", str(INT8)] == [(64, 2.0)]
    assert len(speed_ups(found)) == 8
    plot.save(found, tmp_path / "deep" / "plot.html")
    page = (tmp_path / "deep" / "plot.html").read_text()
    assert "int4, block 128, Hadamard" in page
    assert not re.search(r"<script[^>]+src=", page)


# A real launch


@pytest.mark.launch
def test_bench_by_itself_times_two_ranks(tmp_path: Path) -> None:
    options = ("--codecs", "int8", "int4", "--sizes", "16KiB", "64KiB", "--rounds", "2", "--device", "cpu")
    ended = launch("-m", "lightning_taco.cli", "bench", *options, folder=tmp_path)
    assert ended.status == 0, ended.output
    path = tmp_path / "cache" / "lightning_taco" / "break_even.json"
    assert ended.output.count(f"Wrote {path}, which strategies with min_bytes='auto' read") == 1, ended.output
    assert ended.output.count("lightning_taco bench: 2 ranks, gloo on cpu") == 1
    assert ended.output.count("all_to_all, int4, block 128, Hadamard") == 1
    measured = load(path)
    assert measured.break_even.covers(INT8)
    assert measured.break_even.covers(INT4)
    assert {row.num_bytes for row in measured.break_even.timings} == {1 << 14, 1 << 16}
    assert len(json.loads(path.read_text())["rows"]) == 2 * (2 * 6 + 3)
    data_parallel = [row for row in measured.break_even.timings if row.kind in DATA_PARALLEL_KINDS]
    assert {(row.kind, row.codec.split(",")[0]) for row in data_parallel} == {
        ("gradient_reduce_scatter", "int8"),
        ("gradient_reduce_scatter", "int4"),
        ("weight_all_gather", "int4"),
    }
    assert all(max(row.relative_errors.values()) < 0.3 for row in data_parallel)
    assert ended.output.count("compressing pays between data-parallel ranks from this size on") == 1
    assert os.listdir(path.parent) == ["break_even.json"]
