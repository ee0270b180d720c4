"""How a study was made, so that it can be made again: command, versions, device, settings."""

from __future__ import annotations

import platform
import shlex
import sys
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch

from lightning_taco.callbacks.versions import versions
from lightning_taco.config import CodecConfig
from lightning_taco.dtensor.session import CompressionSession
from lightning_taco.study.settings import StudySettings


def about(
    trainer: pl.Trainer, session: CompressionSession, settings: StudySettings, device: torch.device
) -> dict[str, Any]:
    """What was run, with what, on what; JSON values.

    Args:
        trainer: that trained the model.
        session: that compressed meanwhile.
        settings: the study's.
        device: of this rank.
    """
    config = session.config
    codecs = {"forward": config.forward, "backward": config.backward}
    return {
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": command(),
        "versions": versions(),
        "device": device_name(device),
        "num_ranks": trainer.world_size,
        "tensor_parallel_size": session.world_size,
        "model": type(trainer.lightning_module).__name__,
        "precision": str(trainer.precision),
        "trained_with": {
            **{name: _codec_text(codec, session.element) for name, codec in codecs.items()},
            "min_bytes": config.min_bytes,
            "exclude": list(config.exclude),
            "recipes": dict(config.recipes),
        },
        "settings": asdict(settings),
    }


def command() -> str:
    """What this process was started with, without the folder of the program."""
    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])


def device_name(device: torch.device) -> str:
    """The GPU's name, or the kind of CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} ({platform.machine()})"


def _codec_text(codec: CodecConfig | None, element: Literal["e4m3", "int8"]) -> str:
    return "as it is" if codec is None else str(codec.resolved(element))
