"""``lightning-taco bench``: reads the options, and starts the ranks or joins those of torchrun."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser

from lightning_taco.bench.launch import BenchError, run_ranks
from lightning_taco.bench.plot import INSTALL_SENTENCE, has_plotly
from lightning_taco.bench.settings import CODEC_NAMES, CPU_SIZES, CUDA_SIZES, BenchSettings
from lightning_taco.collectives.algorithms import MEASURED_KINDS
from lightning_taco.collectives.break_even_file import cache_path
from lightning_taco.config import TRANSPORTS

DESCRIPTION = (
    "Times the library's own exchanges of a tensor-parallel group, and of gradients and weights between data-parallel "
    "ranks, against compressed ones, prints from which size on compressing pays, and keeps the figures: strategies "
    "with min_bytes='auto' go by those of tensor parallelism. By itself it starts one process for each GPU, or two on "
    "CPU; under torchrun all its ranks are one group: `torchrun --nproc-per-node 4 -m "
    "lightning_taco.cli bench`."
)


def bench(args: Sequence[str]) -> None:
    """Run the subcommand with its options.

    Raises:
        SystemExit: with status 2 and a sentence on stderr for options that are impossible, with 1 when a result of a
            compressed exchange was wrong.
    """
    parser = _parser()
    is_silent = os.environ.get("RANK", "0") != "0"  # all ranks of torchrun get the same options: one speaks for all
    with redirect_stderr(StringIO() if is_silent else sys.stderr):
        settings = _settings(parser, args)
    try:
        status = run_ranks(settings)
    except BenchError as error:
        if is_silent:
            raise SystemExit(2) from error
        parser.error(str(error))
    if status:
        raise SystemExit(status)


def _settings(parser: ArgumentParser, args: Sequence[str]) -> BenchSettings:
    options: dict[str, Any] = parser.parse_args(list(args)).as_dict()
    options.pop("config")
    for name in ("output", "plot"):
        options[name] = None if options[name] is None else Path(options[name])
    try:
        settings = BenchSettings(**options)
    except ValueError as error:
        parser.error(str(error))
    if settings.plot is not None and not has_plotly():
        parser.error(INSTALL_SENTENCE)
    return settings


def _parser() -> ArgumentParser:
    defaults = BenchSettings()
    parser = ArgumentParser(prog="lightning-taco bench", description=DESCRIPTION)
    parser.add_argument("--config", action="config", help="a YAML file with these options")
    parser.add_argument(
        "--codecs", nargs="+", type=str, default=list(defaults.codecs), help=f"of: {', '.join(CODEC_NAMES)}"
    )
    parser.add_argument(
        "--sizes",
        nargs="+",
        type=str,
        help=f"bytes of the whole tensor; default on CUDA: {' '.join(CUDA_SIZES)}, on CPU: {' '.join(CPU_SIZES)}",
    )
    parser.add_argument("--rounds", type=int, default=defaults.rounds, help="rounds in which exchanges take turns")
    parser.add_argument(
        "--kinds", nargs="+", type=str, default=list(MEASURED_KINDS), help=f"of: {', '.join(MEASURED_KINDS)}"
    )
    parser.add_argument("--output", type=str, help=f"file of the figures; default: {cache_path()}")
    parser.add_argument("--plot", type=str, help="write a page with a plot of the speed-ups here (needs plotly)")
    parser.add_argument("--device", type=str, default=defaults.device, choices=["auto", "cpu", "cuda"])
    parser.add_argument(
        "--transport",
        type=str,
        default=defaults.transport,
        choices=list(TRANSPORTS),
        help="auto: time exchanges through mapped memory too, where GPUs of one host can read each other's",
    )
    parser.add_argument("--num_ranks", type=int, help="processes to start; default: one for each GPU, or two on CPU")
    return parser
