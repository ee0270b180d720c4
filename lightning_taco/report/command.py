"""``lightning-taco report RUN_DIR``: the page of a run, as a file or served while the run goes on."""

from __future__ import annotations

import argparse
import os
import tempfile
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from lightning_taco.report.content import Report
from lightning_taco.report.page import INSTALL_SENTENCE, has_plotly, page_of
from lightning_taco.report.reading import ReportError, RunReader
from lightning_taco.report.server import LiveReport, LiveServer

DEFAULT_NAME = "report.html"
DEFAULT_PORT = 8765


def report(args: Sequence[str]) -> None:
    """Run the subcommand with its options.

    Raises:
        SystemExit: with status 2 and a sentence on stderr, when there is nothing to show or nowhere to put it.
    """
    parser = _parser()
    options = parser.parse_args(args)
    if options.live and options.output is not None:
        parser.error("--output writes a file and --live serves a page; give one of them.")
    if not options.live and options.port is not None:
        parser.error("--port is that of a live page; give --live too.")
    try:
        if not has_plotly():
            raise ReportError(INSTALL_SENTENCE)
        made = report_of(options.run_dir, options.baseline)
        if options.live:
            _serve(made, DEFAULT_PORT if options.port is None else options.port, options.open)
        else:
            path = write_page(made, options.output or options.run_dir / DEFAULT_NAME)
            print(f"Wrote {path}")
            if options.open:
                webbrowser.open(path.resolve().as_uri())
    except ReportError as error:
        parser.error(str(error))


def report_of(run_dir: Path, baseline: Path | None = None) -> Report:
    """The report of a run's folder, compared with another one's.

    Raises:
        ReportError: when either holds no log, with the reason.
    """
    try:
        run = RunReader(run_dir)
    except OSError as error:
        raise ReportError(f"{run_dir} cannot be read ({error.strerror or error}).") from error
    if baseline is None:
        return Report(run)
    try:
        return Report(run, RunReader(baseline))
    except (OSError, ReportError) as error:
        raise ReportError(f"--baseline: {error}") from error


def write_page(made: Report, path: Path) -> Path:
    """Write the page of a report to a file, as a whole or not at all.

    Raises:
        ReportError: when it cannot be written.
    """
    if path.is_dir():
        raise ReportError(f"{path} is a folder; give --output the name of a file, such as {path / DEFAULT_NAME}.")
    page = page_of(made.content()).encode("utf-8", errors="replace")
    try:
        _replace(path, page)
    except OSError as error:
        raise ReportError(
            f"{path} cannot be written ({error.strerror or error}); choose another place with --output FILE."
        ) from error
    return path


def _replace(path: Path, content: bytes) -> None:
    """Write beside it first: who opens the page meanwhile sees the old one or the new one."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(handle, "wb") as file:
            file.write(content)
        os.chmod(name, 0o644)  # a temporary file is for its owner only
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _serve(made: Report, port: int, is_opened: bool) -> None:
    with LiveServer(LiveReport(made), port) as server:
        try:
            print(f"Serving {server.url} to this machine; Ctrl-C ends it.", flush=True)
            if is_opened:
                webbrowser.open(server.url)
            server.serve_forever()
        except KeyboardInterrupt:
            print("\nEnded.")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-taco report",
        description="Make one self-contained HTML page of a run: loss, errors by site, gradient norms, bytes, events, "
        "settings. It is made of lightning_taco.jsonl, which `lightning-taco fit` leaves beside the other logs, or of "
        "CSVLogger's metrics.csv.",
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="folder of the run, with its log")
    parser.add_argument("--baseline", metavar="RUN_DIR", type=Path, help="folder of a run to compare the loss with")
    parser.add_argument("--output", metavar="FILE", type=Path, help=f"default: {DEFAULT_NAME} in RUN_DIR")
    parser.add_argument("--live", action="store_true", help="serve the page on 127.0.0.1, and refresh it as logs grow")
    parser.add_argument("--port", type=_port, help=f"of --live, 0 for any that is free; default: {DEFAULT_PORT}")
    parser.add_argument("--open", action="store_true", help="open the page in a browser")
    return parser


def _port(text: str) -> int:
    try:
        port = int(text)
    except ValueError:
        port = -1
    if not 0 <= port <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port; give a number from 0 to 65535.")
    return port
