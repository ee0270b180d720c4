"""What the observers behind `CompressionMonitor` measure, on exchanges of ranks that are threads."""

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_taco.config import CodecConfig, CompressionConfig
from lightning_taco.dtensor import CompressionSession, Exchange, Site
from lightning_taco.dtensor.errors import ErrorKey, ReconstructionErrors
from lightning_taco.dtensor.exchange_errors import ExchangeErrors
from lightning_taco.dtensor.histograms import HistogramSampler
from tests.ranks import run_threads

E4M3 = CodecConfig(element="e4m3")


def new_session() -> CompressionSession:
    session = CompressionSession(CompressionConfig(min_bytes=0), dist.group.WORLD)
    session.observers.append(ReconstructionErrors())  # a step that is sampled
    return session


def part_of_rank(rank: int) -> Tensor:
    return torch.randn(6, 4, 64, generator=torch.Generator().manual_seed(rank)) * (1 + rank)


EXCHANGES = {
    "all_reduce": Exchange("all_reduce", torch.empty(0)),
    "average": Exchange("all_reduce", torch.empty(0), op="avg"),
    "reduce_scatter": Exchange("reduce_scatter", torch.empty(0), dim=1),  # 4 over 3 ranks: 2, 2, 0
    "all_gather": Exchange("all_gather", torch.empty(0), dim=2),
    "all_to_all": Exchange("all_to_all", torch.empty(0), dim=1, scatter_dim=0),
}
SUMS = ("all_reduce", "average", "reduce_scatter")


def exact_results(name: str, parts: list[Tensor]) -> list[Tensor]:
    """What each of three ranks holds after the exchange."""
    total = sum(parts[1:], parts[0])
    if name == "all_gather":
        return [torch.cat(parts, 2)] * 3
    if name == "all_to_all":
        return [torch.cat([part.chunk(3)[rank] for part in parts], 1) for rank in range(3)]
    if name == "reduce_scatter":
        return [*total.chunk(3, 1), total[:, :0]][:3]
    return [total / 3 if name == "average" else total] * 3


def test_errors_and_cancellation_of_every_kind_of_exchange() -> None:
    codec = CodecConfig(element="int4", rounding="stochastic")

    def rank_main(rank: int) -> Any:
        session = new_session()
        observer = ExchangeErrors(session, num_sites=None)
        results = {}
        for name, empty in EXCHANGES.items():
            exchange, site = replace(empty, tensor=part_of_rank(rank)), Site(name, "forward", False)
            observer(exchange, site, codec)
            # What training gets, with its random numbers.
            results[name] = exchange.run(codec, session.group, session.seed(exchange.kind, site))
        return results, {key.site: error for key, error in observer.read().items()}

    ranks = run_threads(3, rank_main)
    parts = [part_of_rank(rank).double() for rank in range(3)]
    cancellation = sum(part.square().sum() for part in parts) / sum(parts[1:], parts[0]).square().sum()
    for name in EXCHANGES:
        exact = torch.cat([each.flatten() for each in exact_results(name, parts)])
        result = torch.cat([results[name].double().flatten() for results, _ in ranks])
        error = ranks[0][1][name]
        assert ranks[1][1][name] == ranks[2][1][name] == error
        assert error.relative_l2_error == pytest.approx(((result - exact).norm() / exact.norm()).item(), rel=1e-5)
        assert error.relative_l2_error > 0.05
        assert error.cancellation == (pytest.approx(cancellation.item(), rel=1e-6) if name in SUMS else None)
        assert error.saved_bytes > 0


def test_sites_take_turns_and_bad_or_cancelling_parts_show() -> None:
    def rank_main(rank: int) -> Any:
        session = new_session()
        observer = ExchangeErrors(session, num_sites=2)
        turns, errors = [], {}
        same, opposite = part_of_rank(5), part_of_rank(5) * (1 - 2 * rank)
        spoilt = torch.full_like(same, math.nan) if rank else same
        tensors = {"same": same, "opposite": opposite, "spoilt": spoilt, "zero": same * 0, "other": same}
        for _ in range(4):
            for name, tensor in tensors.items():
                observer(Exchange("all_reduce", tensor), Site(name, "backward", False), E4M3)
            found = {key.site: error for key, error in observer.read().items()}
            # 1536 fp32 values of each of two ranks; as many codes, and 12 scales.
            assert {error.saved_bytes for error in found.values()} == {2 * (6144 - 1536 - 48)}
            turns.append([name for name, error in found.items() if error.relative_l2_error is not None])
            errors |= {name: found[name] for name in turns[-1]}
            observer.clear()
        session.observers.clear()  # not a sampled step: nothing is exchanged
        observer(Exchange("all_reduce", same), Site("same", "backward", False), E4M3)
        assert observer.read() == {}
        return turns, {name: (each.relative_l2_error, each.cancellation) for name, each in errors.items()}

    (turns, errors), (other_turns, other_errors) = run_threads(2, rank_main)
    assert turns == other_turns == [["same", "opposite"], ["spoilt", "zero"], ["same", "other"], ["opposite", "spoilt"]]
    assert errors == other_errors
    assert errors["same"] == (pytest.approx(0.026, rel=0.2), pytest.approx(0.5, rel=1e-6))
    assert errors["opposite"] == (0.0, math.inf)  # E4M3 is symmetric, so the codes cancel too
    assert errors["spoilt"] == (math.inf, math.inf)
    assert errors["zero"] == (0.0, 0.0)


def test_the_rotation_spreads_an_outlier_in_the_histogram() -> None:
    """A block of one value 64: 11.3 root mean squares before, 128 values of 1 after. Rank 1 has a second block."""

    def rank_main(rank: int) -> Any:
        values = torch.zeros(2, 128)
        values[0, 7] = 64.0
        values[1, 3] = math.nan
        session = new_session()
        observer = HistogramSampler(session)
        for name, codec in {"rotated": E4M3, "plain": replace(E4M3, rotation=False)}.items():
            observer(Exchange("all_reduce", values[: 1 + rank]), Site(name, "forward", False), codec)
        observer(Exchange("all_reduce", values[0, :100]), Site("short", "forward", False), E4M3)
        keys = [ErrorKey(name, "forward", "all_reduce") for name in ("short", "plain", "rotated")]
        found = observer.read(keys)
        assert list(found) == keys[1:]
        assert found[keys[1]].after is None
        observer.clear()
        observer.keep(keys[:2])
        observer(Exchange("all_reduce", values), Site("rotated", "forward", False), E4M3)
        assert observer.read(keys) == {}
        return found[keys[2]]

    pair, other = run_threads(2, rank_main)
    assert pair == other
    assert pair.after is not None
    assert (pair.before.num_values, pair.after.num_values) == (128 + 255, 128 + 128)  # a NaN spoils its block
    assert pair.before.magnitude_quantile(0.99) == 0
    # With the zeros of the second block the outlier is 16 root mean squares, and 1.41 when it is spread.
    assert 16 <= pair.before.magnitude_quantile(1.0) <= 16 * 1.05
    assert 1 <= pair.after.magnitude_quantile(0.5) <= 1.05
    assert 2**0.5 <= pair.after.magnitude_quantile(0.51) <= 2**0.5 * 1.05
    for histogram in (pair.before, pair.after):
        assert all(low < high for low, high in pairwise(histogram.edges))
        assert len(histogram.counts) == len(histogram.edges) - 1


def test_quantiles_of_gaussian_values_of_any_size() -> None:
    def rank_main(rank: int) -> Any:
        values = torch.randn(600, 128, generator=torch.Generator().manual_seed(1))  # more blocks than are looked at
        observer = HistogramSampler(new_session())
        scales = {"one": 1.0, "tiny": 1e-30, "huge": 1e37}
        for name, scale in scales.items():
            observer(Exchange("all_reduce", values * scale), Site(name, "forward", False), E4M3)
        found = observer.read([ErrorKey(name, "forward", "all_reduce") for name in scales])
        histograms = [each for pair in found.values() for each in (pair.before, pair.after) if each is not None]
        quantiles = [[each.magnitude_quantile(share) for share in (0.5, 0.9, 0.99)] for each in histograms]
        return quantiles, [each.num_values for each in histograms]

    ((quantiles, counts),) = run_threads(1, rank_main)
    assert counts == [300 * 128] * 6
    for found in quantiles:
        for quantile, expected in zip(found, (0.6745, 1.6449, 2.5758), strict=True):
            assert expected * 0.98 <= quantile <= expected * 1.07
