"""Where the time of a step goes: spans around the codec and the transport, taken only while a `StepTimer` runs.

Without a timer each compressed collective tests one name for ``None``, three or four times.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Literal, ParamSpec, TypeVar

import torch
from torch import Tensor

from lightning_taco.codec.addressed import AddressedMessages
from lightning_taco.collectives.transport import Messages, Pending, Transport

Part = Literal["codec", "communication", "aside"]
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


@dataclass(frozen=True)
class StepTime:
    """One step, in seconds, as this rank saw it.

    Attributes:
        step: from `StepTimer.start` to `StepTimer.stop`, without what was set `aside`.
        codec: encoding, decoding and adding messages.
        communication: in the transport, waiting for slower ranks included. The exchange is synchronous, so all of it is
            exposed: nothing is computed meanwhile.
    """

    step: float
    codec: float
    communication: float

    @property
    def compute(self) -> float:
        """What is left: the model, the optimizer, exchanges that go as they are, and the host."""
        return self.step - self.codec - self.communication


class StepTimer:
    """Times one step of this process: by the host's clock on CPU, on CUDA by events on the current stream.

    Events are read in `stop` alone, so that nothing waits for the device within the step. One timer runs at a time; a
    second one that is started takes the place of the first.

    Args:
        device: where the exchanges run.

    Cost: two reads of the clock, or two events, a span.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spans: list[tuple[Part, _Mark, _Mark]] = []
        self._is_inside = False
        self._start: _Mark | None = None

    def start(self) -> None:
        """Begin the step."""
        global _timer
        self._spans.clear()
        self._start = self._mark()
        _timer = self

    def stop(self) -> StepTime:
        """End the step, and read it. Waits for the device.

        Raises:
            RuntimeError: when the step was not started.
        """
        if self._start is None:
            raise RuntimeError("no step was started, so none can be stopped; call start() before it.")
        end = self._mark()
        start, self._start = self._start, None
        self.cancel()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        seconds: dict[Part, float] = {"codec": 0.0, "communication": 0.0, "aside": 0.0}
        for part, before, after in self._spans:
            seconds[part] += _seconds(before, after)
        self._spans.clear()
        return StepTime(_seconds(start, end) - seconds["aside"], seconds["codec"], seconds["communication"])

    def cancel(self) -> None:
        """Take no more spans, without reading the step."""
        global _timer
        if _timer is self:
            _timer = None

    @contextmanager
    def span(self, part: Part) -> Iterator[None]:
        """Count the time of the block as `part`, unless it lies within another span."""
        if self._is_inside:
            yield
            return
        self._is_inside = True
        start = self._mark()
        try:
            yield
        finally:
            self._is_inside = False
            self._spans.append((part, start, self._mark()))

    def _mark(self) -> _Mark:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


_Mark = float | torch.cuda.Event
# Process-wide, not a context variable: autograd runs CUDA's backward in a thread of its own.
_timer: StepTimer | None = None


def timed(part: Part, function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """`function`, whose calls count as `part` while a timer runs."""

    @functools.wraps(function)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        timer = _timer
        if timer is None:
            return function(*args, **kwargs)
        with timer.span(part):
            return function(*args, **kwargs)

    return run


def timed_transport(transport: Transport) -> Transport:
    """`transport`, whose exchanges count as communication while a timer runs."""
    return transport if _timer is None else _TimedTransport(transport)


@contextmanager
def aside() -> Iterator[None]:
    """Leave the block out of a step that is timed: for what only measures, and is not part of the training."""
    timer = _timer
    if timer is None:
        yield
        return
    with timer.span("aside"):
        yield


@dataclass(frozen=True)
class _TimedTransport:
    transport: Transport

    @property
    def rank(self) -> int:
        return self.transport.rank

    @property
    def world_size(self) -> int:
        return self.transport.world_size

    def message_buffer(self, num_rows: int, message_bytes: int) -> AddressedMessages | None:
        return self.transport.message_buffer(num_rows, message_bytes)

    def receiving(self, is_async: bool) -> AbstractContextManager[None]:
        return self.transport.receiving(is_async)

    def start_all_to_all(self, messages: Messages, is_async: bool) -> Pending:
        return _TimedPending(timed("communication", self.transport.start_all_to_all)(messages, is_async))

    def start_all_gather(self, message: Messages, is_async: bool) -> Pending:
        return _TimedPending(timed("communication", self.transport.start_all_gather)(message, is_async))


@dataclass(frozen=True)
class _TimedPending:
    pending: Pending

    def wait(self) -> Tensor:
        return timed("communication", self.pending.wait)()


def _seconds(start: _Mark, end: _Mark) -> float:
    if isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
        return start.elapsed_time(end) / 1e3  # milliseconds
    assert isinstance(start, float)
    assert isinstance(end, float)
    return end - start
