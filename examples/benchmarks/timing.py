"""How the benchmarks time calls: by events on CUDA, by the host's clock elsewhere, taking turns."""

import itertools
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist

NUM_WARM_UPS = 2
QUEUE_CYCLES = 2_000_000  # about a millisecond


Name = TypeVar("Name", bound=Hashable)


class Clock:
    """Milliseconds from its making to `stop`, on `device`, or of the laps in between."""

    def __init__(self, device: torch.device) -> None:
        self._uses_events = device.type == "cuda"
        self._marks = [self._mark()]

    def lap(self) -> None:
        """End a lap, and begin the next."""
        self._marks.append(self._mark())

    def laps(self) -> list[float]:
        """Of each lap. Waits for the device."""
        pairs = list(itertools.pairwise(self._marks))
        if not self._uses_events:
            return [1000 * (end - start) for start, end in pairs]
        self._marks[-1].synchronize()
        return [start.elapsed_time(end) for start, end in pairs]

    def stop(self) -> float:
        """Of all. Waits for the device."""
        self.lap()
        return sum(self.laps())

    def _mark(self) -> Any:
        if not self._uses_events:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def interleaved_medians(
    calls: Mapping[Name, Callable[[int], object]],
    rounds: int,
    device: torch.device,
    *,
    num_inputs: int = 1,
    queued: bool = False,
) -> dict[Name, float]:
    """Microseconds of each call, median over rounds in which the calls take turns, after some to warm up.

    Args:
        calls: by name; each is given the number of an input.
        rounds: how many.
        device: where they run.
        num_inputs: a call is timed once with each, all of them as a whole.
        queued: let a CUDA device wait until the host has launched all of them, so that a slow host is not measured.
    """
    for call in calls.values():
        for index in range(max(num_inputs, NUM_WARM_UPS)):
            call(index % num_inputs)
    times: dict[Name, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            _meet(device)
            if dist.is_initialized():
                call(0)  # so that the timed calls do not wait for ranks to meet
            if queued and device.type == "cuda":
                torch.cuda._sleep(QUEUE_CYCLES)
            clock = Clock(device)
            for index in range(num_inputs):
                call(index)
            times[name].append(1000 * clock.stop() / num_inputs)
    return {name: statistics.median(values) for name, values in times.items()}


def _meet(device: torch.device) -> None:
    """All ranks, if there are several, with nothing left to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    if dist.is_initialized():
        dist.barrier()
