"""``break_even.json``: the timings of one group, and on what they were measured.

Only timings are kept; what follows from them is worked out anew, by the rules of the version that reads them.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lightning_taco.collectives.algorithms import MEASURED_KINDS
from lightning_taco.collectives.break_even import BreakEven, Timing
from lightning_taco.collectives.topology import Topology

FILE_NAME = "break_even.json"


class Measured(NamedTuple):
    """What the file holds."""

    topology: Topology
    break_even: BreakEven


def cache_path() -> Path:
    """Where ``lightning-taco bench`` writes and ``min_bytes="auto"`` looks: in the user's cache folder.

    ``$XDG_CACHE_HOME/lightning_taco/break_even.json``, or in ``~/.cache``. One file, of the last group that was timed.
    """
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root, "lightning_taco", FILE_NAME)


def to_json(measured: Measured) -> dict[str, Any]:
    """JSON values; ``lightning-taco report`` shows the first list of them, one row for each algorithm."""
    rows = [row for timing in measured.break_even.timings for row in _rows_of(timing, measured.break_even)]
    return {"rows": rows, "topology": measured.topology.to_json()}


def from_json(content: Any) -> Measured:
    """What `to_json` was given.

    Raises:
        ValueError: for anything else, with what is wrong.
    """
    if not isinstance(content, Mapping) or not isinstance(content.get("rows"), list):
        raise ValueError("it has no list of rows")
    topology = Topology.from_json(content.get("topology"))
    return Measured(topology, BreakEven.of(_timings(content["rows"], topology)))


def load(path: Path) -> Measured:
    """Read a file.

    Raises:
        OSError: when it cannot be read.
        ValueError: when it is no such file, with what is wrong.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError("it is not JSON") from error
    return from_json(content)


def save(measured: Measured, path: Path) -> None:
    """Write a file as a whole or not at all; folders above it are made.

    Raises:
        OSError: when it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(handle, "w", encoding="utf-8") as file:
            json.dump(to_json(measured), file, indent=1)
        os.chmod(name, 0o644)  # a temporary file is for its owner only
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _rows_of(timing: Timing, break_even: BreakEven) -> list[dict[str, Any]]:
    least = break_even.min_bytes(timing.kind, timing.codec)
    return [
        {
            "exchange": timing.kind,
            "codec": timing.codec,
            "bytes": timing.num_bytes,
            "algorithm": algorithm,
            "stock_us": timing.stock_us,
            "compressed_us": microseconds,
            "speed_up": timing.stock_us / microseconds,
            "relative_error": timing.relative_errors[algorithm],
            "pays_from_bytes": "never" if least is None else least,
        }
        for algorithm, microseconds in timing.algorithm_us.items()
    ]


def _timings(rows: Iterable[Any], topology: Topology) -> list[Timing]:
    found: dict[tuple[Any, str, int, float], dict[Any, tuple[float, float]]] = {}
    for row in rows:
        _require_row(row, topology)
        key = (row["exchange"], row["codec"], row["bytes"], float(row["stock_us"]))
        found.setdefault(key, {})[row["algorithm"]] = (float(row["compressed_us"]), float(row["relative_error"]))
    timings = []
    for (kind, codec, num_bytes, stock_us), by in found.items():
        if set(by) != set(topology.algorithms(kind)):
            needed = ", ".join(topology.algorithms(kind))
            raise ValueError(f"it does not have all algorithms of {kind} on {topology.num_ranks} ranks: {needed}")
        times, errors = ({name: pair[index] for name, pair in by.items()} for index in range(2))
        timings.append(Timing(kind, codec, num_bytes, stock_us, times, errors))
    return timings


def _require_row(row: Any, topology: Topology) -> None:
    if not isinstance(row, Mapping):
        raise ValueError(f"{row!r} is not a row")
    if row.get("exchange") not in MEASURED_KINDS or not isinstance(row.get("codec"), str):
        raise ValueError(f"a row is of the exchange {row.get('exchange')!r} and the codec {row.get('codec')!r}")
    if row.get("algorithm") not in topology.algorithms(row["exchange"]):
        raise ValueError(f"{row['exchange']} on {topology.num_ranks} ranks has no algorithm {row.get('algorithm')!r}")
    for value in (row.get(name) for name in ("bytes", "stock_us", "compressed_us", "relative_error")):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
            raise ValueError(f"{value!r} is not a size, a time or an error")
    if not row["compressed_us"] > 0 or not isinstance(row["bytes"], int):
        raise ValueError("a time of 0, or a size that is not whole")
