"""What all benchmarks time by."""

import time

import pytest
import torch
import torch.distributed as dist

from examples.benchmarks.timing import Clock, interleaved_medians
from tests.ranks import run_forked

CPU = torch.device("cpu")


def test_calls_take_turns_with_every_input() -> None:
    seen: list[tuple[str, int]] = []
    calls = {name: lambda index, name=name: seen.append((name, index)) for name in ("one", "other")}
    times = interleaved_medians(calls, rounds=3, device=CPU, num_inputs=2)
    assert list(times) == ["one", "other"]
    warm_up = [("one", 0), ("one", 1), ("other", 0), ("other", 1)]
    assert seen == 4 * warm_up


def test_times_are_microseconds_of_one_input() -> None:
    calls = {"sleep": lambda index: time.sleep(5e-3), "nothing": lambda index: None}
    times = interleaved_medians(calls, rounds=3, device=CPU, num_inputs=2)
    assert 5000 <= times["sleep"] < 500_000  # microseconds, whatever else runs
    assert times["nothing"] < times["sleep"] / 2


def test_the_clock_says_milliseconds() -> None:
    clock = Clock(CPU)
    time.sleep(5e-3)
    assert 5 <= clock.stop() < 500


def test_ranks_meet_before_each_call() -> None:
    """The rank that sleeps is waited for before the clock starts, and not in the exchange that is timed."""

    def measure(rank: int) -> float:
        values = torch.ones(1)

        def exchange(index: int) -> None:
            dist.all_reduce(values)

        def only_one_sleeps(index: int) -> None:
            time.sleep(0.1 * rank)

        calls = {"sleep": only_one_sleeps, "exchange": exchange}
        return interleaved_medians(calls, rounds=3, device=CPU)["exchange"]

    assert max(run_forked(2, measure)) < 80_000


@pytest.mark.gpu
def test_events_on_cuda() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    values = torch.ones(1 << 26, device=device)
    times = interleaved_medians({"add": lambda index: values.add_(1)}, 5, device, queued=True)
    assert 50 < times["add"] < 100_000  # 512 MiB are moved
