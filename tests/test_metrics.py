"""`lightning_taco.metrics` against figures computed by hand, alone and summed up between ranks."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from lightning_taco.codec import MessageLayout, decode, encode
from lightning_taco.config import CodecConfig
from lightning_taco.metrics import (
    BitsPerValue,
    Cancellation,
    RelativeL2Error,
    SignalToQuantizationNoise,
    ZeroedShare,
)
from tests.ranks import run_forked

MAKERS: list[Callable[[], Metric]] = [
    RelativeL2Error,
    SignalToQuantizationNoise,
    ZeroedShare,
    BitsPerValue,
    lambda: Cancellation(num_parts=2),
]
EXACT = torch.tensor([[3.0, -4.0, 0.0], [0.1, 12.0, 0.0]])
DECODED = torch.tensor([[3.0, -4.5, 0.25], [0.0, 11.0, 0.0]])


def value(metric: Metric, *updates: tuple[Tensor, Tensor]) -> float:
    for update in updates:
        metric.update(*update)
    result = metric.compute()
    assert (result.dtype, result.shape) == (torch.float64, ())
    return result.item()


def test_figures_by_hand() -> None:
    rows = list(zip(DECODED, EXACT, strict=True))
    squared_error = 0.5**2 + 0.25**2 + 0.1**2 + 1.0**2
    squared_norm = 9 + 16 + 0.1**2 + 144
    for updates in ([(DECODED, EXACT)], rows):  # at once, or one after the other: not a mean of two errors
        expected = math.sqrt(squared_error / squared_norm)
        assert value(RelativeL2Error(), *updates) == pytest.approx(expected, rel=1e-6)
        expected_db = 10 * math.log10(squared_norm / squared_error)
        assert value(SignalToQuantizationNoise(), *updates) == pytest.approx(expected_db, rel=1e-6)
        assert value(ZeroedShare(), *updates) == 1 / 4
    assert value(BitsPerValue(), (torch.zeros(3, dtype=torch.uint8), EXACT), (torch.zeros(2), EXACT)) == 8 * 11 / 12
    # 25 + 4 over 1: parts that cancel; then 2 equal parts beside them.
    assert value(Cancellation(2), *[(torch.tensor([x]), torch.tensor([3.0])) for x in (5.0, -2.0)]) == 29 / 9
    assert value(Cancellation(4), *[(torch.ones(7), torch.full((7,), 4.0))] * 4) == 1 / 4


def test_zero_over_zero_is_zero_and_anything_else_over_zero_is_infinite() -> None:
    zeros, ones = torch.zeros(4), torch.ones(4)
    assert value(RelativeL2Error(), (zeros, zeros)) == 0
    assert value(SignalToQuantizationNoise(), (zeros, zeros)) == math.inf
    assert value(ZeroedShare(), (zeros, zeros)) == 0
    assert value(BitsPerValue(), (torch.zeros(0), zeros[:0])) == 0
    assert value(Cancellation(2), (zeros, zeros)) == 0
    assert value(RelativeL2Error(), (ones, zeros)) == math.inf
    assert value(SignalToQuantizationNoise(), (ones, zeros)) == -math.inf
    assert value(ZeroedShare(), (ones, zeros)) == 0
    assert value(Cancellation(2), (ones, zeros), (-ones, zeros)) == math.inf


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 1])
def test_one_bad_value_is_never_lost_in_a_sum(bad: float, place: int) -> None:
    for make in (RelativeL2Error, SignalToQuantizationNoise, ZeroedShare, lambda: Cancellation(2)):
        pair = [torch.ones(5), torch.ones(5)]
        pair[place][3] = bad
        metric: Metric = make()
        infinite = -math.inf if isinstance(metric, SignalToQuantizationNoise) else math.inf
        good = torch.ones(5), torch.ones(5)
        assert value(metric, good, (pair[0], pair[1]), good) == infinite
        both = torch.full((5,), bad)
        metric.reset()
        assert value(metric, (both, both)) == infinite, "a difference of infinities"


@pytest.mark.parametrize("size", [1e-30, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_neither_small_nor_large_values_are_lost(size: float, dtype: torch.dtype) -> None:
    exact = torch.tensor([4 * size, -3 * size], dtype=dtype)
    decoded = torch.tensor([4 * size, -2 * size], dtype=dtype)
    difference = decoded.double() - exact.double()
    expected = (difference.norm() / exact.double().norm()).item()
    assert value(RelativeL2Error(), (decoded, exact)) == pytest.approx(expected, rel=1e-12)
    assert value(Cancellation(1), (exact, exact)) == pytest.approx(1.0, rel=1e-12)


def test_of_the_codec_itself() -> None:
    codec = CodecConfig(element="int4", block_size=32)
    exact = torch.randn(1, 1000)
    message = encode(exact, codec)
    decoded = decode(message, codec, 1000, torch.float32)
    assert value(BitsPerValue(), (message, exact)) == 8 * MessageLayout.of(1000, codec).message_bytes / 1000
    error = ((decoded - exact).norm() / exact.norm()).item()
    assert 0.05 < error < 0.15
    assert value(RelativeL2Error(), (decoded, exact)) == pytest.approx(error, rel=1e-5)


@pytest.mark.parametrize("make", MAKERS)
def test_forward_reset_and_merge(make: Callable[[], Metric]) -> None:
    generator = torch.Generator().manual_seed(3)
    batches = [(torch.randn(9, generator=generator), torch.randn(9, generator=generator)) for _ in range(3)]
    batches[1][0][2] = 0.0
    together = value(make(), *batches)
    metric = make()
    assert [metric(*batch).item() for batch in batches] == [value(make(), batch) for batch in batches]
    assert metric.compute().item() == pytest.approx(together, rel=1e-12)
    first, second = make(), make()
    first.update(*batches[0])
    for batch in batches[1:]:
        second.update(*batch)
    first.merge_state(second)
    assert first.compute().item() == pytest.approx(together, rel=1e-12)
    first.reset()
    assert value(first, batches[2]) == value(make(), batches[2])
    # A model that is cast to half precision keeps the sums.
    assert torch.nn.ModuleList([metric]).half()[0].compute().item() == pytest.approx(together, rel=1e-12)


def test_ranks_add_up_to_the_figure_of_all_values() -> None:
    """With different numbers of values, and more updates, on one rank than on the other."""
    generator = torch.Generator().manual_seed(5)
    exact = [torch.randn(50, generator=generator), torch.randn(8, generator=generator)]
    decoded = [tensor.mul(2).round() / 2 for tensor in exact]
    messages = [torch.zeros(60, dtype=torch.uint8), torch.zeros(11, dtype=torch.uint8)]
    parts = [torch.tensor([4.0, 1.0]), torch.tensor([-3.0, 1.0])]

    def rank_main(rank: int) -> Any:
        pair = {"decoded": decoded[rank], "exact": exact[rank]}
        metrics = MetricCollection([RelativeL2Error(), SignalToQuantizationNoise(), ZeroedShare()])
        if rank == 0:
            metrics.update(pair["decoded"][:20], pair["exact"][:20])
            pair = {name: tensor[20:] for name, tensor in pair.items()}
        metrics.update(**pair)
        bits, cancellation = BitsPerValue(), Cancellation(num_parts=2)
        bits.update(messages[rank], exact[rank])
        cancellation.update(parts[rank], total=sum(parts))
        found = [*metrics.compute().values(), bits.compute(), cancellation.compute()]
        bad = RelativeL2Error()
        bad.update(torch.tensor([math.nan if rank else 1.0]), torch.ones(1))
        return [each.item() for each in (*found, bad.compute())]

    whole, approximate = torch.cat(exact), torch.cat(decoded)
    error = ((approximate - whole).double().norm() / whole.double().norm()).item()
    zeroed = ((approximate == 0).sum() / whole.numel()).item()
    expected = [error, -20 * math.log10(error), zeroed, 8 * 71 / 58, 27 / 5, math.inf]
    assert 0 < zeroed < 1
    results = run_forked(2, rank_main)
    assert results[0] == results[1] == pytest.approx(expected, rel=1e-6)


def test_what_does_not_fit_is_refused() -> None:
    for metric in (RelativeL2Error(), SignalToQuantizationNoise(), ZeroedShare()):
        with pytest.raises(
            ValueError, match=r"decoded has shape \(3,\) and exact \(4,\); both must have the same shape"
        ):
            metric.update(torch.zeros(3), torch.zeros(4))
    with pytest.raises(ValueError, match=r"part has shape \(3,\) and total \(1, 3\); a part and the sum"):
        Cancellation(2).update(torch.zeros(3), torch.zeros(1, 3))
    for bad in (0, -1, 2.0, True, None):
        with pytest.raises(ValueError, match=r"num_parts=.* is not a number of parts; use the number of ranks"):
            Cancellation(bad)  # type: ignore[arg-type]
