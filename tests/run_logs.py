"""Logs of runs that never were, for the tests of the report."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lightning_taco.callbacks.run_logger import FILE_NAME

DOWN, UP = "forward/model.mlp.down/all_reduce", "backward/model.mlp.up/all_reduce"


def error_tag(place: str) -> str:
    return f"compression/relative_error/{place}"


def run_line(**info: Any) -> dict[str, Any]:
    return {"kind": "run", "time": 1.8e9, "versions": {"torch": "2.13.0"}, "settings": {}, "hyperparameters": {}} | info


def scalars(step: Any, **values: Any) -> dict[str, Any]:
    return {"kind": "scalars", "step": step, "time": 1.8e9, "values": values}


def event(step: int, action: str = "suspend", site: str = DOWN, reason: str = "error 7% is above 5%") -> dict[str, Any]:
    fields = {"step": step, "source": "guard", "action": action, "site": site, "reason": reason}
    return {"kind": "event", "time": 1.8e9, **fields}


def write_log(folder: Path, lines: Iterable[dict[str, Any] | str], end: str = "\n") -> Path:
    """Write objects as JSON and strings as they are, one a line."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    (folder / FILE_NAME).write_text("\n".join(texts) + end, encoding="utf-8")
    return folder


def usual_run(num_steps: int = 60, sites: Iterable[str] = (DOWN, UP)) -> list[dict[str, Any]]:
    """A loss, two kinds of validation, errors of some sites, norms, bytes, and an event."""
    lines = [run_line(settings={"strategy": "TacoTPStrategy", "compression": {"forward": "int8, block 128"}})]
    for step in range(num_steps):
        lines.append(scalars(step, train_loss=4 - step / num_steps, gradient_norm=1.0 + step))
        if step % 10 == 0:
            errors = {error_tag(site): 0.01 * (1 + place) + 1e-4 * step for place, site in enumerate(sites)}
            more = {"compression/ratio": 3.9, "compression/total_bytes_sent": 1e6 * step, "val_loss": 4.1}
            lines.append(scalars(step, **errors, **more))
    return [*lines, event(num_steps // 2)]
