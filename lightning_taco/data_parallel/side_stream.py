"""A stream beside the one that backward runs on."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


class SideStream:
    """A CUDA stream of its own, made when it is first needed; on other devices nothing."""

    def __init__(self) -> None:
        self.stream: torch.cuda.Stream | None = None

    def beside_backward(self, device: torch.device) -> AbstractContextManager[Any]:
        """A context whose work waits for what the current stream holds now, and then runs beside it."""
        if device.type != "cuda":
            return nullcontext()
        if self.stream is None:
            self.stream = torch.cuda.Stream(device)
        self.stream.wait_stream(torch.cuda.current_stream(device))
        return torch.cuda.stream(self.stream)
