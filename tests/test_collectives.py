"""The four compressed collectives against the codec's reference, composed by hand, and against exact sums.

The oracles of this file know nothing of how a collective lays its messages out beyond what its docstring promises:
whole blocks per chunk in a two-shot all-reduce, `torch.chunk` shards elsewhere, sums in rank order.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_taco.codec.reference import (
    decode_reference,
    decode_sum_reference,
    encode_reference,
    requantize_reference,
)
from lightning_taco.collectives import ProcessGroupTransport, all_gather, all_reduce, all_to_all, reduce_scatter
from lightning_taco.collectives.transport import Arriving, Pending
from lightning_taco.config import CodecConfig
from tests.ranks import run_forked, run_threads

torch.set_num_threads(1)  # ranks are threads already

WORLDS = (1, 2, 3, 4, 8)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
E4M3 = CodecConfig(element="e4m3", block_size=32)
INT8 = CodecConfig(element="int8", block_size=64)
DUAL = CodecConfig(element="e4m3", block_size=32, scale_mode="dual")
PLAIN = CodecConfig(element="int8", block_size=32, rotation=False)
CODECS = (E4M3, INT8, DUAL, PLAIN)
# Largest error of one code, as a share of the L2 norm of its block: half a step of E4M3's 3-bit mantissa (and a little
# for its subnormals), half a step of amax / 127 in each of 64 values for INT8.
BLOCK_ERROR = {"e4m3": 2**-4 + 2**-10, "int8": math.sqrt(64) / 254}

# Each with another codec and reduction, in turn.
SHAPES_AND_DIMS: tuple[tuple[tuple[int, ...], int], ...] = (
    ((16, 24), 0),
    ((16, 24), 1),
    ((16, 24), -1),
    ((5, 7, 9), 0),  # uneven, and empty shards on 8 ranks
    ((5, 7, 9), 1),
    ((5, 7, 9), -2),
    ((5, 7, 9), 2),
    ((3, 16), 0),  # fewer rows than ranks
    ((9, 4, 8), -3),
    ((1,), 0),
    ((1, 1), 1),
    ((257,), 0),
    ((0, 5), 0),
    ((0, 5), 1),
    ((4, 0), -1),
)


def rank_inputs(world: int, shape: Sequence[int], dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """One tensor a rank, whose rows differ in size by up to 10^6, with zero rows and outliers."""
    generator = torch.Generator().manual_seed(seed)
    inputs = []
    for _ in range(world):
        values = torch.randn(*shape, generator=generator)
        exponents = torch.randint(-3, 3, (*shape[:1], *[1] * (len(shape) - 1)), generator=generator)
        values = values * 10.0**exponents
        values = values * torch.where(torch.rand(shape, generator=generator) < 0.02, 30.0, 1.0)
        if len(shape) > 1:
            values[::5] = 0
        inputs.append(values.to(dtype))
    return inputs


def shard_of(tensor: Tensor, world: int, rank: int, dim: int) -> Tensor:
    """The shard that `torch.chunk` gives `rank`, or an empty one."""
    chunks = torch.chunk(tensor, world, dim)
    return chunks[rank] if rank < len(chunks) else tensor.narrow(dim, 0, 0)


def padded(shard: Tensor, size: int, dim: int) -> Tensor:
    missing = list(shard.shape)
    missing[dim] = size - shard.shape[dim]
    return torch.cat([shard, shard.new_zeros(missing)], dim).contiguous()


def message_of(tensor: Tensor, codec: CodecConfig) -> Tensor:
    return encode_reference(tensor.reshape(1, -1), codec)


def expected_all_reduce(inputs: list[Tensor], codec: CodecConfig, op: str) -> Tensor:
    world, (shape, dtype, num_values) = len(inputs), (inputs[0].shape, inputs[0].dtype, inputs[0].numel())
    average = op == "avg"
    if num_values == 0 or world == 1:
        return inputs[0]
    if world == 2:
        messages = torch.cat([message_of(tensor, codec) for tensor in inputs])
        return decode_sum_reference(messages, codec, num_values, dtype, average=average).view(shape)
    blocks_per_rank = math.ceil(math.ceil(num_values / codec.block_size) / world)
    chunk = blocks_per_rank * codec.block_size
    flat = [padded(tensor.reshape(-1), chunk * world, 0) for tensor in inputs]
    sums = []
    for owner in range(world):
        messages = torch.cat([message_of(values[owner * chunk : (owner + 1) * chunk], codec) for values in flat])
        sums.append(requantize_reference(messages, codec, chunk, average=average))
    return decode_reference(torch.cat(sums), codec, chunk, dtype).reshape(-1)[:num_values].view(shape)


def expected_reduce_scatter(inputs: list[Tensor], codec: CodecConfig, op: str, dim: int, rank: int) -> Tensor:
    world = len(inputs)
    if world == 1:
        return inputs[0]
    own = shard_of(inputs[0], world, rank, dim)
    largest = math.ceil(inputs[0].shape[dim] / world)
    pieces = [padded(shard_of(tensor, world, rank, dim), largest, dim) for tensor in inputs]
    if pieces[0].numel() == 0:
        return own
    messages = torch.cat([message_of(piece, codec) for piece in pieces])
    total = decode_sum_reference(messages, codec, pieces[0].numel(), own.dtype, average=op == "avg")
    return total.view(pieces[0].shape).narrow(dim, 0, own.shape[dim])


def through_codec(tensor: Tensor, codec: CodecConfig, padded_to: int | None = None, dim: int = 0) -> Tensor:
    """`tensor` encoded and decoded, filled up to `padded_to` along `dim` on the way."""
    filled = tensor if padded_to is None else padded(tensor, padded_to, dim)
    if filled.numel() == 0:
        return tensor
    decoded = decode_reference(message_of(filled, codec), codec, filled.numel(), tensor.dtype).view(filled.shape)
    return decoded.narrow(dim, 0, tensor.shape[dim])


def expected_all_gather(full: Tensor, world: int, codec: CodecConfig, dim: int) -> Tensor:
    """What a gather of the `torch.chunk` shards of `full` gives."""
    if world == 1:
        return full
    largest = math.ceil(full.shape[dim] / world)
    shards = [shard_of(full, world, rank, dim) for rank in range(world)]
    return torch.cat([through_codec(shard, codec, largest, dim) for shard in shards], dim)


def expected_all_to_all(
    inputs: list[Tensor], codec: CodecConfig, gather_dim: int, scatter_dim: int, rank: int
) -> Tensor:
    world = len(inputs)
    if world == 1:
        return inputs[0]
    pieces = [torch.chunk(tensor, world, scatter_dim)[rank].contiguous() for tensor in inputs]
    return torch.cat([through_codec(piece, codec) for piece in pieces], gather_dim)


def on_ranks(world: int, function: Callable[[int, dist.ProcessGroup], Any]) -> list[Any]:
    """`function(rank, group)` on ranks that are threads."""
    return run_threads(world, lambda rank: function(rank, dist.group.WORLD))


def assert_same_bits(left: Tensor, right: Tensor) -> None:
    assert left.shape == right.shape
    assert left.dtype == right.dtype
    size = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[left.element_size()]
    assert torch.equal(left.contiguous().view(size), right.contiguous().view(size))


# Every dtype in one shot (two ranks) and in two; a dtype each where there are only more ranks.
WORLDS_AND_DTYPES = [
    *itertools.product((2, 3), DTYPES),
    (1, torch.float32),
    (4, torch.bfloat16),
    (8, torch.float16),
]


@pytest.mark.parametrize(("world", "dtype"), WORLDS_AND_DTYPES)
def test_collectives_equal_the_reference_composed_by_hand(world: int, dtype: torch.dtype) -> None:
    cases = [
        (shape, dim, CODECS[index % len(CODECS)], "avg" if index % 3 == 0 else "sum", index)
        for index, (shape, dim) in enumerate(SHAPES_AND_DIMS)
    ]
    inputs = [rank_inputs(world, shape, dtype, seed) for shape, _, _, _, seed in cases]

    def body(rank: int, group: dist.ProcessGroup) -> list[tuple[Tensor, Tensor, Tensor]]:
        results = []
        for (shape, dim, codec, op, _), everyone in zip(cases, inputs, strict=True):
            mine = everyone[rank]
            before = mine.clone()
            total = all_reduce(mine, codec, group, op=op)
            shard = reduce_scatter(mine, codec, group, dim=dim, op=op)
            own = shard_of(everyone[0], world, rank, dim)
            gathered = all_gather(own, codec, group, dim=dim, full_size=shape[dim])
            assert shard.is_contiguous()
            assert gathered.is_contiguous()
            assert torch.equal(mine, before)  # the input is left as it was
            results.append((total, shard, gathered))
        return results

    by_rank = on_ranks(world, body)
    for index, (_, dim, codec, op, _) in enumerate(cases):
        total = expected_all_reduce(inputs[index], codec, op)
        joined = expected_all_gather(inputs[index][0], world, codec, dim)
        for rank in range(world):
            assert_same_bits(by_rank[rank][index][0], total)
            shard = expected_reduce_scatter(inputs[index], codec, op, dim, rank)
            assert_same_bits(by_rank[rank][index][1], shard)
            assert_same_bits(by_rank[rank][index][2], joined)


@pytest.mark.parametrize("world", WORLDS)
def test_gather_of_equal_shards_and_all_to_all_equal_the_reference(world: int) -> None:
    shape = (8 * 3, 8, 8 * 3)  # 1, 2, 3, 4 and 8 divide the first and the last
    inputs = rank_inputs(world, shape, torch.float32)
    dims = [pair for pair in itertools.product((0, 1, 2, -1, -2, -3), (0, 2, -1, -3)) if pair[0] % 3 != pair[1] % 3]

    def body(rank: int, group: dist.ProcessGroup) -> list[tuple[Tensor, Tensor]]:
        results = []
        for index, (gather_dim, scatter_dim) in enumerate(dims):
            codec = CODECS[index % len(CODECS)]
            joined = all_gather(inputs[rank], codec, group, dim=gather_dim)
            moved = all_to_all(inputs[rank], codec, group, gather_dim=gather_dim, scatter_dim=scatter_dim)
            assert moved.is_contiguous()
            results.append((joined, moved))
        return results

    by_rank = on_ranks(world, body)
    decoded = {codec: inputs if world == 1 else [through_codec(part, codec) for part in inputs] for codec in CODECS}
    for index, (gather_dim, scatter_dim) in enumerate(dims):
        codec = CODECS[index % len(CODECS)]
        joined = torch.cat(decoded[codec], gather_dim)
        for rank in range(world):
            assert_same_bits(by_rank[rank][index][0], joined)
            moved = expected_all_to_all(inputs, codec, gather_dim, scatter_dim, rank)
            assert_same_bits(by_rank[rank][index][1], moved)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_strided_input_gives_the_bits_of_its_contiguous_copy(world: int) -> None:
    wide = rank_inputs(world, (24, 40), torch.bfloat16)

    def views(tensor: Tensor) -> list[Tensor]:
        return [tensor.t(), tensor[:, ::2], tensor[::3].t()[:12], tensor[:1].expand(12, 40)]

    def body(rank: int, group: dist.ProcessGroup) -> None:
        for view in views(wide[rank]):
            dense = view.contiguous()
            for collective in (all_reduce, reduce_scatter, all_gather):
                assert_same_bits(collective(view, E4M3, group), collective(dense, E4M3, group))
            moved = all_to_all(view[:12], E4M3, group, gather_dim=1, scatter_dim=0)
            assert_same_bits(moved, all_to_all(dense[:12], E4M3, group, gather_dim=1, scatter_dim=0))

    on_ranks(world, body)


@pytest.mark.parametrize("world", [2, 3, 4, 8])
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_replicated_results_have_the_same_bits_on_every_rank(world: int, codec: CodecConfig) -> None:
    inputs = {dtype: rank_inputs(world, (8, 16), dtype, seed=world) for dtype in DTYPES}

    def body(rank: int, group: dist.ProcessGroup) -> list[Tensor]:
        results = []
        for dtype in DTYPES:
            mine = inputs[dtype][rank]
            results += [all_reduce(mine, codec, group), all_reduce(mine, codec, group, op="avg")]
            results += [all_gather(mine, codec, group), all_gather(mine, codec, group, dim=-1)]
        return results

    first, *others = on_ranks(world, body)
    for other in others:
        for left, right in zip(first, other, strict=True):
            assert_same_bits(left, right)
    assert not torch.equal(first[2][:8], inputs[torch.bfloat16][0])  # rank 0 too decodes its own shard


@pytest.mark.parametrize("world", [2, 3, 4, 8])
@pytest.mark.parametrize("codec", [E4M3, INT8, DUAL], ids=str)
def test_no_block_of_a_sum_is_further_off_than_its_codes_can_be(world: int, codec: CodecConfig) -> None:
    inputs = rank_inputs(world, (33, 65), torch.float32, seed=5)
    exact = torch.stack([tensor.double() for tensor in inputs]).sum(0)
    total = on_ranks(world, lambda rank, group: all_reduce(inputs[rank], codec, group))[0]

    def block_norms(tensor: Tensor) -> Tensor:
        size = math.ceil(tensor.numel() / codec.block_size) * codec.block_size
        return padded(tensor.reshape(-1), size, 0).view(-1, codec.block_size).norm(dim=1)

    share = BLOCK_ERROR[codec.element]
    of_parts = share * torch.stack([block_norms(tensor.double()) for tensor in inputs]).sum(0)
    of_sum = 0 if world == 2 else share * (block_norms(exact) + of_parts)
    assert (block_norms(total.double() - exact) <= of_parts + of_sum + 1e-6 * block_norms(exact)).all()
    assert not torch.equal(total.double(), exact)


@pytest.mark.parametrize(("codec", "largest"), [(E4M3, 0.035), (DUAL, 0.035), (INT8, 0.012)], ids=str)
def test_relative_error_of_normal_values_has_a_maximum(codec: CodecConfig, largest: float) -> None:
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(64, 64, generator=generator) for _ in range(4)]
    exact = torch.stack(inputs).double().sum(0)

    def body(rank: int, group: dist.ProcessGroup) -> list[Tensor]:
        return [all_reduce(inputs[rank], codec, group), all_gather(inputs[rank], codec, group)]

    reduced, gathered = on_ranks(4, body)[0]
    for result, truth in ((reduced.double(), exact), (gathered.double(), torch.cat(inputs).double())):
        error = ((result - truth).norm() / truth.norm()).item()
        assert 1e-4 < error < largest
        assert (result - truth).abs().max() < 6 * largest * truth.std()


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_a_non_finite_value_of_one_rank_spoils_its_block_and_nothing_else(
    world: int, bad: float, codec: CodecConfig
) -> None:
    size = codec.block_size
    position = (5, 3)  # in a [12, size] tensor a row is a block, so row 5
    sick = world - 1
    inputs = rank_inputs(world, (12, size), torch.bfloat16)
    inputs[sick][position] = bad
    spoilt = torch.zeros(12, size, dtype=torch.bool)
    spoilt[position[0]] = True
    rows_per_rank = 12 // world

    def body(rank: int, group: dist.ProcessGroup) -> None:
        mine = inputs[rank]
        assert torch.equal(~all_reduce(mine, codec, group).isfinite(), spoilt)
        assert torch.equal(~reduce_scatter(mine, codec, group).isfinite(), shard_of(spoilt, world, rank, 0))
        clean = torch.zeros_like(spoilt)
        gathered = torch.cat([spoilt if peer == sick else clean for peer in range(world)])
        assert torch.equal(~all_gather(mine, codec, group).isfinite(), gathered)
        moved = all_to_all(mine, codec, group, gather_dim=1, scatter_dim=0).view(rows_per_rank, world, size)
        expected = torch.zeros(rows_per_rank, world, size, dtype=torch.bool)
        expected[:, sick] = shard_of(spoilt, world, rank, 0)
        assert torch.equal(~moved.isfinite(), expected)

    on_ranks(world, body)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_a_non_finite_value_in_a_tail_reaches_every_rank(world: int, codec: CodecConfig) -> None:
    inputs = rank_inputs(world, (codec.block_size * world + 5,), torch.float32)
    inputs[0][-1] = math.inf
    for total in on_ranks(world, lambda rank, group: all_reduce(inputs[rank], codec, group)):
        assert not total[-5:].isfinite().any()
        assert total[:-5].isfinite().all()


@pytest.mark.parametrize("world", [2, 3, 8])
@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_stay_exact_zeros(world: int, codec: CodecConfig, dtype: torch.dtype) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        zeros = torch.zeros(12, 24, dtype=dtype)
        for collective in (all_reduce, reduce_scatter, all_gather):
            assert torch.count_nonzero(collective(zeros, codec, group)) == 0
        # One row of one rank is not zero, and the blocks that it does not touch stay so.
        rows = torch.zeros(16, codec.block_size, dtype=dtype)
        if rank == world - 1:
            rows[7] = 3
        total = all_reduce(rows, codec, group)
        assert total.isfinite().all()
        assert torch.count_nonzero(total[:7]) == torch.count_nonzero(total[8:]) == 0
        assert torch.allclose(total[7], torch.full_like(total[7], 3), rtol=0.07)

    on_ranks(world, body)


@pytest.mark.parametrize("world", [2, 3, 8])
@pytest.mark.parametrize("size", [1e-30, 1e30])
@pytest.mark.parametrize("codec", [*CODECS, CodecConfig(element="e4m3", block_size=512)], ids=str)
def test_tiny_and_huge_values_survive(world: int, size: float, codec: CodecConfig) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        generator = torch.Generator().manual_seed(2)
        inputs = [(torch.randn(6, 600, generator=generator).double() * size).to(dtype) for _ in range(world)]
        exact = torch.stack([tensor.double() for tensor in inputs]).sum(0)
        for total in on_ranks(world, lambda rank, group, inputs=inputs: all_reduce(inputs[rank], codec, group)):
            assert (total.double() - exact).norm() < 0.05 * exact.norm()
        spike = torch.zeros(6, 600, dtype=dtype)
        spike[2, 7] = size
        for gathered in on_ranks(world, lambda rank, group, spike=spike: all_gather(spike, codec, group)):
            values = gathered.view(world, 6, 600)[:, 2, 7].double() / size
            assert ((values - 1).abs() < 0.07).all()


# 448 * 2^k is a code times a power of two, so that all of these travel exactly, and only the order of the sum counts:
# in fp32, BIG + SMALL is BIG again.
BIG, SMALL = 448.0 * 2**24, 224.0


@pytest.mark.parametrize("rotation", [False, True])
@pytest.mark.parametrize(
    ("constants", "total"),
    [
        ((BIG, SMALL, -BIG), 0.0),
        ((SMALL, BIG, -BIG), 0.0),
        ((BIG, -BIG, SMALL), SMALL),
        ((-BIG, BIG, SMALL), SMALL),
        ((BIG, SMALL, -BIG, SMALL), SMALL),
        ((SMALL, SMALL, BIG, -BIG), 512.0),  # 448 + BIG is rounded up to a multiple of 512
        ((BIG, -BIG, SMALL, SMALL), 2 * SMALL),
    ],
)
def test_sums_are_fp32_and_in_rank_order(rotation: bool, constants: tuple[float, ...], total: float) -> None:
    codec = CodecConfig(element="e4m3", block_size=32, rotation=rotation)
    world = len(constants)

    def body(rank: int, group: dist.ProcessGroup) -> list[Tensor]:
        mine = torch.full((world, 32), constants[rank])
        return [reduce_scatter(mine, codec, group), all_reduce(mine, codec, group)]

    for shard, everything in on_ranks(world, body):
        assert torch.equal(shard, torch.full_like(shard, total))
        assert torch.allclose(everything, torch.full_like(everything, total), rtol=1e-6, atol=0)


def test_the_average_is_taken_in_fp32_and_does_not_overflow() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> list[Tensor]:
        mine = torch.full((4, 32), 57344.0, dtype=torch.float16)  # 448 * 2^7; the sum of four is above fp16's largest
        return [all_reduce(mine, E4M3, group, op="avg"), reduce_scatter(mine, E4M3, group, op="avg")]

    for results in on_ranks(4, body):
        for mean in results:
            assert torch.equal(mean, torch.full_like(mean, 57344.0))


@pytest.mark.parametrize("world", [2, 4])
def test_a_second_run_gives_the_same_bits(world: int) -> None:
    inputs = rank_inputs(world, (40, 24), torch.bfloat16)

    def body(rank: int, group: dist.ProcessGroup) -> list[Tensor]:
        return [collective(inputs[rank], E4M3, group) for collective in (all_reduce, reduce_scatter, all_gather)]

    for left, right in zip(on_ranks(world, body), on_ranks(world, body), strict=True):
        for first, second in zip(left, right, strict=True):
            assert_same_bits(first, second)


def test_one_rank_gets_a_copy_and_not_its_own_tensor() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        mine = torch.randn(4, 4)
        for result in (
            all_reduce(mine, E4M3, group),
            reduce_scatter(mine, E4M3, group),
            all_gather(mine, E4M3, group),
            all_to_all(mine, E4M3, group, gather_dim=0, scatter_dim=1),
        ):
            assert torch.equal(result, mine)
            assert result.data_ptr() != mine.data_ptr()

    on_ranks(1, body)


ERRORS: tuple[tuple[Callable[[dist.ProcessGroup], Any], type[Exception], str], ...] = (
    (
        lambda group: all_reduce(torch.ones(4, 4), E4M3, group, op="max"),  # type: ignore[arg-type]
        ValueError,
        "op='max' cannot be compressed; use 'sum' or 'avg', or the collective of torch.distributed.",
    ),
    (
        lambda group: reduce_scatter(torch.ones(4, 4), E4M3, group, op="product"),  # type: ignore[arg-type]
        ValueError,
        "op='product' cannot be compressed",
    ),
    (
        lambda group: all_to_all(torch.ones(4, 5), E4M3, group, gather_dim=0, scatter_dim=1),
        ValueError,
        "dim 1 has size 5, which 2 ranks do not divide; pad it first.",
    ),
    (
        lambda group: all_gather(torch.ones(4, 4), E4M3, group, full_size=9),
        ValueError,
        "rank . holds 4 of dim 0, but of full_size=9 over 2 ranks it should hold .; cut shards with torch.chunk, or "
        "leave full_size out for equal shards.",
    ),
    (
        lambda group: all_reduce(torch.ones(4, 4), CodecConfig(element="auto"), group),
        TypeError,
        "the codec's element is still 'auto'; name one with",
    ),
    (
        lambda group: all_gather(torch.ones(4, 4, dtype=torch.float64), E4M3, group),
        TypeError,
        "values have dtype torch.float64; bfloat16, float16 or float32 is needed.",
    ),
    (
        lambda group: reduce_scatter(torch.ones(4, 4, dtype=torch.int64), E4M3, group),
        TypeError,
        "values have dtype torch.int64; bfloat16, float16 or float32 is needed.",
    ),
)


def test_errors_say_what_was_given_and_what_is_needed() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        for call, kind, text in ERRORS[:3] + ERRORS[4:]:
            with pytest.raises(kind, match=text):
                call(group)
        call, kind, text = ERRORS[3]
        with pytest.raises(kind, match=text):  # 9 rows over 2 ranks are 5 and 4, so only rank 0 is wrong
            call(FixedTransport(rank=0, world_size=2, messages=[]))

    on_ranks(2, body)


@dataclass
class FixedTransport:
    """A transport of its own kind: what the peers sent is known beforehand, and what this rank sends is kept."""

    rank: int
    world_size: int
    messages: list[Tensor]
    sent: list[Tensor] = field(default_factory=list)

    def message_buffer(self, num_rows: int, message_bytes: int) -> None:
        """Anywhere."""

    def receiving(self, is_async: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def start_all_to_all(self, messages: Tensor, is_async: bool) -> Pending:
        self.sent.append(messages)
        return Arriving(self.messages.pop(0), None)

    start_all_gather = start_all_to_all


def test_any_object_with_the_methods_of_a_transport_will_do() -> None:
    inputs = rank_inputs(3, (6, 32), torch.float32)
    from_peers = torch.cat([message_of(tensor[2:4], E4M3) for tensor in inputs])
    transport = FixedTransport(rank=1, world_size=3, messages=[from_peers])
    shard = reduce_scatter(inputs[1], E4M3, transport)
    assert_same_bits(shard, expected_reduce_scatter(inputs, E4M3, "sum", 0, rank=1))
    assert_same_bits(transport.sent[0], torch.cat([message_of(rows, E4M3) for rows in inputs[1].chunk(3)]))
    assert transport.sent[0].dtype == torch.uint8


STOCHASTIC_INT4 = CodecConfig(element="int4", block_size=32, rounding="stochastic")


@pytest.mark.parametrize(
    ("codec", "world"),
    [(CodecConfig(element="int8", block_size=32), 2), (STOCHASTIC_INT4, 2), (STOCHASTIC_INT4, 3)],
    ids=str,
)
def test_slices_have_the_bits_of_the_whole(world: int, codec: CodecConfig) -> None:
    """Also where rows lie in segments (dims 1 and 2 of whole blocks), and where they would cut blocks (33)."""

    def body(rank: int, group: dist.ProcessGroup) -> None:
        for transport in (group, ProcessGroupTransport(group, pairs_gather=True)):
            for shape in ((4, 6, 64), (6, 3, 33), (1, 6, 160)):
                mine = rank_inputs(world, shape, torch.float32)[rank]

                def results(num_slices: int, mine: Tensor = mine, transport: Any = transport) -> list[Tensor]:
                    more = {"seed": 3, "num_slices": num_slices}
                    dims = [dim for dim in range(3) if mine.shape[dim] % world == 0]
                    return [
                        *(all_reduce(mine, codec, transport, one_shot=one, **more) for one in (True, False)),
                        *(reduce_scatter(mine, codec, transport, dim=dim, **more) for dim in (0, 1, 2)),
                        *(all_gather(mine, codec, transport, dim=dim, **more) for dim in (0, 1, 2)),
                        *(
                            all_to_all(mine, codec, transport, gather_dim=dim, scatter_dim=other, **more)
                            for dim in (0, 1, 2)
                            for other in dims
                        ),
                    ]

                whole = results(1)
                for num_slices in (3, 100) if shape[0] == 1 else (3,):  # 100: each block by itself
                    for sliced, expected in zip(results(num_slices), whole, strict=True):
                        assert_same_bits(sliced, expected)

    on_ranks(world, body)


def test_a_slice_is_encoded_while_the_one_before_is_on_the_way() -> None:
    events: list[str] = []

    class Recording(FixedTransport):
        def start_all_gather(self, message: Tensor, is_async: bool) -> Pending:
            assert is_async
            events.append("send")
            pending = Arriving(message.expand(2, -1).contiguous(), None)
            return Watched(pending)

    @dataclass
    class Watched:
        pending: Pending

        def wait(self) -> Tensor:
            events.append("wait")
            return self.pending.wait()

    all_reduce(torch.ones(8, 64), E4M3, Recording(0, 2, []), num_slices=2)
    assert events == ["send", "send", "wait", "wait"]


def test_process_group_transport_names_its_rank_and_size() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> tuple[int, int]:
        transport = ProcessGroupTransport(group)
        return transport.rank, transport.world_size

    assert on_ranks(3, body) == [(0, 3), (1, 3), (2, 3)]


def test_collectives_work_on_a_group_of_some_ranks() -> None:
    inputs = rank_inputs(4, (6, 10), torch.float32)

    def body(rank: int, _: dist.ProcessGroup) -> Tensor:
        groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        return all_reduce(inputs[rank], E4M3, groups[rank % 2])

    results = on_ranks(4, body)
    for rank, result in enumerate(results):
        assert_same_bits(result, expected_all_reduce([inputs[rank % 2], inputs[rank % 2 + 2]], E4M3, "sum"))


@pytest.mark.parametrize("world", [2, 3])
def test_gloo_carries_the_same_bits(world: int) -> None:
    inputs = {dtype: rank_inputs(world, (6, 18), dtype) for dtype in DTYPES}

    def body(rank: int) -> None:
        group = dist.group.WORLD
        assert group is not None
        for dtype, codec, op in itertools.product(DTYPES, CODECS, ("sum", "avg")):
            everyone = inputs[dtype]
            mine = everyone[rank]
            assert_same_bits(all_reduce(mine, codec, group, op=op), expected_all_reduce(everyone, codec, op))
            shard = reduce_scatter(mine, codec, group, dim=-1, op=op)
            assert_same_bits(shard, expected_reduce_scatter(everyone, codec, op, -1, rank))
            own = shard_of(everyone[0], world, rank, 0)
            gathered = all_gather(own, codec, group, full_size=6)
            assert_same_bits(gathered, expected_all_gather(everyone[0], world, codec, 0))
            moved = all_to_all(mine, codec, group, gather_dim=1, scatter_dim=0)
            assert_same_bits(moved, expected_all_to_all(everyone, codec, 1, 0, rank))
        empty = torch.empty(0, 4)
        assert all_reduce(empty, E4M3, group).shape == reduce_scatter(empty, E4M3, group).shape == (0, 4)
        assert all_gather(empty, E4M3, group, dim=1).shape == (0, 4 * world)

    run_forked(world, body)
