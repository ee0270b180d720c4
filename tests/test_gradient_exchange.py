"""TLq-HS over process groups: what it sums, in how many bits, and how nodes are found. Ranks are forked gloo processes.

One fork of 4 and one of 8 ranks run all checks that need ranks; a test each reads what they have found.
"""

import math
import os
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_taco.config import CodecConfig
from lightning_taco.data_parallel import DataParallelTraffic, GradientExchange, make_node_groups
from lightning_taco.data_parallel.nodes import given_node_size
from lightning_taco.data_parallel.seeds import derived_seed, site_seed
from lightning_taco.data_parallel.slices import advance_staggered, column_slices
from lightning_taco.data_parallel.traffic import BETWEEN_NODES, INSIDE_NODE
from tests.ranks import run_forked

INT8 = CodecConfig(element="int8", rounding="stochastic")
INT4 = CodecConfig(element="int4", rounding="stochastic")
NEAREST8 = CodecConfig(element="int8")


def relative_error(result: Tensor, exact: Tensor) -> float:
    return ((result.double() - exact.double()).norm() / exact.double().norm()).item()


def shared_rows(num_values: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """The rows of this rank, and this rank's row of the exact sum of all ranks' rows in float64."""
    world, rank = dist.get_world_size(), dist.get_rank()
    rows = [torch.randn(world, num_values, generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(world)]
    return rows[rank], torch.stack(rows).double().sum(dim=0)[rank]


def exchange_of(
    node_size: int, inside: CodecConfig | None = INT8, between: CodecConfig | None = INT4
) -> GradientExchange:
    groups = make_node_groups(dist.group.WORLD, node_size)  # type: ignore[arg-type]
    return GradientExchange(groups, inside, between, DataParallelTraffic())


def reduced(exchange: GradientExchange, rows: Tensor, **options: Any) -> Tensor:
    return exchange.reduce_scatter(rows, torch.full_like(rows[0], math.nan), **options)


def check_errors(levels: GradientExchange) -> dict[str, float]:
    """Relative errors of sums, by dtype, size and number of slices."""
    found = {}
    for num_values in (1, 7, 129, 5000):
        rows, exact = shared_rows(num_values)
        found[f"fp32 {num_values}"] = relative_error(reduced(levels, rows), exact)
    rows, exact = shared_rows(5000)
    for num_slices in (2, 3, 8):
        found[f"slices {num_slices}"] = relative_error(reduced(levels, rows, num_slices=num_slices), exact)
    for dtype in (torch.bfloat16, torch.float16):
        rows, exact = shared_rows(5000, dtype)
        found[str(dtype)] = relative_error(reduced(levels, rows), exact)
    return found


def check_constants(levels: GradientExchange) -> dict[str, float]:
    """What comes out of constant gradients, as the largest deviation; the mean of 1 is 1."""
    world = dist.get_world_size()
    found = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        ones = torch.ones(world, 256, dtype=dtype)
        found[f"sum {dtype}"] = reduced(levels, ones).float().sub(world).abs().max().item()
        found[f"mean {dtype}"] = reduced(levels, ones, factor=1 / world).float().sub(1).abs().max().item()
        gathered = levels.all_reduce(torch.ones(300, dtype=dtype), torch.empty(300, dtype=dtype), factor=1 / world)
        found[f"all_reduce {dtype}"] = gathered[:256].float().sub(1).abs().max().item()
    # Near the limit of fp16 a sum would overflow, the mean does not.
    large = torch.full((world, 256), 6e4, dtype=torch.float16)
    found["large"] = reduced(levels, large, factor=1 / world).float().div(6e4).sub(1).abs().max().item()
    found["zeros"] = reduced(levels, torch.zeros(world, 300)).abs().max().item()
    return found


def check_same_bits(levels: GradientExchange) -> dict[str, bool]:
    """All ranks end with the same bits; the same seed repeats them and another does not."""
    values = torch.randn(3001, generator=torch.Generator().manual_seed(dist.get_rank()))
    first, again, other = (levels.all_reduce(values, torch.empty(3001), seed=seed) for seed in (5, 5, 6))
    everybodys = [torch.empty_like(first) for _ in range(dist.get_world_size())]
    dist.all_gather(everybodys, first)
    in_place = values.clone()
    levels.all_reduce(in_place, in_place, seed=5)
    return {
        "ranks": all(torch.equal(first, each) for each in everybodys),
        "seed": torch.equal(first, again) and torch.equal(first, in_place),
        "other seed": not torch.equal(first, other),
    }


def check_nonfinite(levels: GradientExchange) -> dict[str, bool]:
    """One NaN, or one Inf, on one rank: its block, and no other, is not finite on the rank that receives it."""
    world, rank = dist.get_world_size(), dist.get_rank()
    found = {}
    for name, value in (("nan", math.nan), ("inf", math.inf)):
        rows = torch.ones(world, 384)
        if rank == 0:
            rows[world - 1, 130] = value
        result = reduced(levels, rows)
        broken = ~result.isfinite()
        found[name] = bool(broken[128:256].all() if rank == world - 1 else not broken.any())
        found[f"{name} elsewhere"] = not broken[:128].any() and not broken[256:].any()
    tiny = reduced(levels, torch.full((world, 128), 1e-30))
    found["tiny"] = bool((tiny / (world * 1e-30) - 1).abs().max() < 1e-3)
    return found


def check_bias(levels: GradientExchange) -> float:
    """How far the mean of many sums is from the exact one, as a part of the error of a single sum over the root."""
    rows, exact = shared_rows(512)
    results = torch.stack([reduced(levels, rows, seed=seed).double() for seed in range(64)])
    return ((results.mean(dim=0) - exact).norm() / ((results[0] - exact).norm() / 8)).item()


def check_bits(levels: GradientExchange) -> tuple[float, float, float]:
    """Counted bits a value inside and between, and the bytes of a stock reduce-scatter over those of ours."""
    levels.traffic.clear()
    world = dist.get_world_size()
    reduced(levels, torch.randn(world, 1 << 14))
    traffic = levels.traffic
    stock = traffic.total().stock_bytes
    assert stock == (world - 1) * (1 << 14) * 4, "the two levels together send what a ring would"
    return traffic.bits_per_value(INSIDE_NODE), traffic.bits_per_value(BETWEEN_NODES), traffic.total().ratio


def all_checks(levels: GradientExchange) -> dict[str, Any]:
    checks = {
        "errors": check_errors,
        "constants": check_constants,
        "same bits": check_same_bits,
        "nonfinite": check_nonfinite,
        "bits": check_bits,
    }
    return {name: check(levels) for name, check in checks.items()}


def four_ranks(rank: int) -> dict[str, Any]:
    found = {
        "2x2": all_checks(exchange_of(2)),
        "one node": all_checks(exchange_of(4)),
        "four nodes": all_checks(exchange_of(1)),
        "8 bits only": all_checks(exchange_of(2, between=None)),
        "4 bits only": all_checks(exchange_of(2, inside=None)),
        "bias": check_bias(exchange_of(2)),
        "levels": [exchange_of(size).has_two_levels for size in (1, 2, 4, 9)],
        "refused": error_of(lambda: exchange_of(3)),
    }
    exact = exchange_of(2, NEAREST8, NEAREST8)
    rows, _ = shared_rows(700)
    found["slices do not change what is summed"] = torch.equal(reduced(exact, rows), reduced(exact, rows, num_slices=4))
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    found["environment"] = nodes_of(make_node_groups(dist.group.WORLD))  # type: ignore[arg-type]
    # Data-parallel groups beside tensor parallelism: ranks 0 and 2, and ranks 1 and 3.
    groups = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    found["strided"] = nodes_of(make_node_groups(groups[rank % 2]))
    os.environ["LOCAL_WORLD_SIZE"] = "3"
    found["uneven environment"] = nodes_of(make_node_groups(dist.group.WORLD))  # type: ignore[arg-type]
    os.environ["LOCAL_WORLD_SIZE"] = str(2 + rank % 2)
    found["disagreeing environment"] = nodes_of(make_node_groups(dist.group.WORLD))  # type: ignore[arg-type]
    del os.environ["LOCAL_WORLD_SIZE"]
    found["no environment"] = nodes_of(make_node_groups(dist.group.WORLD))  # type: ignore[arg-type]
    return found


def eight_ranks(rank: int) -> dict[str, Any]:
    halves = [dist.new_group(ranks) for ranks in ([0, 2, 4, 6], [1, 3, 5, 7])]
    groups = make_node_groups(halves[rank % 2], 2)
    assert groups.inside is not None
    assert groups.between is not None
    levels = GradientExchange(groups, INT8, INT4, DataParallelTraffic())
    result = levels.all_reduce(torch.full((128,), float(rank)), torch.empty(128))
    return {
        "2x4": all_checks(exchange_of(4)),
        "4x2": all_checks(exchange_of(2)),
        "two groups": (dist.get_process_group_ranks(groups.inside), dist.get_process_group_ranks(groups.between)),
        "two sums": result.mean().item(),
    }


def nodes_of(groups: Any) -> tuple[int, int, bool]:
    return groups.num_nodes, groups.node_size, groups.has_two_levels


def error_of(function: Callable[[], object]) -> str:
    try:
        function()
    except ValueError as error:
        return str(error)
    return ""


@cache
def found_by_four() -> list[dict[str, Any]]:
    return run_forked(4, four_ranks)


@cache
def found_by_eight() -> list[dict[str, Any]]:
    return run_forked(8, eight_ranks)


LEVELS = [
    (found_by_four, "2x2", 0.30),
    (found_by_four, "one node", 0.02),
    (found_by_four, "four nodes", 0.22),
    (found_by_four, "8 bits only", 0.02),
    (found_by_four, "4 bits only", 0.22),
    (found_by_eight, "2x4", 0.30),
    (found_by_eight, "4x2", 0.30),
]
by_levels = pytest.mark.parametrize(("found", "name", "bound"), LEVELS, ids=[name for _, name, _ in LEVELS])


@by_levels
def test_the_sum_is_within_the_error_of_its_codecs(found: Any, name: str, bound: float) -> None:
    for rank in found():
        for case, error in rank[name]["errors"].items():
            # One value is its block's largest, and exact; a few have an error of their own.
            few = case in ("fp32 1", "fp32 7")
            assert error <= (2 * bound if few else bound), f"{case}: {error}"


@by_levels
def test_constant_gradients_are_divided_exactly_once(found: Any, name: str, bound: float) -> None:
    for rank in found():
        for case, deviation in rank[name]["constants"].items():
            assert deviation <= (0 if case == "zeros" else 2e-3 if "16" in case else 1e-5), f"{case}: {deviation}"


@by_levels
def test_ranks_agree_bit_for_bit_and_a_seed_repeats_it(found: Any, name: str, bound: float) -> None:
    for rank in found():
        assert all(rank[name]["same bits"].values()), rank[name]["same bits"]


@by_levels
def test_nonfinite_values_stay_in_their_block(found: Any, name: str, bound: float) -> None:
    for rank in found():
        assert all(rank[name]["nonfinite"].values()), rank[name]["nonfinite"]


@pytest.mark.parametrize(
    ("found", "name", "inside", "between"),
    [
        (found_by_four, "2x2", 8.25, 4.25),
        (found_by_four, "one node", 8.25, 0.0),
        (found_by_four, "four nodes", 0.0, 4.25),
        (found_by_four, "8 bits only", 0.0, 8.25),
        (found_by_eight, "2x4", 8.25, 4.25),
        (found_by_eight, "4x2", 8.25, 4.25),
    ],
)
def test_bits_on_the_wire(found: Any, name: str, inside: float, between: float) -> None:
    for rank in found():
        counted_inside, counted_between, ratio = rank[name]["bits"]
        assert (counted_inside, counted_between) == (inside, between)
        assert 32 / 8.25 <= ratio + 1e-9 <= 32 / 4.25 + 1e-9


def test_stochastic_rounding_has_no_bias() -> None:
    """The mean of 64 sums is an eighth as far off as one of them; a bias would not average out."""
    for rank in found_by_four():
        assert 0.8 < rank["bias"] < 1.25


def test_slices_of_one_codec_change_nothing() -> None:
    assert all(rank["slices do not change what is summed"] for rank in found_by_four())


def test_nodes_from_the_environment() -> None:
    for rank in found_by_four():
        assert rank["levels"] == [False, True, False, False]
        assert rank["environment"] == (2, 2, True)
        assert rank["strided"] == (2, 1, False)
        assert rank["uneven environment"] == (4, 1, False)
        assert rank["disagreeing environment"] == (4, 1, False)
        assert rank["no environment"] == (1, 4, False)


def test_two_data_parallel_groups_have_their_own_nodes() -> None:
    found = found_by_eight()
    for rank, each in enumerate(found):
        first, other = rank % 2, rank // 4 * 4
        assert each["two groups"] == ([other + first, other + 2 + first], [rank % 4, rank % 4 + 4])
        assert each["two sums"] == pytest.approx(12 + 4 * first, rel=1e-3)


def test_a_node_size_that_does_not_divide_is_refused_on_every_rank() -> None:
    for rank in found_by_four():
        assert rank["refused"] == (
            "node_size=3 does not divide the 4 data-parallel ranks, so their nodes would hold different numbers of "
            "them; use one of 1, 2, 4 (1 or 4 for one level only)."
        )
    assert given_node_size(4, 8) == 4


def test_seeds_share_nothing() -> None:
    seeds = {derived_seed(0, a, b, c) for a in range(20) for b in range(20) for c in range(20)}
    assert len(seeds) == 8000
    assert all(0 <= seed < 1 << 62 for seed in seeds)
    assert len({seed & 0x7FFFFFFF for seed in seeds}) > 7990
    assert site_seed(1, "a") != site_seed(1, "b")


def test_slices_lie_on_block_boundaries() -> None:
    assert column_slices(torch.empty(4, 1000), 128, 3) == [(0, 384), (384, 768), (768, 1000)]
    assert column_slices(torch.empty(4, 1000), 128, None) == [(0, 1000)]
    assert column_slices(torch.empty(4, 0), 128, None) == []
    assert len(column_slices(torch.empty(4, 1 << 25, device="meta"), 128, None)) == 3


def test_stages_are_staggered() -> None:
    """The second slice is sent before the first one is waited for."""
    order: list[str] = []

    def piece(name: str) -> Any:
        for stage in range(3):
            order.append(f"{name}{stage}")
            if stage < 2:
                yield

    advance_staggered(piece(name) for name in "abc")
    assert order == ["a0", "b0", "a1", "c0", "b1", "a2", "c1", "b2", "c2"]
