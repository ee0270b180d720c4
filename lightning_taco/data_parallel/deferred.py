"""A boolean that a device computes and the host reads later, without waiting."""

from __future__ import annotations

import torch
from torch import Tensor


class DeferredFlag:
    """Set from a tensor; `read` gives it once, when its copy to the host has long arrived.

    Ranks that set it from equal tensors read equal values, at the same call.
    """

    def __init__(self) -> None:
        self._value: Tensor | None = None
        self._arrived: torch.cuda.Event | None = None

    def set(self, flag: Tensor) -> None:
        """Start the copy of `flag`, a boolean scalar, to the host."""
        if not flag.is_cuda:
            self._value = flag
            return
        self._value = torch.empty((), dtype=torch.bool, pin_memory=True)
        self._value.copy_(flag, non_blocking=True)
        self._arrived = torch.cuda.Event()
        self._arrived.record(torch.cuda.current_stream(flag.device))

    def read(self) -> bool:
        """The flag that was set last, once; ``False`` when none was set since."""
        value, self._value = self._value, None
        if value is None:
            return False
        if self._arrived is not None:
            self._arrived.synchronize()
        return bool(value.item())
