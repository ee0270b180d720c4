"""A step's loss as all ranks see it, read one step later so that no host waits for its device."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


class AgreedLoss:
    """The largest loss over all ranks, NaN if that of any rank was NaN or Inf.

    Its two numbers are put together by one all-reduce of 8 bytes over all processes, in stream order, and copied to the
    host while the next step runs.

    Args:
        loss: one value, the loss of this rank; all ranks make one for the same step.
        device: where collectives of this rank's process group run.
    """

    def __init__(self, loss: Tensor | float, device: torch.device) -> None:
        if isinstance(loss, DTensor):
            loss = loss.full_tensor()
        values = torch.as_tensor(loss, dtype=torch.float32, device=device).detach().mean()
        table = torch.stack([(~torch.isfinite(values)).float(), torch.nan_to_num(values)])
        if dist.is_initialized():
            dist.all_reduce(table, op=dist.ReduceOp.MAX)
        self._table = table.to("cpu", non_blocking=True)  # CUDA's goes to pinned memory
        self._copied: torch.cuda.Event | None = None
        if table.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record()

    def value(self) -> float:
        """The loss; waits for the device if the step that it belongs to is still running."""
        if self._copied is not None:
            self._copied.synchronize()
        is_bad, largest = self._table.tolist()
        return math.nan if is_bad else largest
