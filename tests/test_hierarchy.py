"""Exchanges in two steps on hosts that are made up: against an oracle composed by hand, and as a session's choice."""

import doctest
import math
import platform
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_taco import CodecConfig, CompressionConfig
from lightning_taco.codec.reference import decode_sum_reference, encode_reference
from lightning_taco.collectives import hierarchy
from lightning_taco.collectives.algorithms import KINDS, exchange, sent_bytes
from lightning_taco.collectives.break_even import BreakEven, Timing
from lightning_taco.collectives.break_even_file import Measured, from_json, to_json
from lightning_taco.collectives.calibration import Ladder, RankGroup, measure
from lightning_taco.collectives.hierarchy import Hierarchy, host_size
from lightning_taco.collectives.topology import Topology
from lightning_taco.dtensor import CompressionSession, Exchange
from tests.ranks import run_forked
from tests.timings import INT4, INT8

CPU = torch.device("cpu")
SHAPES_AND_DIMS = (((8, 5), 0), ((3, 8, 33), 1), ((4, 16), -1), ((8, 1, 1), -3))


def on_hosts(rank: int, size: int) -> tuple[Any, Hierarchy]:
    """The default group, as if every `size` ranks were a host; each rank is a process, so nothing is to be undone."""
    pytest.MonkeyPatch().setattr(platform, "node", lambda: f"host{rank // size}")
    found = Hierarchy.of(dist.group.WORLD)  # type: ignore[arg-type]
    assert found is not None
    return dist.group.WORLD, found


def part_of(rank: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(17 + rank)).to(dtype)


@pytest.mark.parametrize(
    ("hosts", "size"),
    [
        ("aabb", 2),
        ("aaabbbccc", 3),
        ("aaaa", None),  # one host
        ("abcd", None),  # one rank on each
        ("abab", None),  # not side by side
        ("aaab", None),
        ("aabbb", None),
        ("aabbaa", None),
        ("a", None),
    ],
)
def test_hosts_with_equal_blocks_make_a_hierarchy(hosts: str, size: int | None) -> None:
    assert host_size(hosts) == size
    assert doctest.testmod(hierarchy).failed == 0


def test_two_hosts_of_two_ranks_give_the_oracle_bit_for_bit() -> None:
    def check(rank: int) -> None:
        group, ranks = on_hosts(rank, 2)
        for (shape, dim), dtype, op in zip(
            SHAPES_AND_DIMS * 2,
            [torch.float32, torch.bfloat16, torch.float16] * 3,
            ["sum", "sum", "avg"] * 3,
            strict=False,
        ):
            parts = [part_of(each, shape, dtype) for each in range(4)]
            own = parts[rank]
            host_sums = [parts[0].float() + parts[1].float(), parts[2].float() + parts[3].float()]
            result = exchange("all_reduce", own, INT8, group, algorithm="hierarchical", ranks=ranks, op=op)
            assert torch.equal(result, between(host_sums, own, op))
            reduced = exchange(
                "reduce_scatter", own, INT8, group, algorithm="hierarchical", ranks=ranks, op=op, dim=dim
            )
            shards = [host_sum.chunk(4, dim)[rank].contiguous() for host_sum in host_sums]
            assert torch.equal(reduced, between(shards, own[:0], op, shards[0].shape))
            assert reduced.is_contiguous()
            gathered = exchange("all_gather", own, INT8, group, algorithm="hierarchical", ranks=ranks, dim=dim)
            assert torch.equal(gathered, exchange("all_gather", own, INT8, group, dim=dim)), "each shard is coded once"
            assert gathered.is_contiguous()

    run_forked(4, check)


def between(host_sums: list[Tensor], like: Tensor, op: str, shape: Any = None) -> Tensor:
    """What two hosts make of their sums: one part for each place of an all-reduce, in whole blocks of 128 values."""
    num_values = host_sums[0].numel()
    size = 1 if shape is not None else 2
    chunk = math.ceil(math.ceil(num_values / 128) / size) * 128 if shape is None else num_values
    found = []
    for place in range(size):
        cut = slice(place * chunk, (place + 1) * chunk)
        rows = [
            torch.nn.functional.pad(each.reshape(-1)[cut], (0, chunk - each.reshape(-1)[cut].numel()))
            for each in host_sums
        ]
        messages = torch.cat([encode_reference(row.view(1, -1), INT8) for row in rows])
        total = decode_sum_reference(messages, INT8, chunk, torch.float32)
        found.append(total / 4 if op == "avg" else total)
    return torch.cat(found)[:num_values].to(like.dtype).view(like.shape if shape is None else shape)


def test_three_hosts_agree_and_stay_close_and_nonfinite() -> None:
    stochastic = replace(INT4, rounding="stochastic")

    def check(rank: int) -> list[Tensor]:
        group, ranks = on_hosts(rank, 2)
        own = part_of(rank, (6, 6, 50))
        exact = sum(part_of(each, (6, 6, 50)) for each in range(6))
        assert isinstance(exact, Tensor)
        for codec, largest in ((INT8, 0.02), (stochastic, 0.5)):
            result = exchange("all_reduce", own, codec, group, algorithm="hierarchical", ranks=ranks, seed=5)
            assert 0 < (result - exact).norm() < largest * exact.norm()
        own[0, 0, 0] = math.nan if rank == 3 else 1.0
        own[5, 5, 49] = -math.inf if rank == 0 else 1.0
        broken = exchange("all_reduce", own, INT8, group, algorithm="hierarchical", ranks=ranks)
        assert broken[0, 0, 0].isnan()
        assert not broken[5, 5, 49].isfinite()
        assert broken[3].isfinite().any()
        empty = exchange("all_reduce", own[:0], INT8, group, algorithm="hierarchical", ranks=ranks)
        assert empty.shape == (0, 6, 50)
        # Five rows over six ranks: the usual way, with a rank that gets nothing.
        uneven = exchange("reduce_scatter", own[:5], INT8, group, algorithm="hierarchical", ranks=ranks)
        assert len(uneven) == (rank < 5)
        return [result, broken.nan_to_num(7)]

    first, *others = run_forked(6, check)
    assert all(torch.equal(one, other) for found in others for one, other in zip(first, found, strict=True))


def test_hierarchy_is_measured_chosen_and_given_back() -> None:
    def check(rank: int) -> tuple[Timing, ...]:
        before = len(dist.distributed_c10d._world.pg_map)
        group, ranks = on_hosts(rank, 2)
        topology = Topology.of(group, CPU)
        assert (topology.layout, topology.machine) == ("0 0 1 1", "host0")
        timings = tuple(measure(RankGroup(group, CPU, hierarchy=ranks), [INT8], Ladder(sizes=(1 << 15,), rounds=1)))
        measured = Measured(topology, BreakEven.of(timings))
        assert from_json(to_json(measured)) == measured
        with pytest.raises(ValueError, match="has no algorithm 'hierarchical'"):
            from_json(to_json(measured._replace(topology=replace(topology, layout="0 0 0 0"))))
        session = CompressionSession(CompressionConfig(min_bytes="auto"), group)
        us: Any = {"two_shot": 3.0, "one_shot": 2.0, "hierarchical": 1.0}
        session.break_even = BreakEven.of([Timing("all_reduce", str(INT8), 4096, 9.0, us, us)])
        session.hierarchy = ranks
        values = part_of(rank, (8, 512))
        result = session.exchange(Exchange(kind="all_reduce", tensor=values), values.clone)
        by: Any = {"algorithm": "hierarchical", "ranks": ranks}
        assert torch.equal(result, exchange("all_reduce", values, INT8, group, **by))
        # A quarter of two hosts' sums as codes, and twice half of the values as fp32 within the host.
        expected = 2 * (8 * 512 // 2) * 4 + 8 * 512 // 2 * 8.25 / 8
        assert session.traffic.total().sent_bytes == expected == sent_bytes("all_reduce", values, INT8, 4, **by)
        ranks.destroy()
        assert len(dist.distributed_c10d._world.pg_map) == before
        return timings

    first, *others = run_forked(4, check)
    assert all(other == first for other in others)
    for row in first:
        assert ("hierarchical" in row.algorithm_us) == (row.kind != "all_to_all")
        assert all(0.003 < error < 0.02 for error in row.relative_errors.values())
    assert [row.kind for row in first] == list(KINDS)


def test_codec_of_hosts_is_the_users() -> None:
    def check(rank: int) -> None:
        _, ranks = on_hosts(rank, 2)
        own = part_of(rank, (4, 512))
        for codec in (CodecConfig(element="e4m3"), CodecConfig(element="int6", levels="gaussian")):
            assert sent_bytes("all_gather", own, codec, 4, "hierarchical", ranks) == (
                2048 * codec.bits_per_value / 8 + 2 * 2048 * 4
            )
            reduce_scatter = sent_bytes("reduce_scatter", own, codec, 4, "hierarchical", ranks)
            assert reduce_scatter == 1024 * 4 + 512 * codec.bits_per_value / 8

    run_forked(4, check)
