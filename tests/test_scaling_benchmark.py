"""The harness for several numbers of ranks: what it starts, what it makes of each end, and one real run on gloo."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.benchmarks import collectives, scaling, step_time, three_d
from examples.benchmarks.scaling import Outcome, Run
from tests.ranks import run_forked

RUN = Run("collectives", "gloo", 2)


def script(text: str) -> list[str]:
    return [sys.executable, "-c", f"import sys, time\n{text}"]


def test_runs_of_all_benchmarks() -> None:
    runs = scaling.runs_of(scaling.BENCHMARKS, ["nvlink", "shm", "tcp"], [8, 2, 4])
    assert len(runs) == 3 * 3 * 2 + 3
    assert [run.num_ranks for run in runs] == [2] * 6 + [4] * 6 + [8] * 9
    assert {run.num_ranks for run in runs if run.benchmark == "three_d"} == {8}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_commands_are_what_the_benchmarks_take(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = scaling.parse(["--device", device, "--more", "step_time --num_layers 3"])
    for link in arguments.links:
        for benchmark, module in (("step_time", step_time), ("three_d", three_d)):
            command = scaling.command_of(Run(benchmark, link, 8), arguments)
            monkeypatch.setattr(sys, "argv", command[command.index("-m", 2) + 1 :])
            parsed: Any = module.parse()
            if benchmark == "step_time":
                assert (parsed.devices, parsed.num_layers) == (8, 3)
                assert ("int8+mapped" in parsed.variants) == (link == "nvlink")
            else:
                assert parsed.node_size == (1 if link in ("tcp", "gloo") else None)


def test_a_result_is_read() -> None:
    outcome = scaling.execute(RUN, script("open(sys.argv[2], 'w').write('{\"rows\": [1]}')"), 30)
    assert (outcome.status, outcome.result) == ("ok", {"rows": [1]})
    assert 0 < outcome.seconds < 30


def test_the_link_is_in_the_environment() -> None:
    text = "import os, json; json.dump(dict(os.environ), open(sys.argv[2], 'w'))"
    outcome = scaling.execute(Run("step_time", "tcp", 2), script(text), 30)
    assert outcome.result["NCCL_NSOCKS_PERTHREAD"] == "4"
    assert outcome.result["NCCL_SHM_DISABLE"] == "1"


@pytest.mark.parametrize(
    ("text", "limit_s", "status", "words"),
    [
        ("sys.exit('no such device')", 30, "failed", "exit status 1\nno such device"),
        ("pass", 30, "failed", "exit status 0"),  # it wrote nothing
        ("print('half', flush=True); time.sleep(60)", 2, "cut", "cut after 2 s\nhalf"),
    ],
)
def test_what_does_not_end_well_is_said(text: str, limit_s: float, status: str, words: str) -> None:
    outcome = scaling.execute(RUN, script(text), limit_s)
    assert (outcome.status, outcome.reason) == (status, words)
    assert outcome.seconds < 30


def test_report_puts_ranks_side_by_side(tmp_path: Path) -> None:
    def rows(speedup: float, error: float) -> dict[str, Any]:
        common = {"kind": "all_reduce", "codec": "int8", "MiB": 64.0, "stock_us": 100.0, "us": 100 / speedup}
        return {
            "collectives": [
                {**common, "algorithm": "two_shot", "speedup": speedup, "relative_error": error},
                {**common, "algorithm": "one_shot", "speedup": speedup - 0.25, "relative_error": error / 2},
            ]
        }

    steps = {"rows": [{"variant": "none", "step_ms": 80.0}, {"variant": "int8", "speedup": 1.234, "step_ms": 64.8}]}
    outcomes = [
        Outcome(Run("collectives", "shm", 2), "ok", result=rows(1.5, 0.01)),
        Outcome(Run("collectives", "shm", 4), "ok", result=rows(1.25, 0.011)),
        Outcome(Run("step_time", "shm", 2), "ok", result=steps),
        Outcome(Run("step_time", "shm", 4), "cut", "cut after 9 s\nNCCL waits"),
        Outcome(Run("step_time", "shm", 8), "not run", "4 GPUs here"),
    ]
    text = scaling.report(outcomes)
    assert text.splitlines()[0] == "| what | link | 2 ranks | 4 ranks | 8 ranks |"
    assert (
        "| all_reduce, 64 MiB: int8 | shm | 1.50x of 100 us by two_shot | 1.25x of 100 us by two_shot |  |"
    ) in text.splitlines()
    assert "| error of two-shot, 64 MiB: int8 | shm | 1.000% | 1.100% |  |" in text.splitlines()
    assert "| step: int8 | shm | 1.23x of 80.0 ms |  |  |" in text.splitlines()
    assert "| step_time | shm |  | cut after 9 s | not run: 4 GPUs here |" in text.splitlines()
    assert text.endswith("step_time on shm, 4 ranks: cut after 9 s\nNCCL waits")
    path = tmp_path / "scaling.json"
    scaling.write(path, outcomes, scaling.parse(["--device", "cpu"]))
    assert scaling.read(path) == outcomes


def test_nothing_starts_when_time_is_over(tmp_path: Path) -> None:
    arguments = scaling.parse(["--device", "cpu", "--total_s", "0", "--output", str(tmp_path / "scaling.json")])
    outcomes = scaling.measure(arguments)
    assert [outcome.status for outcome in outcomes] == ["not run"] * 7
    assert {outcome.reason for outcome in outcomes} == {"0 s were over"}
    assert scaling.read(tmp_path / "scaling.json") == outcomes


def test_two_shot_errors_of_two_and_four_ranks_are_alike() -> None:
    """Both quantisations are relative to what they quantise: sqrt(2) of one, at any number of ranks."""

    def check(rank: int) -> list[dict[str, Any]]:
        torch.manual_seed(rank)
        return collectives.collective_rows(0.25, ["int8"], None, 1, torch.device("cpu"), ["two_shot", "one_shot"])

    errors = {}
    for num_ranks in (2, 4):
        rows = {row["algorithm"]: row for row in run_forked(num_ranks, check)[0]}
        assert list(rows) == ["two_shot", "one_shot"]
        errors[num_ranks] = [rows[way]["relative_error"] for way in rows]
    for two_shot, one_shot in errors.values():
        assert two_shot / one_shot == pytest.approx(2**0.5, rel=0.1)
    assert errors[4] == pytest.approx(errors[2], rel=0.03)


def test_a_size_that_ranks_do_not_share_is_refused() -> None:
    def check(rank: int) -> str:
        with pytest.raises(ValueError, match="3 tokens, which 2 ranks do not share evenly") as caught:
            collectives.collective_rows(3 / 128, ["int8"], None, 1, torch.device("cpu"))
        return str(caught.value)

    assert len(run_forked(2, check)) == 2


def test_a_run_that_fails_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fails, ends = script("sys.exit(3)"), script("open(sys.argv[2], 'w').write('{\"collectives\": []}')")
    monkeypatch.setattr(scaling, "command_of", lambda run, arguments: fails if run.num_ranks == 2 else ends)
    output = tmp_path / "scaling.json"
    options = ["--device", "cpu", "--ranks", "4", "2", "--benchmarks", "collectives", "--output", str(output)]
    outcomes = scaling.measure(scaling.parse(options))
    assert [(outcome.run.num_ranks, outcome.status) for outcome in outcomes] == [(2, "failed"), (4, "ok")]
    assert scaling.read(output) == outcomes


@pytest.mark.slow
@pytest.mark.launch
def test_one_command_measures_exchanges_and_steps(tmp_path: Path) -> None:
    output = tmp_path / "scaling.json"
    options = "--device cpu --ranks 2 --codecs int8 --variants none int8 --benchmarks collectives step_time --output"
    command = [sys.executable, "-m", "examples.benchmarks.scaling", *options.split(), str(output)]
    text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=250).stdout
    for row in ("all_reduce, 0.25 MiB: int8", "error of two-shot, 0.25 MiB: int8", "step: int8"):
        assert f"| {row} | gloo |" in text
    assert [run["status"] for run in json.loads(output.read_text())["runs"]] == ["ok", "ok"]


@pytest.mark.slow
@pytest.mark.launch
def test_ranks_end_with_a_run_that_is_cut(tmp_path: Path) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text(
        f"import os, pathlib, time\npathlib.Path({str(tmp_path)!r}, os.environ['RANK']).write_text(str(os.getpid()))\n"
        "time.sleep(200)\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(worker)]
    outcome = scaling.execute(RUN, command, 20)
    assert outcome.status == "cut"
    pids = [int((tmp_path / str(rank)).read_text()) for rank in range(2)]
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
