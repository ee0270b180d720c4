"""A training or evaluation step as a CUDA graph: the host's work is done once, at the capture."""

from collections.abc import Callable

import torch
from torch import Tensor

WARM_UP_RUNS = 2


class GraphedStep:
    """Runs `function`, which reads and writes tensors that stay where they are, by replaying one capture of it.

    What Python does in `function` happens at the capture only: a compressed exchange is counted once, and stochastic
    rounding repeats its random numbers with each replay. On CPU, or with ``enabled=False``, every call runs it anew.

    Args:
        function: returns a tensor, whose memory is overwritten by the next call.
        device: where it runs.
        enabled: capture at all.
        other: a capture that never runs at the same time; they share memory, and what it warmed up need not be again.
    """

    def __init__(
        self,
        function: Callable[[], Tensor],
        device: torch.device,
        *,
        enabled: bool = True,
        other: "GraphedStep | None" = None,
    ) -> None:
        self.function = function
        self.graph = torch.cuda.CUDAGraph() if enabled and device.type == "cuda" else None
        self.output: Tensor | None = None
        if self.graph is None:
            return
        num_warm_up_runs = 1 if other is not None and other.function == function else WARM_UP_RUNS
        pool = None if other is None else other.pool
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(num_warm_up_runs):  # compile kernels and open communicators, which a capture may not
                function()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        # Only this thread's calls are checked: NCCL's watchdog asks for events all the time.
        with torch.cuda.graph(self.graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            self.output = function()

    def __call__(self) -> Tensor:
        if self.graph is None:
            return self.function()
        self.graph.replay()
        assert self.output is not None
        return self.output

    @property
    def pool(self) -> tuple | None:
        """Its memory pool, for another graph; ``None`` without a graph."""
        return None if self.graph is None else self.graph.pool()
