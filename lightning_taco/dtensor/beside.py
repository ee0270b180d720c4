"""Exchanges that return before they are done, on a stream of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from lightning_taco import _compat


class BesideCompute:
    """Runs exchanges in order on a CUDA stream of high priority, beside what the current stream computes.

    Mapped memory and communicators take one exchange after the other, so one that is to run on the current stream has
    to `join` those under way. On other devices everything runs where it is, and so does what is started while a CUDA
    graph is captured: a graph may not end before a result that nobody asks for.
    """

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._last: torch.cuda.Event | None = None
        self._is_last_captured = False

    def start(self, exchange: Callable[[], Tensor], tensor: Tensor) -> Tensor:
        """Run `exchange`, which reads `tensor`; what comes back waits, on its stream, when it is first used.

        Cost: 0.2 ms of the host's time, most of it where torch unwraps the result. The memory of `tensor` is kept until
        the exchange is done.
        """
        device = tensor.device
        if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            self.join()
            return exchange()
        with self.stream(tensor):
            result = exchange()
        done = self._last
        assert done is not None
        result.record_stream(torch.cuda.current_stream(device))
        return _compat.asynchronous(result, lambda: torch.cuda.current_stream(device).wait_event(done))

    @contextmanager
    def stream(self, *tensors: Tensor) -> Iterator[None]:
        """A block whose work waits for what the current stream holds now and then runs beside it; it uses `tensors`.

        Who captures a graph has to `join` before its end.
        """
        device = tensors[0].device
        if device.type != "cuda":
            yield
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(device, priority=-1)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            yield
            self._last = self._stream.record_event()
            self._is_last_captured = torch.cuda.is_current_stream_capturing()
        for tensor in tensors:
            tensor.record_stream(self._stream)

    def join(self) -> None:
        """Let the current stream wait for all that has been started.

        What ran before a capture is over when it begins, and what was captured runs with the graph.
        """
        if self._last is None:
            return
        assert self._stream is not None
        if self._is_last_captured == torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream(self._stream.device).wait_event(self._last)
        self._last = None
