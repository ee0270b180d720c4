"""Counters of traffic: bytes worked out by hand, and bytes that a transport really saw."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_taco.collectives import (
    ProcessGroupTransport,
    TrafficCount,
    TrafficCounters,
    TrafficKey,
    all_gather,
    all_reduce,
    all_to_all,
    reduce_scatter,
)
from lightning_taco.collectives.traffic import Kind, compressed_sent_bytes, stock_sent_bytes
from lightning_taco.collectives.transport import Arriving
from lightning_taco.config import CodecConfig
from tests.ranks import run_threads

KINDS: tuple[Kind, ...] = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
BLOCK_128 = CodecConfig(element="e4m3", block_size=128)
BLOCK_32 = CodecConfig(element="int8", block_size=32)
DUAL = CodecConfig(element="e4m3", block_size=128, scale_mode="dual")


# 1000 values. Whole: 8 blocks of 128 -> 1024 codes + 8 scales of 4 bytes = 1056. In 2: 500 -> 4 blocks -> 512 + 16.
# In 3: 334 -> 3 blocks -> 384 + 12, filled up to 400. In 4: 250 -> 2 blocks -> 256 + 8, up to 272. In 8: 125 -> 1 block
# -> 128 + 4, up to 144. A two-shot chunk is ceil(8 blocks / P): 3, 2 and 1 of them for 3, 4 and 8 ranks.
@pytest.mark.parametrize(
    ("kind", "world", "expected"),
    [
        ("all_reduce", 1, 0),
        ("all_reduce", 2, 1056),
        ("all_reduce", 3, 2 * 2 * 400),
        ("all_reduce", 4, 2 * 3 * 272),
        ("all_reduce", 8, 2 * 7 * 144),
        ("reduce_scatter", 1, 0),
        ("reduce_scatter", 2, 528),
        ("reduce_scatter", 3, 2 * 400),
        ("reduce_scatter", 4, 3 * 272),
        ("reduce_scatter", 8, 7 * 144),
        ("all_to_all", 2, 528),
        ("all_to_all", 8, 7 * 144),
        ("all_gather", 1, 0),
        ("all_gather", 2, 1056),
        ("all_gather", 3, 2 * 1056),
        ("all_gather", 8, 7 * 1056),
    ],
)
def test_compressed_bytes_by_hand(kind: Kind, world: int, expected: int) -> None:
    assert compressed_sent_bytes(kind, 1000, world, BLOCK_128) == expected


@pytest.mark.parametrize(
    ("codec", "expected"),
    [
        (DUAL, 1024 + 2 * 8 * 4),
        (BLOCK_32, 1024 + 32 * 4),
        (CodecConfig(element="int8", block_size=512), 1024 + 16),
        (CodecConfig(element="int8", block_size=64, rotation=False), 1024 + 16 * 4),
    ],
    ids=str,
)
def test_compressed_bytes_of_other_codecs_by_hand(codec: CodecConfig, expected: int) -> None:
    assert compressed_sent_bytes("all_gather", 1000, 2, codec) == expected


@pytest.mark.parametrize(
    ("kind", "world", "expected"),
    [
        ("all_reduce", 1, 0),
        ("all_reduce", 2, 2000),
        ("all_reduce", 3, 2666),
        ("all_reduce", 4, 3000),
        ("all_reduce", 8, 3500),
        ("reduce_scatter", 2, 1000),
        ("reduce_scatter", 4, 1500),
        ("all_to_all", 2, 1000),
        ("all_to_all", 8, 1750),
        ("all_gather", 1, 0),
        ("all_gather", 2, 2000),
        ("all_gather", 8, 14000),
    ],
)
def test_stock_bytes_of_2000_by_hand(kind: Kind, world: int, expected: int) -> None:
    assert stock_sent_bytes(kind, 2000, world) == expected


class CountingTransport(ProcessGroupTransport):
    """Adds up the bytes of the rows that leave this rank."""

    sent_bytes: int

    def start_all_to_all(self, messages: Tensor, is_async: bool) -> Arriving:
        self._count(messages.shape[1])
        return super().start_all_to_all(messages, is_async)

    def start_all_gather(self, message: Tensor, is_async: bool) -> Arriving:
        self._count(message.shape[1])
        return super().start_all_gather(message, is_async)

    def _count(self, message_bytes: int) -> None:
        previous = getattr(self, "sent_bytes", 0)
        object.__setattr__(self, "sent_bytes", previous + (self.world_size - 1) * message_bytes)


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("codec", [BLOCK_128, BLOCK_32, DUAL], ids=str)
@pytest.mark.parametrize("num_columns", [1, 3, 50, 257])
def test_counted_bytes_are_those_that_leave_a_rank(world: int, codec: CodecConfig, num_columns: int) -> None:
    def body(rank: int) -> None:
        tensor = torch.randn(24, num_columns, dtype=torch.bfloat16)  # every world size divides 24
        exchanges = {
            "all_reduce": lambda transport: all_reduce(tensor, codec, transport),
            "reduce_scatter": lambda transport: reduce_scatter(tensor, codec, transport),
            "all_gather": lambda transport: all_gather(tensor, codec, transport, dim=1),
            "all_to_all": lambda transport: all_to_all(tensor, codec, transport, gather_dim=1, scatter_dim=0),
        }
        assert dist.group.WORLD is not None
        for kind in KINDS:
            transport = CountingTransport(dist.group.WORLD)
            exchanges[kind](transport)
            expected = compressed_sent_bytes(kind, tensor.numel(), world, codec)
            assert getattr(transport, "sent_bytes", 0) == expected

    run_threads(world, body)


def test_ratio_of_a_large_bf16_tensor_is_that_of_the_bits() -> None:
    num_values = 1 << 22
    for kind, world in (("all_reduce", 2), ("all_reduce", 8), ("all_gather", 4), ("reduce_scatter", 8)):
        stock = stock_sent_bytes(kind, 2 * num_values, world)
        ratio = stock / compressed_sent_bytes(kind, num_values, world, BLOCK_128)
        assert ratio == pytest.approx(16 / BLOCK_128.bits_per_value, rel=1e-6)


def test_counters_add_up_by_outcome_kind_and_direction() -> None:
    counters = TrafficCounters()
    compressed = TrafficKey("blocks.0", "forward", "all_reduce", "compressed")
    small = TrafficKey("head", "forward", "all_gather", "smaller than min_bytes=10")
    counters.record(compressed, 200, 100)
    counters.record(compressed, 200, 100)
    counters.record(TrafficKey("blocks.0", "backward", "all_reduce", "compressed"), 50, 20)
    counters.record(small, 8, 8)
    counters.record(TrafficKey("blocks.0", "forward", "all_gather", "smaller than min_bytes=10"), 8, 8)
    assert counters.counts[compressed] == TrafficCount(num_messages=2, stock_bytes=400, sent_bytes=200)
    assert counters.total() == TrafficCount(5, 466, 236)
    assert counters.total(outcome="compressed") == TrafficCount(3, 450, 220)
    assert counters.total(outcome="compressed", direction="backward") == TrafficCount(1, 50, 20)
    assert counters.total(kind="all_gather") == TrafficCount(2, 16, 16)
    assert counters.total(kind="all_to_all") == TrafficCount()
    assert counters.stock_reasons() == {"smaller than min_bytes=10": 2}
    assert counters.total(outcome="compressed", direction="forward").ratio == 2.0
    counters.clear()
    assert counters.total() == TrafficCount()
    assert counters.total().ratio == 1.0
