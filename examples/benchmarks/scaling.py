"""How the gain grows with the tensor-parallel degree: the other benchmarks at several numbers of ranks, on each link.

    python -m examples.benchmarks.scaling --output scaling.json
    python -m examples.benchmarks.scaling --ranks 8 --links tcp --benchmarks collectives three_d --output more.json
    python -m examples.benchmarks.scaling --show scaling.json more.json      # the table of what was measured before
    python -m examples.benchmarks.scaling --device cpu --ranks 2 4 --output cpu.json      # tiny, to see that it works

Each run is one `torchrun` of `collectives.py`, `step_time.py` (all ranks tensor-parallel) or `three_d.py` (8 ranks, 2
along each axis), with a time limit. A run that fails, is cut by its limit, or would need more GPUs than there are, is
said in the table and stops nothing; its last lines are kept. The file is written after each run. `--total_s` ends a
session on a machine that is lent for so long: what would start later is left out, and can be measured by a second call.

Links are those of one host: `nvlink` as NCCL finds it, `shm` without peer access, `tcp` through sockets of the loopback
with NCCL's sockets tuned, on both sides of each comparison. The environment is otherwise passed on as it is; what is
set there, such as `NCCL_NVLS_ENABLE`, is written down. With ranks as columns, cells are the speed-up over the library's
own exchange by the fastest algorithm of ours, or over the step without compression.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain, takewhile
from pathlib import Path
from typing import Any, Literal

import torch

LINKS: dict[str, dict[str, str]] = {
    "nvlink": {},
    "shm": {"NCCL_P2P_DISABLE": "1"},
    "tcp": {
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_NTHREADS": "4",
        "NCCL_NSOCKS_PERTHREAD": "4",
    },
    "gloo": {"OMP_NUM_THREADS": "1"},
}
BENCHMARKS = ("collectives", "step_time", "three_d")
THREE_D_RANKS = 8
CODECS = ("int8", "e4m3", "int6g", "int4gs")
VARIANTS = ("none", "int8", "taco", "balanced")
KILL_AFTER_S = 45  # torchrun itself gives its ranks 30 s to end
NUM_KEPT_LINES = 20
TORCHRUN_SAYS = "torch/distributed/elastic/multiprocessing/api.py"
TINY = {
    "collectives": "--sizes-mib 0.25 --rounds 2 --device cpu",
    "step_time": "--accelerator cpu --precision 32-true --num_layers 1 --hidden_size 64 --num_heads 8 "
    "--vocab_size 64 --sequence_length 32 --batch_size 2 --min_bytes 0 --steps 2 --rounds 2 --warm_up_steps 1",
    "three_d": "--accelerator cpu --precision 32-true --preset tiny --num_layers 2 --sequence_length 32 "
    "--vocab_size 64 --batch_size 4 --num_microbatches 2 --warm_up_steps 1 --steps 2 --rounds 2 --min_bytes 0",
}
WHOLE = {
    "collectives": "--sizes-mib 64 --no-kernels --rounds 9",
    "step_time": "--steps 6 --rounds 3",
    "three_d": "--variants none all --steps 6 --rounds 2",
}
Status = Literal["ok", "failed", "cut", "not run"]


@dataclass(frozen=True)
class Run:
    """What is to be measured: one benchmark on one link at one number of ranks."""

    benchmark: str
    link: str
    num_ranks: int

    def __str__(self) -> str:
        return f"{self.benchmark} on {self.link}, {self.num_ranks} ranks"


@dataclass(frozen=True)
class Outcome:
    """What became of a run.

    Attributes:
        run: the run.
        status: how it ended.
        reason: of any other status than ``"ok"``.
        seconds: that it took, starting its processes included.
        command: as it was started, after its environment.
        result: the benchmark's own JSON.
    """

    run: Run
    status: Status
    reason: str = ""
    seconds: float = 0.0
    command: str = ""
    result: dict[str, Any] = field(default_factory=dict)


def main() -> None:
    arguments = parse()
    print(report(list(chain(*map(read, arguments.show))) if arguments.show else measure(arguments)))


def parse(args: list[str] | None = None) -> argparse.Namespace:
    has_cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--links", nargs="+", choices=list(LINKS), help="default: nvlink, shm and tcp, or gloo on CPU")
    parser.add_argument("--benchmarks", nargs="+", choices=BENCHMARKS, default=list(BENCHMARKS))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if has_cuda else "cpu")
    parser.add_argument("--codecs", nargs="+", default=list(CODECS), help="of collectives.py")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), help="of step_time.py, the uncompressed first")
    parser.add_argument(
        "--more", action="append", default=[], help="'step_time --num_layers 2': further options of one"
    )
    parser.add_argument("--limit_s", type=float, default=180, help="of one run")
    parser.add_argument("--total_s", type=float, default=float("inf"), help="no run starts later, or lasts longer")
    parser.add_argument("--output", type=Path, default=Path("scaling.json"), help="all figures, as JSON")
    parser.add_argument("--show", type=Path, nargs="+", help="run nothing: print the table of these files")
    arguments = parser.parse_args(args)
    arguments.links = arguments.links or (["nvlink", "shm", "tcp"] if arguments.device == "cuda" else ["gloo"])
    return arguments


def measure(arguments: argparse.Namespace) -> list[Outcome]:
    """Do all runs one after another; write the file after each."""
    start, num_devices = time.monotonic(), torch.cuda.device_count() if arguments.device == "cuda" else None
    outcomes: list[Outcome] = []
    for run in runs_of(arguments.benchmarks, arguments.links, arguments.ranks):
        left_s = arguments.total_s - (time.monotonic() - start)
        if num_devices is not None and run.num_ranks > num_devices:
            outcome = Outcome(run, "not run", reason=f"{num_devices} GPUs here")
        elif left_s <= 0:
            outcome = Outcome(run, "not run", reason=f"{arguments.total_s:g} s were over")
        else:
            outcome = execute(run, command_of(run, arguments), min(arguments.limit_s, left_s))
        outcomes.append(outcome)
        print(f"{run}: {_in_words(outcome)}", flush=True)
        write(arguments.output, outcomes, arguments)
    return outcomes


def runs_of(benchmarks: Iterable[str], links: Iterable[str], ranks: Sequence[int]) -> list[Run]:
    """All runs, those of few ranks first; `three_d` with 8 ranks only.

    >>> [run.num_ranks for run in runs_of(["collectives", "three_d"], ["shm"], [2, 8])]
    [2, 8, 8]
    """
    return [
        Run(benchmark, link, num_ranks)
        for num_ranks in sorted(ranks)
        for link in links
        for benchmark in benchmarks
        if benchmark != "three_d" or num_ranks == THREE_D_RANKS
    ]


def command_of(run: Run, arguments: argparse.Namespace) -> list[str]:
    """What starts a run; ``--output`` is added when it is started."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={run.num_ranks}"]
    command += ["-m", f"examples.benchmarks.{run.benchmark}"]
    command += (TINY if arguments.device == "cpu" else WHOLE)[run.benchmark].split()
    if run.benchmark == "collectives":
        command += ["--codecs", *arguments.codecs]
        # Slices are left out: with more ranks they would take most of the time, and they are no default.
        command += ["--algorithms", "two_shot", "one_shot", "all_to_all", "all_gather", "peer_memory"]
    if run.benchmark == "step_time":
        variants = list(arguments.variants)
        if run.link == "nvlink":
            variants += [f"{name}+mapped" for name in variants[1:]]
        command += ["--devices", str(run.num_ranks), "--variants", *variants]
    if run.benchmark == "three_d" and run.link in ("tcp", "gloo"):
        command += ["--node_size", "1"]  # such a link stands for a network
    for text in arguments.more:
        benchmark, *options = text.split()
        command += options if benchmark == run.benchmark else []
    return command


def execute(run: Run, command: list[str], limit_s: float) -> Outcome:
    """Start a run, wait for it for `limit_s` at most, and read what it wrote. Raises nothing for a run that fails."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        output, log = Path(folder) / "result.json", Path(folder) / "log"
        with log.open("w") as stream:
            process = subprocess.Popen(
                [*command, "--output", str(output)],
                env={**os.environ, **LINKS[run.link]},
                cwd=Path(__file__).resolve().parents[2],
                stdout=stream,
                stderr=subprocess.STDOUT,
            )
            try:
                code: int | None = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                _end(process)
        done: dict[str, Any] = {
            "seconds": time.monotonic() - start,
            "command": " ".join(["python", *command[1:]]),
        }
        lines = last_lines(log.read_text(errors="replace"))
        if code == 0 and output.exists():
            return Outcome(run, "ok", result=json.loads(output.read_text()), **done)
    if code is None:
        return Outcome(run, "cut", reason="\n".join([f"cut after {limit_s:.0f} s", *lines]), **done)
    return Outcome(run, "failed", reason="\n".join([f"exit status {code}", *lines]), **done)


def last_lines(log: str) -> list[str]:
    """What the ranks said last, without torchrun's own account of how they ended, which is longer.

    >>> last_lines("one\\nValueError: two\\nE1130 torch/distributed/elastic/multiprocessing/api.py:984] failed\\n===")
    ['one', 'ValueError: two']
    """
    lines = list(takewhile(lambda line: TORCHRUN_SAYS not in line, log.splitlines()))
    return lines[-NUM_KEPT_LINES:]


def _end(process: subprocess.Popen[bytes]) -> None:
    """End torchrun if it still runs. It ends its ranks itself: they are in sessions of their own."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(KILL_AFTER_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def write(path: Path, outcomes: list[Outcome], arguments: argparse.Namespace) -> None:
    """Everything, with what the figures depend on."""
    content = {
        "settings": {key: str(value) for key, value in vars(arguments).items()},
        "torch": torch.__version__,
        "devices": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "processor": platform.machine(),
        "num_cpus": os.cpu_count(),
        "environment": {name: value for name, value in os.environ.items() if name.startswith("NCCL_")},
        "links": {link: LINKS[link] for link in arguments.links},
        "runs": [asdict(outcome) for outcome in outcomes],
    }
    path.write_text(json.dumps(content, indent=1))


def read(path: Path) -> list[Outcome]:
    """The outcomes of a file."""
    found = json.loads(path.read_text())["runs"]
    return [Outcome(**{**outcome, "run": Run(**outcome["run"])}) for outcome in found]


def report(outcomes: list[Outcome]) -> str:
    """The table as Markdown, and the last words of runs that did not end well."""
    ranks = sorted({outcome.run.num_ranks for outcome in outcomes})
    rows: dict[tuple[str, str], dict[int, str]] = {}
    for outcome in outcomes:
        for what, text in cells_of(outcome).items():
            rows.setdefault((what, outcome.run.link), {})[outcome.run.num_ranks] = text
    lines = [
        f"| what | link | {' | '.join(f'{number} ranks' for number in ranks)} |",
        "|---|---|" + "---|" * len(ranks),
    ]
    for (what, link), cells in sorted(rows.items()):
        lines.append(f"| {what} | {link} | {' | '.join(cells.get(number, '') for number in ranks)} |")
    for outcome in outcomes:
        if outcome.status in ("failed", "cut"):
            lines += ["", f"{outcome.run}: {outcome.reason}"]
    return "\n".join(lines)


def cells_of(outcome: Outcome) -> dict[str, str]:
    """What one run says in the table, by row; of one that did not end well, that."""
    if outcome.status != "ok":
        return {outcome.run.benchmark: _in_words(outcome)}
    if outcome.run.benchmark == "collectives":
        return _cells_of_collectives(outcome.result["collectives"])
    rows = outcome.result["rows"]
    what = "step" if outcome.run.benchmark == "step_time" else "3D step, compressed"
    return {f"{what}: {row['variant']}": f"{row['speedup']:.2f}x of {rows[0]['step_ms']:.1f} ms" for row in rows[1:]}


def _cells_of_collectives(rows: list[dict[str, Any]]) -> dict[str, str]:
    cells = {}
    for kind, codec, size in sorted({(row["kind"], row["codec"], row["MiB"]) for row in rows}):
        same = [row for row in rows if (row["kind"], row["codec"], row["MiB"]) == (kind, codec, size)]
        best = max(same, key=lambda row: row["speedup"])
        way = f" by {best['algorithm']}" if best["algorithm"] else ""
        cells[f"{kind}, {size:g} MiB: {codec}"] = f"{best['speedup']:.2f}x of {best['stock_us']:.0f} us{way}"
        errors = [row["relative_error"] for row in same if row["algorithm"] == "two_shot"]
        if errors:
            cells[f"error of two-shot, {size:g} MiB: {codec}"] = f"{100 * errors[0]:.3f}%"
    return cells


def _in_words(outcome: Outcome) -> str:
    if outcome.status == "ok":
        return f"done in {outcome.seconds:.0f} s"
    first = outcome.reason.splitlines()[0]
    return first if outcome.status == "cut" else f"{outcome.status}: {first}"


if __name__ == "__main__":
    main()
