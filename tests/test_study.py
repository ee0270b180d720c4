"""`lightning_taco.study`: figures against numbers worked out by hand, baselines against slow loops, and what it sees of
real exchanges and real trainings."""

import json
import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_taco import CodecConfig, CompressionConfig, TacoTPStrategy
from lightning_taco.codec import MessageLayout
from lightning_taco.collectives import all_gather, all_reduce, all_to_all, reduce_scatter
from lightning_taco.dtensor import Exchange, Site
from lightning_taco.dtensor.errors import ErrorKey
from lightning_taco.study import StudyCallback, StudySettings, StudyTrainer, baselines, figures, frontier, tables
from lightning_taco.study.callback import check_studiable
from lightning_taco.study.candidates import (
    BaselineCandidate,
    Candidate,
    CodecCandidate,
    built_in_codecs,
    candidates_of,
    exact_exchange,
)
from lightning_taco.study.figures import CodecSums, Figures, Message, MessageSums
from lightning_taco.study.recorder import MessageRecorder, SiteSums
from lightning_taco.study.results import StudyResult, pareto_front, study_result
from lightning_taco.study.timing import encode_decode_us
from tests.lightning_models import (
    TinyModule,
    captured_messages,
    tiny_dataloader,
    warm_lightning,  # noqa: F401  a fixture
)
from tests.ranks import run_forked, run_threads

INT8 = CodecConfig(element="int8")
INT4 = CodecConfig(element="int4")
E4M3 = CodecConfig(element="e4m3")

# Figures


def sums_of(
    values: list[float], decoded: list[float], *, num_bits: float = 0, scale: float = 1.0
) -> tuple[MessageSums, CodecSums]:
    """Of one message whose exchange gives [3, 4] exactly and [3, 3] with the codec; all times `scale`."""
    message = Message.of(torch.tensor(values) * scale)
    exact, result = torch.tensor([3.0, 4.0]) * scale, torch.tensor([3.0, 3.0]) * scale
    own = figures.message_sums(message, exact, 10 * scale**2)
    codec = figures.codec_sums(message, torch.tensor(decoded) * scale, num_bits, result, exact)
    return MessageSums(*own.tolist()), CodecSums(*codec.tolist())


@pytest.mark.parametrize("scale", [1.0, 2.0**80, 2.0**-80, -1.0])
def test_figures_of_a_message_worked_out_by_hand(scale: float) -> None:
    """x = [4, -3, 0, 1], x' - x = [1, -1, 0, -1]; the small half is {0, 1}."""
    messages, codec = sums_of([4, -3, 0, 1], [5, -4, 0, 0], num_bits=12, scale=scale)
    found = figures.figures_of(messages, codec)
    rms = math.sqrt(26) / 2
    expected = Figures(
        bits_per_value=3.0,
        relative_l2_error=math.sqrt(3 / 26),
        small_half_error=1.0,
        zeroed_share=1 / 3,
        bias=math.copysign(-1 / 4 / rms, -scale),
        slope_bias=(4 + 3 - 1) / 26,
        exchange_error=1 / 5,
    )
    assert asdict(found) == pytest.approx(asdict(expected), rel=1e-6)
    assert figures.cancellation(messages) == pytest.approx(2.6)


def test_messages_weigh_by_their_energy() -> None:
    parts = [sums_of([3, 4], [3, 4]), sums_of([30, 40], [30, 35])]
    messages = MessageSums(*map(sum, zip(*(part[0] for part in parts), strict=True)))
    codec = CodecSums(*map(sum, zip(*(part[1] for part in parts), strict=True)))
    found = figures.figures_of(messages, codec)
    assert found.relative_l2_error == pytest.approx(math.sqrt(25 / 2525))
    assert found.bias == pytest.approx(-5 / math.sqrt(1250) / 4)
    assert messages.num_finite == 2


def test_half_of_the_values_is_small_and_ties_are_in() -> None:
    assert Message.of(torch.tensor([5.0, -1.0, 2.0, -4.0, 3.0])).is_small.tolist() == [False, True, True, False, False]
    assert Message.of(torch.tensor([1.0, -1.0, 1.0, 2.0])).is_small.tolist() == [True, True, True, False]
    assert Message.of(torch.tensor([7.0])).is_small.tolist() == [True]


def test_message_of_zeros_has_no_error_and_what_comes_of_it_an_infinite_one() -> None:
    messages, codec = sums_of([0, 0], [0, 0])
    found = figures.figures_of(messages, codec)
    assert (found.relative_l2_error, found.zeroed_share, found.bias, found.slope_bias) == (0, 0, 0, 0)
    messages, codec = sums_of([0, 0], [0, 1])
    assert figures.figures_of(messages, codec).relative_l2_error == math.inf


def test_overall_gives_both_directions_the_same_weight() -> None:
    forward = Figures(8, 0.3, 0.1, 0.2, 0.01, -0.1, 0.5)
    backward = Figures(4, 0.4, 0.7, 0.0, -0.03, 0.3, 0.5)
    expected = Figures(6, math.sqrt(0.125), 0.5, 0.1, -0.01, 0.1, 0.5)
    assert asdict(figures.overall([forward, backward])) == pytest.approx(asdict(expected))
    assert figures.overall([forward]) == forward


def test_cancellation_of_exchanges_that_add_nothing_is_none() -> None:
    sums = MessageSums(4, 10.0, 1.0, 4, 10.0, 0.0, 1, 0)
    assert figures.cancellation(sums) is None


def test_decibels() -> None:
    assert figures.decibels(0.1) == pytest.approx(-20)
    assert figures.decibels(0.0) == -math.inf
    assert figures.decibels(math.inf) == math.inf


def test_pareto_front_leaves_out_what_is_beaten_or_no_number() -> None:
    points = {"a": (8, 1.0), "b": (4, 9.0), "c": (8, 2.0), "d": (6, 9.0), "e": (3, math.nan), "f": (3, math.inf)}
    assert pareto_front(points) == ("b", "a")
    assert pareto_front({}) == ()


# Baselines


def hadamard(size: int) -> Tensor:
    """The orthonormal Sylvester matrix, from its definition: the sign is the parity of the common bits."""
    rows = [[(-1.0) ** bin(row & column).count("1") for column in range(size)] for row in range(size)]
    return torch.tensor(rows) / math.sqrt(size)


def e4m3(values: Tensor) -> Tensor:
    return values.to(torch.float8_e4m3fn).float()


def test_int8_per_tensor_rounds_to_one_grid() -> None:
    values = torch.tensor([[127.0, -63.4], [0.4, 0.6]])
    found = baselines.int8_per_tensor(values)
    assert found.values.tolist() == [[127.0, -63.0], [0.0, 1.0]]
    assert found.num_bits == 4 * 8 + 32


def test_fp8_per_tensor_and_per_row_scale_to_448() -> None:
    values = torch.tensor([[448.0, 17.0], [0.00448, 0.00017]])
    per_tensor, per_row = baselines.fp8_per_tensor(values), baselines.fp8_per_row(values)
    assert per_tensor.values.tolist() == e4m3(values).tolist()
    assert per_tensor.num_bits == 4 * 8 + 32
    assert per_row.values[0].tolist() == [448.0, 16.0]
    assert per_row.values[1].tolist() == pytest.approx([0.00448, 0.00016])
    assert per_row.num_bits == 4 * 8 + 2 * 32


def test_fp8_unscaled_loses_what_is_small_and_cuts_what_is_large() -> None:
    found = baselines.fp8_unscaled(torch.tensor([500.0, -1e9, 9e-4, 0.002, 1.0]))
    assert found.values.tolist() == [448.0, -448.0, 0.0, 0.001953125, 1.0]
    assert found.num_bits == 40


def test_rotation_alone_has_one_scale_for_all_blocks() -> None:
    values = torch.randn(3, 100) * torch.tensor([[1.0], [100.0], [1e-4]])  # 300 values: two blocks and a tail of 44
    blocks = torch.nn.functional.pad(values.flatten(), (0, 84)).view(3, 128)
    rotated = blocks @ hadamard(128)
    scale = rotated.abs().max() / 448
    expected = ((e4m3(rotated / scale) * scale) @ hadamard(128)).flatten()[:300].view(3, 100)
    found = baselines.rotation_fp8_per_tensor(values)
    # A code may fall to the neighbour where the two transforms round differently: bound, and nearly all the same.
    assert (found.values - expected).abs().max() <= values.abs().max() / 16
    assert (found.values - expected).norm() <= 1e-3 * values.norm()
    assert found.num_bits == 384 * 8 + 32


def test_tah_quant_counts_the_bits_of_its_message() -> None:
    values = torch.randn(2, 320, 128)
    found = baselines.tah_quant(values)
    assert found.num_bits / values.numel() == pytest.approx(4.43, abs=0.01)
    assert found.values.shape == values.shape


def test_tah_quant_loses_gradients_that_fp16_cannot_hold() -> None:
    values = torch.randn(1, 10, 64) * 1e-9
    assert baselines.tah_quant(values).values.abs().max() == 0


@pytest.mark.parametrize("baseline", baselines.BASELINES.values(), ids=baselines.BASELINES.keys())
def test_baselines_keep_shape_and_zeros_and_change_nothing(baseline: Callable[[Tensor], Any]) -> None:
    zeros = baseline(torch.zeros(2, 5, 33))
    assert zeros.values.shape == (2, 5, 33)
    assert zeros.values.eq(0).all()
    values = torch.randn(2, 5, 96)
    copy = values.clone()
    found = baseline(values)
    assert values.equal(copy)
    assert 0 < (found.values - values).norm() / values.norm() < 0.2


# Candidates


def test_every_built_in_codec_is_compared_once() -> None:
    codecs = built_in_codecs()
    assert len(set(codecs)) == len(codecs)
    for element in ("e4m3", "e5m2", "int8", "int6", "int5", "int4", "int3"):
        for rotation in (True, False):
            assert CodecConfig(element=element, rotation=rotation) in codecs  # type: ignore[arg-type]
    named = candidates_of(StudySettings(), "e4m3")
    assert len({each.name for each in named}) == len(named) == len(codecs) + 6
    assert {each.family for each in named} == set(frontier.STYLES)
    values = torch.randn(2, 8, 96)
    for candidate in named:  # bits are what is sent, and every one of them works
        found = candidate.quantize(values, seed=1)
        assert found.values.shape == values.shape
        if isinstance(candidate, CodecCandidate):
            assert found.num_bits == 8 * MessageLayout.of(values.numel(), candidate.codec).message_bytes
            assert found.num_bits / values.numel() == pytest.approx(candidate.codec.bits_per_value, rel=0.2)


def test_own_candidates_replace_the_list() -> None:
    settings = StudySettings(candidates=[CodecConfig(element="auto"), E4M3, INT4], baselines=False)
    assert [each.name for each in candidates_of(settings, "e4m3")] == [str(E4M3), str(INT4)]
    assert [each.name for each in candidates_of(settings, "int8")] == [str(INT8), str(E4M3), str(INT4)]


def test_time_is_that_of_encode_and_decode() -> None:
    values = torch.randn(1, 4096, dtype=torch.bfloat16)
    assert 1 < encode_decode_us(INT8, values) < 1e5


@pytest.mark.gpu
def test_time_on_a_gpu_is_that_of_the_device() -> None:
    """It grows with the message, as that of the host, which launches the same kernels, does not."""
    small, large = (torch.randn(1, size << 20, device="cuda").bfloat16() for size in (1, 256))
    assert encode_decode_us(INT8, large) > 10 * encode_decode_us(INT8, small) > 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_steps": 0}, "num_steps=0 is not a number from 1 up; use num_steps=2"),
        ({"max_messages": True}, "max_messages=True is not a number"),
        ({"candidates": [], "baselines": False}, "leave nothing to compare; name one codec at least"),
        ({"candidates": [INT8, INT8]}, "names 'int8, block 128, Hadamard' twice; leave one out"),
        ({"candidates": ["int8"]}, "holds 'int8', which is no codec; use CodecConfig"),
        ({"candidates": [CodecConfig(reshape="calibrated")]}, "reshape='calibrated'.* use reshape='natural'"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StudySettings(**settings)


# Recorder, on exchanges over ranks

NUM_RANKS = 3
SHAPE = (4, 6, 40)
PER_TENSOR = BaselineCandidate("INT8 per tensor", baselines.int8_per_tensor)
KINDS = [
    Exchange(kind="all_reduce", tensor=torch.empty(0)),
    Exchange(kind="all_reduce", tensor=torch.empty(0), op="avg"),
    Exchange(kind="reduce_scatter", tensor=torch.empty(0), dim=0),  # 4 over 3 ranks: 2, 2 and 0
    Exchange(kind="reduce_scatter", tensor=torch.empty(0), dim=1, op="avg"),
    Exchange(kind="all_gather", tensor=torch.empty(0), dim=2),
    Exchange(kind="all_to_all", tensor=torch.empty(0), dim=0, scatter_dim=1),
]


def part_of(rank: int, message: int = 0) -> Tensor:
    """What `rank` sends: large common values that cancel, so that the sum is smaller than its parts."""
    generator = torch.Generator().manual_seed(100 * message + rank)
    common = torch.randn(SHAPE, generator=torch.Generator().manual_seed(message))
    return torch.randn(SHAPE, generator=generator) + common * (2.0, -3.0, 1.0)[rank]


def expected_exact(exchange: Exchange, rank: int) -> Tensor:
    parts = [part_of(each) for each in range(NUM_RANKS)]
    if exchange.kind == "all_gather":
        return torch.cat(parts, exchange.dim)
    if exchange.kind == "all_to_all":
        return torch.cat([each.chunk(NUM_RANKS, exchange.scatter_dim)[rank] for each in parts], exchange.dim)
    total = sum(parts[1:], parts[0]) / (NUM_RANKS if exchange.op == "avg" else 1)
    if exchange.kind == "all_reduce":
        return total
    shards = total.chunk(NUM_RANKS, exchange.dim)
    return shards[rank] if rank < len(shards) else total.narrow(exchange.dim, 0, 0)


def run_collective(exchange: Exchange, tensor: Tensor) -> Tensor:
    """INT8 through the public collective."""
    group = dist.group.WORLD
    assert group is not None
    if exchange.kind == "all_reduce":
        return all_reduce(tensor, INT8, group, op=exchange.op)  # type: ignore[arg-type]
    if exchange.kind == "reduce_scatter":
        return reduce_scatter(tensor, INT8, group, dim=exchange.dim, op=exchange.op)  # type: ignore[arg-type]
    if exchange.kind == "all_gather":
        return all_gather(tensor, INT8, group, dim=exchange.dim)
    return all_to_all(tensor, INT8, group, gather_dim=exchange.dim, scatter_dim=exchange.scatter_dim)


def with_tensor(exchange: Exchange, tensor: Tensor) -> Exchange:
    return Exchange(
        kind=exchange.kind, tensor=tensor, op=exchange.op, dim=exchange.dim, scatter_dim=exchange.scatter_dim
    )


def squares(tensor: Tensor) -> float:
    return tensor.double().square().sum().item()


def recorder_of(candidates: list[Candidate], max_messages: int = 4) -> MessageRecorder:
    group = dist.group.WORLD
    assert group is not None
    return MessageRecorder(candidates, group, max_messages)


def test_recorder_measures_the_whole_exchange_of_every_kind() -> None:
    def rank_of(rank: int) -> Any:
        found = []
        for index, kind in enumerate(KINDS):
            recorder = recorder_of([CodecCandidate(INT8), PER_TENSOR])
            exchange = with_tensor(kind, part_of(rank))
            recorder(exchange, Site(f"site{index}", "forward", False), E4M3)
            assert exchange.tensor.equal(part_of(rank))
            exact = expected_exact(kind, rank)
            torch.testing.assert_close(exact_exchange(exchange, dist.group.WORLD), exact)  # type: ignore[arg-type]
            ours = squares(run_collective(exchange, exchange.tensor) - exact), squares(exact)
            found.append((recorder.read(), ours))
        return found

    ranks = run_threads(NUM_RANKS, rank_of)
    parts = [part_of(rank) for rank in range(NUM_RANKS)]
    parts_energy, sum_energy = sum(map(squares, parts)), squares(sum(parts[1:], parts[0]))
    for index, kind in enumerate(KINDS):
        readings = [rank[index][0] for rank in ranks]
        assert readings[0] == readings[1] == readings[2]
        (site,) = readings[0]
        assert site.key == ErrorKey(f"site{index}", "forward", kind.kind)
        assert (site.shape, site.dtype, site.num_seen) == (SHAPE, torch.float32, 1)
        assert (site.messages.num_finite, site.messages.num_nonfinite) == (1, 0)
        assert site.messages.energy == pytest.approx(parts_energy, rel=1e-6)
        reduces = kind.kind in ("all_reduce", "reduce_scatter")
        cancelled = figures.cancellation(site.messages)
        assert cancelled == (pytest.approx(parts_energy / sum_energy, rel=1e-4) if reduces else None)
        error, energy = (sum(rank[index][1][place] for rank in ranks) for place in (0, 1))
        int8, per_tensor = (figures.figures_of(site.messages, codec) for codec in site.codecs)
        assert int8.exchange_error == pytest.approx(math.sqrt(error / energy), rel=1e-4)
        assert per_tensor.exchange_error == pytest.approx(slow_per_tensor_error(kind), rel=1e-3)
        assert int8.relative_l2_error < per_tensor.relative_l2_error


def slow_per_tensor_error(kind: Exchange) -> float:
    """Of the exchange of what INT8 with one scale per tensor makes of each part; an all-reduce rounds the sum again."""
    error = energy = 0.0
    rounded = [baselines.int8_per_tensor(part_of(rank)).values for rank in range(NUM_RANKS)]
    total = sum(rounded[1:], rounded[0]) / (NUM_RANKS if kind.op == "avg" else 1)
    for rank in range(NUM_RANKS):
        exact = expected_exact(kind, rank)
        if kind.kind == "all_reduce":
            result = baselines.int8_per_tensor(total).values
        elif kind.kind == "reduce_scatter":
            shards = total.chunk(NUM_RANKS, kind.dim)
            result = shards[rank] if rank < len(shards) else total.narrow(kind.dim, 0, 0)
        elif kind.kind == "all_gather":
            result = torch.cat(rounded, kind.dim)
        else:
            result = torch.cat([each.chunk(NUM_RANKS, kind.scatter_dim)[rank] for each in rounded], kind.dim)
        error, energy = error + squares(result - exact), energy + squares(exact)
    return math.sqrt(error / energy)


def test_recorder_leaves_out_what_is_not_finite_and_stops_at_its_cap() -> None:
    """A NaN on one rank; sums that overflow; and messages beyond the cap are only counted."""

    def rank_of(rank: int) -> list[SiteSums]:
        recorder = recorder_of([CodecCandidate(INT4), PER_TENSOR], max_messages=4)
        healthy = recorder_of([CodecCandidate(INT4), PER_TENSOR])
        spoilt = part_of(rank)
        if rank == 1:
            spoilt[0, 0, 0] = math.nan
        huge = torch.full(SHAPE, 3e38)
        for tensor in (part_of(rank), spoilt, huge, part_of(rank, 1), part_of(rank, 2)):
            recorder(Exchange(kind="all_reduce", tensor=tensor), Site("", "backward", False), E4M3)
        for tensor in (part_of(rank), part_of(rank, 1)):
            healthy(Exchange(kind="all_reduce", tensor=tensor), Site("", "backward", False), E4M3)
        assert recorder.num_messages == 4
        return [*recorder.read(), *healthy.read()]

    for found, healthy in run_threads(NUM_RANKS, rank_of):
        assert (found.num_seen, healthy.num_seen) == (5, 2)
        assert found.messages == healthy.messages._replace(num_nonfinite=2)
        assert found.codecs == healthy.codecs  # nearest rounding: the seed, which counts messages, has no effect


def test_recorder_of_the_models_dtype_and_an_empty_message() -> None:
    def rank_of(rank: int) -> tuple[float, float]:
        recorder = recorder_of([CodecCandidate(INT8)])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            recorder(Exchange(kind="all_reduce", tensor=part_of(rank).bfloat16()), Site("a", "forward", False), E4M3)
            recorder(Exchange(kind="all_reduce", tensor=torch.empty(0, 3)), Site("b", "forward", False), E4M3)
        (site,) = recorder.read()
        assert site.dtype == torch.bfloat16
        found = figures.figures_of(site.messages, site.codecs[0])
        return found.relative_l2_error, found.exchange_error

    # Rounding to bfloat16 would add 0.2%: neither figure is of the model's dtype.
    for error, exchange_error in run_threads(2, rank_of):
        assert error == pytest.approx(0.0064, rel=0.1)
        assert exchange_error < 0.03


# Results, tables and the plot


def result_of(codec_sums: dict[str, list[CodecSums]] | None = None) -> StudyResult:
    """Two forward sites, one of which holds 99% of the energy, a backward site, and one of NaN only."""
    names: list[Candidate] = [CodecCandidate(INT8), CodecCandidate(INT4), PER_TENSOR]
    small = MessageSums(100, 1.0, 0.1, 90, 2.0, 0.5, 2, 0)
    large = MessageSums(100, 99.0, 9.9, 90, 198.0, 0.0, 2, 1)
    lost = MessageSums(0, 0, 0, 0, 0, 0, 0, 2)

    def codecs(energy: float) -> tuple[CodecSums, ...]:
        errors = (1e-4, 1e-2, 4e-4)
        return tuple(
            CodecSums(100 * bits, energy * error, 0.1 * energy * error, 9, -1.0, -0.01 * energy, 2 * energy * error)
            for bits, error in zip((8.25, 4.25, 8.0), errors, strict=True)
        )

    empty = tuple(CodecSums(0, 0, 0, 0, 0, 0, 0) for _ in names)
    sites = [
        SiteSums(ErrorKey("<a>", "forward", "all_reduce"), (2, 50), torch.float32, 2, small, codecs(1.0)),
        SiteSums(ErrorKey("b", "forward", "all_gather"), (2, 50), torch.float32, 3, large, codecs(99.0)),
        SiteSums(ErrorKey("a", "backward", "all_reduce"), (2, 50), torch.float32, 2, small, codecs(4.0)),
        SiteSums(ErrorKey("", "backward", "all_reduce"), (2, 50), torch.float32, 2, lost, empty),
    ]
    about = {
        "command": "lightning-taco study",
        "created": "2026-01-01",
        "versions": {"torch": "2.13"},
        "device": "cpu (x86_64)",
        "num_ranks": 2,
        "tensor_parallel_size": 2,
        "precision": "32-true",
        "model": "TinyModule",
        "first_step": 3,
        "last_step": 4,
        "trained_with": {"forward": "int8", "backward": "as it is"},
        "timed": "one message of 100 float32 values",
        "settings": asdict(StudySettings()),
    }
    return study_result(sites, names, {str(INT8): 7.0, str(INT4): 5.0}, about, {"smaller than min_bytes=9": 3})


def test_directions_add_sites_up_by_energy_and_name_the_worst() -> None:
    result = result_of()
    forward, backward, both = (result.directions[name] for name in ("forward", "backward", "overall"))
    assert (forward.num_sites, forward.num_observed, backward.num_sites, both.num_sites) == (2, 4, 1, 3)
    assert forward.figures[str(INT4)].relative_l2_error == pytest.approx(0.1)
    assert backward.figures[str(INT4)].relative_l2_error == pytest.approx(0.2)  # codecs(4.0) of an energy of 1
    assert both.figures[str(INT4)].relative_l2_error == pytest.approx(math.sqrt(0.025))
    assert both.worst[str(INT4)].direction == "backward"
    assert both.median[str(INT4)] == pytest.approx(0.1)
    assert forward.pareto == (str(INT4), str(INT8))  # a baseline in between counts for nothing
    assert [site.cancellation for site in result.sites] == [2.0, None, 2.0, None]
    assert [site.energy_share for site in result.sites] == pytest.approx([0.01, 0.99, 1, 0])
    assert result.num_nonfinite == 3


def test_json_has_every_figure_and_no_number_that_json_lacks() -> None:
    text = json.dumps(result_of().as_json(), allow_nan=False)
    found = json.loads(text)
    int8 = found["directions"]["forward"]["codecs"][str(INT8)]
    assert int8["bits_per_value"] == 8.25
    assert int8["relative_l2_error_db"] == pytest.approx(-40)
    assert int8["is_pareto"] is True
    assert found["candidates"][0]["config"]["element"] == "int8"
    assert [each["encode_decode_us"] for each in found["candidates"]] == [7.0, 5.0, None]
    assert found["sites"][3]["codecs"] == {}
    assert found["not_observed"] == {"smaller than min_bytes=9": 3}


def test_markdown_shows_tables_settings_and_what_was_left_out() -> None:
    text = tables.markdown(result_of())
    figures_of_int4 = "4.25 | 10% | -20.0 | 10% | 10% | 10% | 10% | -1.0e-02 | -1.0e-02 | 10% | 5 us"
    row = f"| **int4, block 128, Hadamard** | {figures_of_int4} |"
    assert row in text.partition("## Forward: 4 messages of 2 sites")[2]
    for line in (
        "`lightning-taco study`",
        "torch 2.13",
        "These times are of a CPU and say nothing about a GPU.",
        "optimizer steps 3 to 4 of a training that sent forward int8; backward as it is",
        "Forward, b holds 99% of the energy",
        "3 messages held a NaN or an Inf, left out: b (forward), (outside any module) (backward).",
        "Not compressed in this run and so not observed: 3 exchanges, smaller than min_bytes=9.",
        "| INT8 per tensor | 8.00 | 2% |",
        "| b | forward | all_gather | 2 x 50 float32 | 2 of 3 | 1 | 99% | - |",
    ):
        assert line in text, line
    assert "Backward, a holds" not in text  # the only site that was measured decides nothing for others
    bits = [line.split("|")[2] for line in text.splitlines() if line.startswith(("| **int", "| INT"))]
    assert bits[:3] == [" 4.25 ", " 8.00 ", " 8.25 "]


def test_percent() -> None:
    shares = (0.02614, 1.5, 0.0, 0.000004, 1e-9, math.inf)
    assert [tables.percent(share) for share in shares] == ["2.61%", "150%", "0%", "0.0004%", "<0.0001%", "inf%"]


def test_plot_is_one_page_with_a_panel_for_each_direction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("plotly")
    result = result_of()
    figure = frontier.frontier_figure(result)
    names = [trace.name for trace in figure.data]
    assert names == ["no codec beats these", "integer, rotated", "baseline"] * 2
    front, integers = figure.data[0], figure.data[1]
    assert list(front.x) == [4.25, 8.25]
    assert list(front.y) == pytest.approx([-20, -40])
    assert list(integers.y) == pytest.approx([-40, -20])
    assert all(
        text in integers.text[1] for text in ("int4", "error 10%", "worst site 10%: &lt;a&gt;", "5 us", "4.250 bits")
    )
    moved = figure.layout.updatemenus[0].buttons[2].args[0]  # the worst site
    assert [len(moved[axis]) for axis in "xy"] == [6, 6]
    assert list(moved["y"][4]) == pytest.approx([-20 * math.log10(50), -20 * math.log10(5)])

    monkeypatch.setattr(frontier, "find_spec", lambda name: None if name == "kaleido" else True)
    (sentence,) = frontier.write_frontier(result, tmp_path)
    assert sentence.startswith("frontier.svg is missing, since kaleido is not installed; pip install kaleido")
    page = (tmp_path / "frontier.html").read_text()
    assert "prefers-color-scheme: dark" in page
    assert "{plot_id}" not in page
    assert not any(f'<{tag} src="http' in page for tag in ("script", "img"))
    assert len(page) > 1_000_000  # plotly's own script
    assert "<a>:" not in page  # a module's name is no markup
    assert not (tmp_path / "frontier.svg").exists()


def test_svg_that_kaleido_cannot_draw_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def write_image(self, path: Path, **size: int) -> None:
            raise RuntimeError("Chrome is not installed\nand more")

    monkeypatch.setattr(frontier, "find_spec", lambda name: True)
    assert frontier._write_svg(Broken(), tmp_path / "frontier.svg") == [
        "frontier.svg is missing, since kaleido could not draw it (Chrome is not installed); frontier.html shows the "
        "same."
    ]


def test_without_plotly_a_sentence_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frontier, "find_spec", lambda name: None)
    (sentence,) = frontier.write_frontier(result_of(), tmp_path)
    assert sentence == (
        "frontier.html and frontier.svg are missing, since plotly is not installed; "
        "pip install 'lightning-taco[study]'."
    )
    assert list(tmp_path.iterdir()) == []


# Trainings

DOWN, UP = ErrorKey("model.mlp.down", "forward", "all_reduce"), ErrorKey("model.mlp.up", "backward", "all_reduce")


def trainer_of(folder: Path, trainer_class: type[L.Trainer] = StudyTrainer, **settings: Any) -> Any:
    defaults: dict[str, Any] = {
        "strategy": TacoTPStrategy(
            compression=CompressionConfig(min_bytes=0, during_validation=True), sample_every_n_steps=1
        ),
        "max_steps": 6,
        "val_check_interval": 1,
    }
    return trainer_class(
        accelerator="cpu",
        devices=2,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        **(defaults | settings),
    )


@pytest.mark.usefixtures("warm_lightning")
def test_study_of_a_training_observes_its_last_steps_and_changes_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def rank_of(rank: int) -> Any:
        losses = []
        for trainer, run in ((trainer_of(tmp_path / "plain"), "fit"), (trainer_of(tmp_path), "study")):
            module = TinyModule()
            options = {}
            if run == "study":
                options["study"] = StudySettings(num_steps=1, candidates=[CodecConfig(), INT4], baselines=False)
            with captured_messages() as messages:
                getattr(trainer, run)(module, tiny_dataloader(), tiny_dataloader(4), **options)
            losses.append((module.losses, module.validation_losses))
            assert not any(isinstance(callback, StudyCallback) for callback in trainer.callbacks)
        errors = {key: error.relative_l2_error for key, error in trainer.strategy.compression.errors.items()}
        return losses, errors, messages

    (losses, errors, messages), (_, other_errors, _) = run_forked(2, rank_of)
    assert losses[0] == losses[1]
    assert errors == other_errors
    found = json.loads((tmp_path / "study" / "study.json").read_text())
    assert (found["about"]["first_step"], found["about"]["last_step"]) == (6, 6)
    assert found["about"]["trained_with"]["forward"] == str(INT8)
    sites = {ErrorKey(each["site"], each["direction"], each["kind"]): each for each in found["sites"]}
    assert set(sites) == {DOWN, UP} == set(errors)
    for key, site in sites.items():  # what the strategy itself measured of the same codec in the same step
        assert site["codecs"][str(INT8)]["relative_l2_error"] == pytest.approx(errors[key], rel=1e-6)
        assert (site["num_seen"], site["num_observed"], site["shape"]) == (1, 1, [4, 8, 32])
        assert site["cancellation"] > 0
    text = (tmp_path / "study" / "study.md").read_text()
    assert "| **int4, block 128, Hadamard** | 4.25 |" in text
    assert (tmp_path / "study" / "frontier.html").exists()
    assert capfd.readouterr().out.count("Forward: 1 message of 1 site") == 1  # by rank 0 only
    for line in (
        "2 codecs will be measured in the last steps, 1 of them",
        "observing step 6",
        "message 1 (model.mlp.down, forward all_reduce), codec 1 of 2",
        "written to",
    ):
        assert sum(f"lightning_taco study: {line}" in message for message in messages) == 1, messages


@pytest.mark.usefixtures("warm_lightning")
def test_study_callback_under_accumulation_and_its_own_folder(tmp_path: Path) -> None:
    """Two epochs of two optimizer steps of two batches each; the last step ends with the last batch."""

    def rank_of(rank: int) -> Any:
        settings = StudySettings(num_steps=3, max_messages=2, candidates=[INT8], folder=str(tmp_path / "here"))
        callback = StudyCallback(settings)
        trainer = trainer_of(
            tmp_path, L.Trainer, callbacks=[callback], max_epochs=2, max_steps=-1, accumulate_grad_batches=2
        )
        trainer.fit(TinyModule(), tiny_dataloader())
        if callback.result is None:
            return None
        return callback.result.about, [(site.num_seen, site.num_observed) for site in callback.result.sites]

    (about, counts), other = run_forked(2, rank_of)
    assert other is None
    assert (about["first_step"], about["last_step"]) == (2, 4)
    assert counts == [(6, 2), (6, 2)]
    assert {path.name for path in (tmp_path / "here").iterdir()} >= {"study.json", "study.md", "frontier.html"}


@pytest.mark.usefixtures("warm_lightning")
def test_study_goes_on_from_a_checkpoint_and_needs_steps_beyond_it(tmp_path: Path) -> None:
    def rank_of(rank: int) -> tuple[str, str]:
        trained = trainer_of(tmp_path, max_steps=3)
        trained.fit(TinyModule(), tiny_dataloader())
        path = str(tmp_path / "trained.ckpt")
        trained.save_checkpoint(path)
        settings = StudySettings(candidates=[INT8], baselines=False)
        options = {"ckpt_path": path, "study": settings}
        trainer_of(tmp_path, max_steps=6).study(TinyModule(), tiny_dataloader(), **options)
        made = (tmp_path / "study" / "study.json").read_text() if rank == 0 else ""
        with pytest.raises(RuntimeError) as raised:
            trainer_of(tmp_path, max_steps=3).study(TinyModule(), tiny_dataloader(), **options)
        return made, str(raised.value)

    made, refusal = run_forked(2, rank_of)[0]
    about = json.loads(made)["about"]
    assert (about["first_step"], about["last_step"]) == (5, 6)
    assert "step 3 is reached already (max_steps=3, max_epochs=-1); raise trainer.max_steps by 2 or more" in refusal


class StopsEarly(L.Callback):
    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        trainer.should_stop = trainer.global_step == 2


@pytest.mark.usefixtures("warm_lightning")
def test_study_that_saw_nothing_says_why(tmp_path: Path) -> None:
    def rank_of(rank: int) -> list[str]:
        runs: list[dict[str, Any]] = [
            {"callbacks": [StopsEarly()], "min_epochs": 0},
            {"strategy": TacoTPStrategy(compression=CompressionConfig(min_bytes=1 << 30))},
            {"max_steps": 0},
            {"strategy": TacoTPStrategy(tensor_parallel_size=1, data_parallel_size=2)},
        ]
        sentences = []
        for settings in runs:
            with pytest.raises((RuntimeError, ValueError)) as raised:
                trainer_of(tmp_path, **settings).study(TinyModule(), tiny_dataloader())
            sentences.append(str(raised.value))
        return sentences

    early, small, done, one_rank = run_forked(2, rank_of)[0]
    assert "the training ended early, after step 2 (max_steps=6, max_epochs=-1); lower trainer.max_steps" in early
    assert "The study observed nothing: 12 x smaller than min_bytes=1073741824; see 'compression'" in small
    assert "nothing was trained: step 0 is reached already (max_steps=0" in done
    assert "tensor_parallel_size=1 sends none; use tensor_parallel_size=2 or more" in one_rank
    assert not (tmp_path / "study").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"strategy": "auto"}, "strategy is a .*; use strategy=TacoTPStrategy"),
        ({"strategy": TacoTPStrategy(compression=None)}, "compression is off; use any recipe"),
        ({"strategy": TacoTPStrategy(compression="none")}, "compression is off; use any recipe"),
        ({"max_steps": -1, "max_epochs": -1}, "give this training no end; set trainer.max_steps"),
    ],
)
def test_what_cannot_be_studied_is_refused_before_a_process_starts(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        check_studiable(trainer_of(tmp_path, **settings))
