"""The closed form of exchanges at P ranks, against a simulation of the links, and against throttled ranks."""

import time
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from examples.benchmarks.collectives import CODECS
from examples.benchmarks.link_model import (
    MEBI,
    Assumptions,
    Codec,
    Exchanges,
    Kernels,
    Line,
    Link,
    Mapped,
    fit_line,
    two_hosts,
)
from examples.benchmarks.simulate_links import (
    fair_rates,
    hosts,
    ring_all_reduce_us,
    simulate,
    switch,
    two_shot_us,
)
from lightning_taco.collectives import ProcessGroupTransport, all_reduce
from lightning_taco.collectives.traffic import compressed_sent_bytes
from tests.ranks import run_threads

NUM_BYTES = 64.0 * MEBI
NUM_VALUES = NUM_BYTES / 2
WIRE = Line(0.0, 1 / 24e3)  # 24 GB/s
INT8 = Codec(CODECS["int8"], Kernels(40.0, 36.0, 46.0, 58.0))
SILENT = replace(INT8, kernels=Kernels(0, 0, 0, 0))
MESSAGE_BYTES = INT8.message_bytes(NUM_VALUES)
PLAIN = Link(WIRE, WIRE, WIRE, WIRE)


def test_a_line_is_found_again() -> None:
    line = Line(30.0, 5e-5)
    fitted = fit_line([(size, line.us(size)) for size in (1e6, 3e6, 5e7)])
    assert (fitted.latency_us, fitted.us_per_byte) == (pytest.approx(30.0), pytest.approx(5e-5))


def test_latency_is_never_negative() -> None:
    fitted = fit_line([(1e6, 10.0), (2e6, 30.0)])
    assert fitted.latency_us == 0
    assert 1e-5 < fitted.us_per_byte < 1.5e-5


@pytest.mark.parametrize("points", [[], [(1e6, 30.0), (2e6, 10.0), (4e6, 5.0)]])
def test_what_is_no_line_is_refused(points: list[tuple[float, float]]) -> None:
    with pytest.raises(ValueError, match=r"one measured point|do not grow"):
        fit_line(points)


def test_messages_have_the_bytes_of_the_layout() -> None:
    assert compressed_sent_bytes("all_gather", int(NUM_VALUES), 2, CODECS["int8"]) == MESSAGE_BYTES


def test_two_ranks_take_what_they_took() -> None:
    """At two ranks nothing is assumed: no contention, no growth, no all-to-all."""
    link = replace(PLAIN, all_reduce=Line(30.0, 1e-4), send_recv=Line(0.0, 1.0))
    for assumptions in (Assumptions(), Assumptions(contention=1, hop_us=9, all_to_all=0)):
        pair = Exchanges(link, 2, assumptions)
        assert pair.stock_us("all_reduce", 1e6) == pytest.approx(130.0)
        assert pair.stock_us("all_gather", 1e6) == pytest.approx(0.5e6 / 24e3)
        expected = 40 + MESSAGE_BYTES / 24e3 + 58
        assert pair.compressed_us("all_reduce", NUM_VALUES, INT8) == pytest.approx(expected)


def test_eight_ranks_by_hand() -> None:
    link = Link(Line(8.0, 1e-4), WIRE, Line(4.0, 2e-4), Line(2.0, 3e-4), mapped=Mapped(20.0, 1e-5))
    eight = Exchanges(link, 8, Assumptions(contention=1, hop_us=3, all_to_all=0))
    assert eight.stock_us("all_reduce", 8e6) == pytest.approx(8 + 2 * 6 * 3 + 4 * 1e-4 * 14e6)
    assert eight.stock_us("all_gather", 8e6) == pytest.approx(4 + 6 * 3 + 4 * 2e-4 * 7e6)
    sent = 7 / 8 * MESSAGE_BYTES
    kernels = 40 + 46 * (9 / 8) / 3 + 36
    expected = kernels + (2 + 4 * 3e-4 * sent) + (4 + 6 * 3 + 4 * 2e-4 * sent)
    assert eight.compressed_us("all_reduce", NUM_VALUES, INT8) == pytest.approx(expected)
    free = replace(eight, assumptions=Assumptions())
    written = 1e-5 * sent
    assert free.mapped_us(NUM_VALUES, INT8) == pytest.approx(30 + 2 * written + 36)
    one_shot = 40 + 4 + 2e-4 * 7 * MESSAGE_BYTES + 58 * (8 * 8.25 / 8 + 2) / (2 * 8.25 / 8 + 2)
    assert free.one_shot_us(NUM_VALUES, INT8) == pytest.approx(one_shot)


def test_the_host_launches_no_faster() -> None:
    slow_host = replace(PLAIN, host_us_per_launch=1000.0)
    assert Exchanges(slow_host, 2).compressed_us("all_reduce", 1e5, INT8) == 3000
    assert Exchanges(slow_host, 4).compressed_us("all_reduce", 1e5, INT8) == 5000


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("contention", [0.0, 1.0])
def test_closed_form_and_simulation_agree(num_ranks: int, contention: float) -> None:
    """Through a switch, and through a medium that holds what two ranks had: within rounding, where ranks are alike."""
    network = switch(num_ranks, 24e3, shared=2 * 24e3 if contention else None)
    exchanges = Exchanges(PLAIN, num_ranks, Assumptions(contention=contention))
    simulated = ring_all_reduce_us(network, num_ranks, NUM_BYTES)
    assert simulated == pytest.approx(exchanges.stock_us("all_reduce", NUM_BYTES), rel=1e-6)
    kernels = (40.0, INT8.requantize_us(num_ranks, NUM_VALUES / num_ranks), 36.0)
    simulated = two_shot_us(network, num_ranks, MESSAGE_BYTES, kernels)
    assert simulated == pytest.approx(exchanges.two_shot_us(NUM_VALUES, INT8), rel=1e-6)


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_latencies_grow_with_the_steps_of_rings(num_ranks: int) -> None:
    """And not with those of an all-to-all, whose transfers start together."""
    network = switch(num_ranks, 24e3, latency_us=100.0)
    once = Line(100.0, 1 / 24e3)
    exchanges = Exchanges(Link(Line(200.0, 1 / 24e3), once, once, once), num_ranks, Assumptions(hop_us=100))
    simulated = ring_all_reduce_us(network, num_ranks, NUM_BYTES)
    assert simulated == pytest.approx(exchanges.stock_us("all_reduce", NUM_BYTES), rel=1e-6)
    simulated = two_shot_us(network, num_ranks, MESSAGE_BYTES)
    assert simulated == pytest.approx(exchanges.two_shot_us(NUM_VALUES, SILENT), rel=1e-6)


def test_closed_form_fails_on_hosts_that_share_a_nic() -> None:
    """A ring crosses the NIC once, an all-to-all with every rank: the two-shot's gain goes, as `two_hosts` says."""
    network = hosts(8, 4, inside=1e9, nic=24e3)
    ring = ring_all_reduce_us(network, 8, NUM_BYTES)
    two_shot = two_shot_us(network, 8, MESSAGE_BYTES)
    bytes_of = two_hosts(8, NUM_BYTES, MESSAGE_BYTES)
    assert ring == pytest.approx(bytes_of.stock / 24e3, rel=1e-3)
    assert two_shot == pytest.approx(bytes_of.two_shot / 24e3, rel=1e-3)
    assert ring / two_shot == pytest.approx(1.18, abs=0.01)
    alike = Exchanges(PLAIN, 8, Assumptions(contention=1))
    closed = alike.stock_us("all_reduce", NUM_BYTES) / alike.two_shot_us(NUM_VALUES, SILENT)
    assert closed == pytest.approx(16 / 8.25)
    assert closed > 1.6 * ring / two_shot


def test_a_late_rank_costs_both_the_same() -> None:
    """So it takes from the speed-up, which the closed form does not know."""
    network, late = switch(4, 24e3), {3: 1000.0}
    ring, late_ring = (ring_all_reduce_us(network, 4, NUM_BYTES, each) for each in (None, late))
    two_shot, late_two_shot = (two_shot_us(network, 4, MESSAGE_BYTES, late_us=each) for each in (None, late))
    assert 0.5 * 1000 < late_ring - ring <= 1000 * (1 + 1e-9)
    assert 0.5 * 1000 < late_two_shot - two_shot <= 1000 * (1 + 1e-9)
    assert late_ring / late_two_shot < ring / two_shot


def test_rates_are_fair_and_links_are_full() -> None:
    rates = fair_rates({1: ["a"], 2: ["a", "b"], 3: ["b"], 4: ["c"]}, {"a": 10.0, "b": 30.0, "c": 7.0})
    assert rates == {1: 5.0, 2: 5.0, 3: 25.0, 4: 7.0}


def test_nothing_takes_no_time() -> None:
    assert simulate([], switch(2, 1.0)) == 0


LATENCY_S, BYTES_PER_S = 0.005, 1.0e6


@dataclass(frozen=True)
class Throttled:
    """A transport of a slow link: each exchange sleeps for what a rank sends."""

    inner: ProcessGroupTransport
    sent: list[int]

    @property
    def rank(self) -> int:
        return self.inner.rank

    @property
    def world_size(self) -> int:
        return self.inner.world_size

    def message_buffer(self, num_rows: int, message_bytes: int) -> None:
        return None

    def receiving(self, is_async: bool) -> Any:
        return self.inner.receiving(is_async)

    def start_all_to_all(self, messages: Any, is_async: bool) -> Any:
        self.wait(messages, (self.world_size - 1) * messages.shape[1])
        return self.inner.start_all_to_all(messages, is_async)

    def start_all_gather(self, message: Any, is_async: bool) -> Any:
        self.wait(message, (self.world_size - 1) * message.shape[1])
        return self.inner.start_all_gather(message, is_async)

    def wait(self, message: Tensor, num_bytes: int) -> None:
        self.sent.append(num_bytes)
        time.sleep(LATENCY_S + num_bytes / BYTES_PER_S)


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_throttled_ranks_send_and_take_what_the_closed_form_says(num_ranks: int) -> None:
    num_values, codec = 1 << 17, CODECS["int8"]

    def measure(rank: int) -> tuple[list[int], float]:
        import torch.distributed as dist

        group = dist.group.WORLD
        assert isinstance(group, dist.ProcessGroup)
        transport = Throttled(ProcessGroupTransport(group), [])
        values = torch.randn(num_values, dtype=torch.bfloat16)
        all_reduce(values, codec, transport)
        transport.sent.clear()
        start = time.perf_counter()
        all_reduce(values, codec, transport)
        return transport.sent, time.perf_counter() - start

    line = Line(1e6 * LATENCY_S, 1e6 / BYTES_PER_S)
    expected_s = (
        Exchanges(Link(line, line, line, line), num_ranks).compressed_us("all_reduce", num_values, SILENT) / 1e6
    )
    for sent, seconds in run_threads(num_ranks, measure):
        assert len(sent) == (1 if num_ranks == 2 else 2)
        assert sum(sent) == compressed_sent_bytes("all_reduce", num_values, num_ranks, codec)
        assert 0.99 * expected_s < seconds < 3 * expected_s  # what is above is the codec, on shared processors
