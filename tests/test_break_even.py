"""From which size on compressing pays: the rules on hand-made timings, their file, the algorithms, and measuring."""

import doctest
import functools
import json
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_taco.bench import settings as bench_settings
from lightning_taco.codec.reference import (
    decode_reference,
    decode_sum_reference,
    encode_reference,
    requantize_reference,
)
from lightning_taco.collectives import (
    ProcessGroupTransport,
    algorithms,
    all_reduce,
    all_to_all,
    break_even,
    reduce_scatter,
)
from lightning_taco.collectives.algorithms import KINDS, algorithms_of
from lightning_taco.collectives.break_even import NEVER_SLOWER, BreakEven, Segment, Timing, segments_of
from lightning_taco.collectives.break_even_file import cache_path, from_json, load, save, to_json
from lightning_taco.collectives.calibration import (
    Ladder,
    RankGroup,
    compressed_call,
    example_tensor,
    measure,
    stock_call,
)
from lightning_taco.collectives.topology import _network
from lightning_taco.config import DEFAULT_MIN_BYTES
from lightning_taco.report.tables import free_table
from tests.ranks import run_forked, run_threads
from tests.timings import INT4, INT8, TOPOLOGY, all_algorithms, hand_made, timing

CPU = torch.device("cpu")
SIZES = (100, 400, 1600, 6400)


def gathers(*times: tuple[float, float]) -> list[Timing]:
    """Stock and compressed microseconds of an all-gather at each of `SIZES`."""
    return [timing(size, stock, all_gather=own) for size, (stock, own) in zip(SIZES, times, strict=False)]


# The rules


def test_examples_of_the_docstrings() -> None:
    for module in (algorithms, break_even, bench_settings):
        results = doctest.testmod(module)
        assert results.attempted > 0
        assert results.failed == 0


@pytest.mark.parametrize(
    ("times", "least"),
    [
        (((1, 2), (2, 3), (4.4, 4), (9, 6)), 1600),  # a tenth faster at a measured size: from there on
        (((2, 1), (4, 3), (8, 6), (16, 11)), 100),  # always: from the smallest size that was measured on
        (((2, 1), (4, 3), (3, 5), (9, 8.1)), 6400),  # slower in between: what is below does not count
        (((2, 1), (4, 3), (8, 6), (10, 9.5)), None),  # less than a tenth faster at the largest: never
        (((1, 2), (2, 4), (4, 8), (8, 16)), None),
        (((1, 2), (2, 2.05), (4, 3.9), (9, 6)), 6400),  # less than a tenth may be noise
        (((10, 20), (20, 25), (80, 40), (320, 100)), 1600),  # twice as fast: still no guess below it
        (((math.nan, 1), (4, 3), (8, 6), (16, 11)), 400),
        (((2, 1), (4, 3), (8, 6), (16, math.nan)), None),
        ((), None),
    ],
)
def test_break_even_of_hand_made_timings(times: Sequence[tuple[float, float]], least: int | None) -> None:
    segments = segments_of(gathers(*times))
    assert segments == (() if least is None else (Segment(least, "all_gather"),))


def test_order_of_timings_does_not_matter() -> None:
    rows = gathers((1, 2), (2, 2.5), (8, 4), (9, 6))
    assert segments_of(rows[::-1]) == segments_of(rows)


def reduces(*times: tuple[float, float, float]) -> list[Timing]:
    """Stock, one-shot and two-shot microseconds at each of `SIZES`."""
    rows = zip(SIZES, times, strict=False)
    return [timing(size, stock, "all_reduce", one_shot=one, two_shot=two) for size, (stock, one, two) in rows]


def test_the_faster_algorithm_is_chosen_for_each_size() -> None:
    segments = segments_of(reduces((12, 10, 20), (14, 11, 21), (30, 25, 22), (90, 80, 40)))
    # Lines from 11 to 25 and from 21 to 22 meet at ten thirteenths of the way from 400 to 1600.
    assert segments == (Segment(100, "one_shot"), Segment(math.ceil(400 + 1200 * 10 / 13), "two_shot"))
    little = segments_of(reduces((12, 10, 20), (14, 11, 10.9), (30, 20, 21), (90, 70, 40)))
    assert [algorithm for _, algorithm in little] == ["one_shot", "two_shot"], "1% does not replace an algorithm"


def test_where_algorithms_meet_neither_pays() -> None:
    """Both ends pay, by different algorithms, and what lies between does by none."""
    rows = reduces((10, 9, 30), (40, 60, 36), (90, 95, 80), (300, 300, 200))
    assert segments_of(rows) == (Segment(400, "two_shot"),)


def test_no_size_is_slower_than_promised() -> None:
    """Timings of straight lines with 6% of noise: whatever is compressed takes at most 1 / 0.98 of the stock time."""
    generator = random.Random(5)
    num_compressed = num_stock = 0
    for _ in range(300):
        lines = [(generator.uniform(5, 60), generator.uniform(0.01, 0.06)) for _ in range(3)]
        true = [functools.partial(lambda line, size: line[0] + line[1] * size, line) for line in lines]
        noisy = [tuple(line(size) * generator.uniform(0.97, 1.03) for line in true) for size in SIZES]
        both = BreakEven.of(reduces(*noisy))  # type: ignore[arg-type]
        for size in range(50, 6400, 37):
            segment = both.segment("all_reduce", INT8, size)
            num_compressed, num_stock = num_compressed + (segment is not None), num_stock + (segment is None)
            if segment is not None and size >= SIZES[0]:
                own = true[1 if segment.algorithm == "one_shot" else 2](size)
                assert true[0](size) / own >= NEVER_SLOWER, (lines, size)
    assert min(num_compressed, num_stock) > 5000, "both happen"


def test_each_kind_and_codec_has_its_own_size() -> None:
    rows = [timing(size, size, "all_reduce", INT8, one_shot=200.0) for size in SIZES]
    rows += [timing(size, size, "all_reduce", INT4, one_shot=1e5) for size in SIZES]
    found = BreakEven.of(rows)
    least = found.min_bytes("all_reduce", INT8)
    assert least == 400
    assert found.segment("all_reduce", INT8, least - 1) is None
    assert found.segment("all_reduce", INT8, least) == Segment(least, "one_shot")
    assert found.segment("all_reduce", INT4, 1 << 40) is None
    assert found.refusal("all_reduce", INT8).endswith(f"not faster below {least} bytes, as measured")
    assert found.refusal("all_reduce", INT4).endswith("slower at all sizes that were measured")
    assert not found.covers(INT8), "three kinds are missing"
    # What was not measured goes by the default.
    assert found.segment("all_gather", INT8, DEFAULT_MIN_BYTES - 1) is None
    assert found.segment("all_gather", INT8, DEFAULT_MIN_BYTES) == Segment(DEFAULT_MIN_BYTES, None)
    both = found.merged(BreakEven.of([timing(1, 2, kind, INT4, **all_algorithms(kind)) for kind in KINDS]))
    assert both.covers(INT4)
    assert both.min_bytes("all_reduce", INT8) == least


# The file


def test_file_holds_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_path() == tmp_path / "lightning_taco" / "break_even.json"
    measured = hand_made(300, (INT8, INT4))
    save(measured, cache_path())
    save(measured, cache_path())
    assert load(cache_path()) == measured
    assert [path.name for path in cache_path().parent.iterdir()] == ["break_even.json"]
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_path() == Path.home() / ".cache" / "lightning_taco" / "break_even.json"


def test_report_shows_the_file() -> None:
    table = free_table(json.loads(json.dumps(to_json(hand_made(300)))))
    assert table is not None
    assert [name for name, _ in table.columns][:5] == ["exchange", "codec", "bytes", "algorithm", "stock_us"]
    assert [row[2].text for row in table.rows] == ["300"] * 6
    never = free_table(to_json(hand_made(None)))
    assert never is not None
    assert {row[-1].text for row in never.rows} == {"never"}


def damaged(change: Callable[[dict[str, Any]], Any]) -> Any:
    content = json.loads(json.dumps(to_json(hand_made())))
    changed = change(content)
    return content if changed is None else changed


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda _: [], "no list of rows"),
        (lambda content: content.update(rows={}), "no list of rows"),
        (lambda content: content["topology"].pop("layout"), "topology does not have the fields"),
        (lambda content: content.update(topology=3), "topology does not have the fields"),
        (lambda content: content["rows"].append(7), "7 is not a row"),
        (lambda content: content["rows"][0].update(exchange="broadcast"), "'broadcast'"),
        (lambda content: content["rows"][0].update(algorithm="ring"), "no algorithm 'ring'"),
        (lambda content: content["rows"][0].update(stock_us="1"), "'1' is not a size, a time or an error"),
        (lambda content: content["rows"][0].update(stock_us=math.nan), "nan is not a size"),
        (lambda content: content["rows"][0].update(compressed_us=-1), "-1 is not a size"),
        (lambda content: content["rows"][0].update(compressed_us=0), "a time of 0"),
        (lambda content: content["rows"][0].update(bytes=1.5), "not whole"),
        (lambda content: content["rows"].pop(1), "does not have all algorithms of reduce_scatter on 2 ranks"),
    ],
)
def test_damaged_file_is_refused_in_words(change: Callable[[dict[str, Any]], Any], message: str) -> None:
    def of_content(content: dict[str, Any]) -> Any:
        found = change(content)
        return found if isinstance(found, list) else None

    with pytest.raises(ValueError, match=message):
        from_json(damaged(of_content))


def test_another_topology_is_told_apart() -> None:
    assert TOPOLOGY.difference(replace(TOPOLOGY)) is None
    other = replace(TOPOLOGY, num_ranks=4, network="NCCL_P2P_DISABLE=1")
    assert TOPOLOGY.difference(other) == "num_ranks 2, here 4; network '', here 'NCCL_P2P_DISABLE=1'"
    variables = {"NCCL_P2P_DISABLE": "1", "NCCL_DEBUG": "INFO", "HOME": "/", "GLOO_SOCKET_IFNAME": "lo"}
    variables |= {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "NCCL_ASYNC_ERROR_HANDLING": "1"}  # of launchers
    assert _network(variables) == "GLOO_SOCKET_IFNAME=lo NCCL_P2P_DISABLE=1"


# The algorithms


def test_every_algorithm_gives_the_result_of_its_own_oracle() -> None:
    def check(rank: int) -> None:
        group, num_ranks = dist.group.WORLD, dist.get_world_size()
        assert group is not None
        for shape in ((6, 256), (1, 1), (7, 33)):
            parts = [torch.randn(shape, generator=torch.Generator().manual_seed(each)) for each in range(num_ranks)]
            own, num_values = parts[rank], parts[0].numel()
            messages = torch.cat([encode_reference(part.view(1, -1), INT8) for part in parts])
            expected = decode_sum_reference(messages, INT8, num_values, torch.float32).view(shape)
            assert torch.equal(all_reduce(own, INT8, group, one_shot=True), expected)
            chunk = math.ceil(math.ceil(num_values / 128) / num_ranks) * 128
            padded = [torch.nn.functional.pad(part.view(-1), (0, chunk * num_ranks - num_values)) for part in parts]
            sums = []
            for owner in range(num_ranks):
                chunks = [part.view(num_ranks, chunk)[owner : owner + 1] for part in padded]
                sums.append(
                    requantize_reference(torch.cat([encode_reference(each, INT8) for each in chunks]), INT8, chunk)
                )
            decoded = decode_reference(torch.cat(sums), INT8, chunk, torch.float32)
            expected = decoded.view(-1)[:num_values].view(shape)
            assert torch.equal(all_reduce(own, INT8, group, one_shot=False), expected)

    run_threads(2, check)
    run_threads(3, check)


def test_two_ranks_swap_rows_by_an_all_gather_with_the_same_bits() -> None:
    def check(rank: int) -> None:
        group = dist.group.WORLD
        assert group is not None
        swapping = ProcessGroupTransport(group, pairs_gather=True)
        values = torch.randn(4, 6, 130, generator=torch.Generator().manual_seed(rank))
        values[0, 0, 0], values[-1, -1, -1] = math.nan, math.inf  # one for each rank
        for dim in (0, 1, 2):
            usual, swapped = (reduce_scatter(values, INT8, by, dim=dim) for by in (group, swapping))
            assert torch.equal(usual.nan_to_num(7), swapped.nan_to_num(7))
            assert usual.isnan().any()
            dims = {"gather_dim": dim, "scatter_dim": (dim + 1) % 3}
            usual, swapped = (all_to_all(values, INT8, by, **dims) for by in (group, swapping))
            assert torch.equal(usual.nan_to_num(7), swapped.nan_to_num(7))
        rows = torch.arange(10, dtype=torch.uint8).view(2, 5) + 100 * rank
        expected = torch.stack([torch.arange(5) + 5 * rank + 100 * source for source in range(2)]).to(torch.uint8)
        assert torch.equal(swapping.start_all_to_all(rows, False).wait(), expected)

    run_forked(2, check)


def test_more_ranks_do_not_swap() -> None:
    def check(rank: int) -> None:
        group = dist.group.WORLD
        assert group is not None
        values = torch.randn(9, 40, generator=torch.Generator().manual_seed(rank))
        swapping = ProcessGroupTransport(group, pairs_gather=True)
        assert torch.equal(reduce_scatter(values, INT8, group), reduce_scatter(values, INT8, swapping))

    run_threads(3, check)


# Measuring


class SlowClock:
    """Every look at it finds it further on, by more on some ranks than on others."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.now = seconds, 0.0

    def __call__(self) -> float:
        self.now += self.seconds
        return self.now


def world(clock: Callable[[], float] = time.perf_counter) -> RankGroup:
    assert dist.group.WORLD is not None
    return RankGroup(dist.group.WORLD, CPU, clock=clock)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_with_different_clocks_agree(num_ranks: int) -> None:
    def check(rank: int) -> tuple[Timing, ...]:
        ladder = Ladder(sizes=(1 << 14, 1 << 15), rounds=2)
        return tuple(measure(world(SlowClock(1e-3 * (1 + 2 * rank))), [INT8, INT4], ladder))

    first, *others = run_threads(num_ranks, check)
    assert all(other == first for other in others)
    assert [(row.kind, row.codec) for row in first] == [
        (kind, str(codec)) for _ in range(2) for kind in KINDS for codec in (INT8, INT4)
    ]
    slowest_us = 1e3 * (1 + 2 * (num_ranks - 1))
    assert all(row.stock_us == pytest.approx(slowest_us) for row in first)
    for row in first:
        assert dict(row.algorithm_us) == pytest.approx(all_algorithms(row.kind, slowest_us, num_ranks))
        for error in row.relative_errors.values():
            assert 0.003 < error < (0.02 if row.codec == str(INT8) else 0.3)
        if (row.kind, num_ranks) == ("all_reduce", 3):
            assert row.relative_errors["two_shot"] > 1.2 * row.relative_errors["one_shot"], "it quantises twice"
        assert row.num_bytes % (1 << 14) == 0 or num_ranks == 3


def test_all_ranks_stop_when_one_runs_out_of_time() -> None:
    def check(rank: int) -> set[int]:
        ladder = Ladder(sizes=(1 << 13, 1 << 14, 1 << 15), rounds=1, seconds=0.5, kinds=("all_gather",))
        return {row.num_bytes for row in measure(world(SlowClock(rank * 2e-2)), [INT8], ladder)}

    assert run_threads(2, check) == [{1 << 14}] * 2, "8 KiB is a token for each rank: rounded up to 16 KiB"


def test_sizes_are_those_that_min_bytes_sees() -> None:
    def check(rank: int) -> None:
        group = dist.group.WORLD
        assert group is not None
        for kind in KINDS:
            tensor, num_bytes = example_tensor(kind, 100_000, group, CPU)
            num_shards = dist.get_world_size() if kind == "all_gather" else 1
            assert tensor.numel() * 4 * num_shards == num_bytes
            assert 100_000 <= num_bytes < 100_000 + 4 * 2 * 1026 * dist.get_world_size()
            exact = stock_call(kind, tensor, group)()
            calibrated = replace(INT8, reshape="calibrated")
            for codec in (INT8, calibrated):
                for algorithm in algorithms_of(kind, dist.get_world_size()):
                    result = compressed_call(kind, tensor, codec, world(), algorithm)()
                    assert result.shape == exact.shape
                    assert (result - exact).norm() < 0.02 * exact.norm()

    run_threads(2, check)
    run_threads(3, check)
