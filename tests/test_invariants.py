"""What must always hold, by number, for every kind of exchange in forward and in backward, through DTensor.

1 same bits on every rank; 2 non-finite stays so, zeros and extremes survive; 3 fp32 sums in rank order, repeatable;
4 rank-symmetric decisions; 5 only what is meant; 6 off is off; 7 never silently nothing; 8 undone at the end;
9 any shape and world size; 10 buffers outlive their use, memory is flat; 11 wide offsets and scales.
"""

import gc
import math
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor.placement_types as placement_types
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lightning_taco.codec.layout import MessageLayout
from lightning_taco.config import CodecConfig, CompressionConfig
from lightning_taco.dtensor import is_installed
from lightning_taco.dtensor.scopes import sessions_in_scope
from tests.models import (
    EVERYTHING,
    HIDDEN,
    Mlp,
    installed_session,
    make_model,
    make_tokens,
    tensor_parallel_mesh,
    train_step,
)
from tests.ranks import run_forked

ROWS, COLUMNS = 12, 96  # 2, 3 and 4 ranks divide both
KINDS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
DIRECTIONS = ("forward", "backward")
EXCHANGES = [(kind, direction) for kind in KINDS for direction in DIRECTIONS]
REPLICATING = ("all_reduce", "all_gather")
REDUCING = ("all_reduce", "reduce_scatter")

# What each kind redistributes from and to; in backward, the gradient goes that way.
FROM_AND_TO: dict[str, tuple[Placement, Placement]] = {
    "all_reduce": (Partial(), Replicate()),
    "reduce_scatter": (Partial(), Shard(0)),
    "all_gather": (Shard(0), Replicate()),
    "all_to_all": (Shard(1), Shard(0)),
}


def exchange(kind: str, direction: str, mesh: DeviceMesh, values: Tensor) -> Tensor:
    """What `kind` makes of this rank's `values` in `direction`."""
    source, target = FROM_AND_TO[kind]
    if direction == "forward":
        tensor = DTensor.from_local(values, mesh, [source], run_check=False)
        return tensor.redistribute(placements=[target]).to_local().clone()
    if kind == "all_reduce":
        leaf = torch.zeros_like(values).requires_grad_()
        DTensor.from_local(leaf, mesh, [Replicate()]).to_local(grad_placements=[Partial()]).backward(values)
        assert leaf.grad is not None
        return leaf.grad
    # Forward goes the other way round, with a Partial where the gradient is to be gathered.
    before = Partial() if kind == "all_gather" else target
    after = Replicate() if kind == "reduce_scatter" else source
    shape = list(values.shape)
    if kind in ("reduce_scatter", "all_to_all"):
        shape[0] //= mesh.size()
    if kind == "all_to_all":
        shape[1] *= mesh.size()
    if kind == "all_gather":
        shape[0] *= mesh.size()
    local_leaf = torch.zeros(shape, dtype=values.dtype)
    distributed = DTensor.from_local(local_leaf, mesh, [before], run_check=False).requires_grad_()
    result = distributed.redistribute(placements=[after]).to_local(grad_placements=[source])
    assert result.shape == values.shape
    result.backward(values)
    assert distributed.grad is not None
    return distributed.grad.to_local()


def values_of_rank(dtype: torch.dtype = torch.float32, rows: int = ROWS, columns: int = COLUMNS) -> Tensor:
    generator = torch.Generator().manual_seed(dist.get_rank())
    values = torch.randn(rows, columns, generator=generator)
    values[::4] *= 1000
    values[1::4] *= torch.where(torch.rand(columns, generator=generator) < 0.05, 50.0, 1.0)
    return values.to(dtype)


def gathered(tensor: Tensor) -> list[Tensor]:
    parts: list[Tensor] = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.contiguous())
    return parts


def on_ranks(worlds: tuple[int, ...], function: Callable[[DeviceMesh], None]) -> None:
    for world in worlds:
        run_forked(world, lambda _: function(tensor_parallel_mesh()))


def test_1_every_rank_ends_with_the_same_bits() -> None:
    def body(mesh: DeviceMesh) -> None:
        with installed_session(mesh) as session:
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                for kind, direction in EXCHANGES:
                    with session.scope():
                        result = exchange(kind, direction, mesh, values_of_rank(dtype))
                    assert result.dtype == dtype
                    if kind in REPLICATING:
                        first, *others = gathered(result)
                        assert all(torch.equal(first, other) for other in others), (kind, direction, dtype)
            compressed = {(key.kind, key.direction) for key in session.traffic.counts if key.outcome == "compressed"}
            assert compressed == set(EXCHANGES)
            assert session.traffic.stock_reasons() == {}

    on_ranks((2, 3), body)


def test_1_a_step_leaves_replicated_gradients_the_same_on_every_rank() -> None:
    def body(mesh: DeviceMesh) -> None:
        model = make_model(mesh).eval()
        with installed_session(mesh, module=model) as session:
            loss, _ = train_step(model, make_tokens(), session)
        norms = [block.norm for block in model.blocks]
        for tensor in (loss, *(norm.weight.grad for norm in norms), *(norm.bias.grad for norm in norms)):
            first, *others = gathered(tensor)
            assert all(torch.equal(first, other) for other in others)

    on_ranks((2, 4), body)


def test_2_non_finite_stays_non_finite() -> None:
    def body(mesh: DeviceMesh) -> None:
        rank, world = dist.get_rank(), mesh.size()
        with installed_session(mesh) as session:
            for bad in (math.nan, math.inf, -math.inf):
                for dtype in (torch.float32, torch.bfloat16):
                    for kind, direction in EXCHANGES:
                        values = values_of_rank(dtype)
                        if rank == 1:
                            values[0, 0] = bad  # lands in row 0: of rank 0's shard, of the whole
                        with session.scope():
                            result = exchange(kind, direction, mesh, values)
                        row = ROWS if kind == "all_gather" else 0
                        column = COLUMNS if kind == "all_to_all" else 0
                        if kind in REPLICATING or rank == 0:
                            assert not result[row, column].isfinite(), (kind, direction, bad)
                            assert result.isfinite().float().mean() > 0.5  # one block, not all of it
                        else:
                            assert result.isfinite().all(), (kind, direction, bad)
            assert session.traffic.stock_reasons() == {}
            assert world == 2

    on_ranks((2,), body)


def test_2_zeros_and_extremes_survive() -> None:
    def body(mesh: DeviceMesh) -> None:
        with installed_session(mesh) as session:
            for kind, direction in EXCHANGES:
                with session.scope():
                    assert exchange(kind, direction, mesh, torch.zeros(ROWS, COLUMNS)).eq(0).all()
                for size in (1e-30, 1e30):
                    for dtype in (torch.float32, torch.bfloat16):
                        values = (values_of_rank().double() * size * 1e-3).to(dtype)
                        stock = exchange(kind, direction, mesh, values).double()
                        with session.scope():
                            result = exchange(kind, direction, mesh, values).double()
                        assert result.isfinite().all()
                        assert (result - stock).norm() < 0.05 * stock.norm(), (kind, direction, size)

    on_ranks((2, 3), body)


def test_3_sums_are_fp32_in_rank_order_and_repeat_bit_for_bit() -> None:
    """bf16 has 8 bits: it would make 900 of 896 + 3.5, and 4 of the sum. In fp32, BIG + 224 is BIG."""
    big = 448.0 * 2**24
    cases = (
        (torch.bfloat16, (896.0, 3.5, -896.0), 3.5),
        (torch.float32, (big, 224.0, -big), 0.0),
        (torch.float32, (big, -big, 224.0), 224.0),
    )

    def body(mesh: DeviceMesh) -> None:
        with installed_session(mesh) as session, session.scope():
            for kind, direction in EXCHANGES:
                if kind in REDUCING:
                    for dtype, constants, total in cases:
                        values = torch.full((ROWS, COLUMNS), constants[dist.get_rank()], dtype=dtype)
                        result = exchange(kind, direction, mesh, values)
                        assert result.eq(total).all(), (kind, direction, constants)
                first, second = (exchange(kind, direction, mesh, values_of_rank()) for _ in range(2))
                assert torch.equal(first, second)

    on_ranks((3,), body)


def test_4_one_ranks_data_changes_no_decision() -> None:
    def body(mesh: DeviceMesh) -> None:
        rank = dist.get_rank()
        values = values_of_rank()
        odd_ones = (torch.zeros_like(values), torch.full_like(values, math.nan), torch.full_like(values, 1e30))
        with installed_session(mesh, CompressionConfig(min_bytes=4000)) as session:
            for odd in odd_ones:
                for kind, direction in EXCHANGES:
                    for rows in (ROWS, 3 * mesh.size()):
                        mine = (odd if rank == 1 else values)[:rows]
                        with session.scope():
                            exchange(kind, direction, mesh, mine.contiguous())
            counts = [
                (tuple(key), count.num_messages, count.sent_bytes) for key, count in session.traffic.counts.items()
            ]
            everyones: list[object] = [None] * mesh.size()
            dist.all_gather_object(everyones, sorted(counts))
            assert all(theirs == everyones[0] for theirs in everyones)
            assert {key[3] for key, _, _ in counts} == {"compressed", "smaller than min_bytes=4000"}

    on_ranks((2, 3), body)


def test_5_only_floating_point_sums_above_the_floor_are_compressed() -> None:
    def body(mesh: DeviceMesh) -> None:
        with installed_session(mesh, CompressionConfig(min_bytes=ROWS * COLUMNS * 4)) as session:
            for kind, direction in EXCHANGES:
                for values in (values_of_rank(torch.float64), values_of_rank(rows=2, columns=COLUMNS // 2)):
                    stock = exchange(kind, direction, mesh, values)
                    with session.scope():
                        result = exchange(kind, direction, mesh, values)
                    assert torch.equal(result, stock)
                if direction == "forward":
                    counts = (values_of_rank() * 100).to(torch.int64)
                    stock = exchange(kind, direction, mesh, counts)
                    with session.scope():
                        assert torch.equal(exchange(kind, direction, mesh, counts), stock)
            assert session.traffic.total(outcome="compressed").num_messages == 0
            assert set(session.traffic.stock_reasons()) == {
                "dtype float64",
                "dtype int64",
                f"smaller than min_bytes={ROWS * COLUMNS * 4}",
            }

    on_ranks((2,), body)


def test_6_off_is_the_librarys_own_bit_for_bit() -> None:
    def body(mesh: DeviceMesh) -> None:
        stock = {pair: exchange(*pair, mesh, values_of_rank()) for pair in EXCHANGES}
        off = CompressionConfig(min_bytes=0, forward=None, backward=None)
        for config, in_scope in ((EVERYTHING, False), (off, True)):
            with installed_session(mesh, config) as session:
                for pair in EXCHANGES:
                    if in_scope:
                        with session.scope():
                            result = exchange(*pair, mesh, values_of_rank())
                    else:
                        result = exchange(*pair, mesh, values_of_rank())
                    assert torch.equal(result, stock[pair]), pair
                assert session.traffic.total(outcome="compressed").num_messages == 0
        for pair in EXCHANGES:
            assert torch.equal(exchange(*pair, mesh, values_of_rank()), stock[pair])

    on_ranks((2, 3), body)


def test_7_nothing_compressed_never_goes_unsaid() -> None:
    def body(mesh: DeviceMesh) -> None:
        for kind, direction in EXCHANGES:
            with installed_session(mesh, CompressionConfig(min_bytes=1 << 30)) as session:
                with session.scope():
                    exchange(kind, direction, mesh, values_of_rank())
                reason = session.nothing_compressed_reason()
                num_exchanges = session.traffic.total().num_messages  # some backwards need one in forward
                assert reason == f"{num_exchanges} x smaller than min_bytes={1 << 30}", (kind, direction)
            with installed_session(mesh) as session:
                with session.scope():
                    exchange(kind, direction, mesh, values_of_rank())
                assert session.nothing_compressed_reason() is None

    on_ranks((2,), body)


def test_8_everything_is_undone_and_a_second_run_in_the_process_works() -> None:
    def body(mesh: DeviceMesh) -> None:
        names = ("funcol", "shard_dim_alltoall")

        def patched() -> list[object]:
            return [getattr(placement_types, name) for name in names] + [DTensor.full_tensor, DTensor.redistribute]

        def run(kind: str, direction: str, *, fails: bool) -> Tensor:
            with installed_session(mesh) as session, session.scope():
                result = exchange(kind, direction, mesh, values_of_rank())
                if fails:
                    raise ArithmeticError("on every rank")
            return result

        before = patched()
        for kind, direction in EXCHANGES:
            first = run(kind, direction, fails=False)
            with pytest.raises(ArithmeticError, match="on every rank"):
                run(kind, direction, fails=True)
            assert not is_installed()
            assert not sessions_in_scope()
            assert all(new is old for new, old in zip(patched(), before, strict=True))
            assert torch.equal(run(kind, direction, fails=False), first)

    on_ranks((2,), body)


def test_9_any_shape_at_any_world_size() -> None:
    shapes = ((5, 7), (1, 3), (3, 130), (0, 4), (8, 1), (2, 5, 6), (16, 16))

    def body(mesh: DeviceMesh) -> None:
        world = mesh.size()
        with installed_session(mesh) as session:
            for shape in shapes:
                full = torch.randn(shape, generator=torch.Generator().manual_seed(3))
                for kind in KINDS:
                    source, target = FROM_AND_TO[kind]
                    for dim in range(len(shape)):
                        to = Shard(dim) if target.is_shard() else target
                        start = Shard(dim) if kind == "all_gather" else source
                        if kind == "all_to_all":
                            start = Shard((dim + 1) % len(shape))
                        tensor = DTensor.from_local(full, mesh, [Replicate()])
                        if start.is_shard():
                            tensor = tensor.redistribute(placements=[start])
                        else:
                            tensor = DTensor.from_local(full, mesh, [Partial()], run_check=False)
                        stock = tensor.redistribute(placements=[to]).to_local()
                        with session.scope():
                            result = tensor.redistribute(placements=[to]).to_local()
                        assert result.shape == stock.shape, (kind, shape, dim)
                        assert (result - stock).norm() <= 0.07 * world * full.norm(), (kind, shape, dim)
            assert world == 1 or session.traffic.total(outcome="compressed").num_messages > 0

    on_ranks((1, 2, 3, 4), body)


def test_10_memory_is_flat_after_the_third_step() -> None:
    def body(mesh: DeviceMesh) -> None:
        model = Mlp()
        parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        with installed_session(mesh, module=model) as session:

            def held() -> tuple[int, ...]:
                gc.collect()
                stacks = session.sites._stacks
                return (
                    len(session.traffic.counts),
                    len(session._codecs),
                    len(stacks.forward) + len(stacks.backward),
                    len(session.sites._handles),
                    sum(isinstance(thing, Tensor) for thing in gc.get_objects()),
                )

            after_third: tuple[int, ...] = ()
            for step in range(1, 201):
                model.zero_grad()
                with session.scope(is_new_step=True):
                    model(torch.ones(1, HIDDEN, requires_grad=True)).sum().backward()
                if step == 3:
                    after_third = held()
            assert held() == after_third
            assert session.traffic.total(outcome="compressed").num_messages == 400

    on_ranks((2,), body)


def test_10_a_result_is_its_own_memory() -> None:
    def body(mesh: DeviceMesh) -> None:
        with installed_session(mesh) as session, session.scope():
            for kind, direction in EXCHANGES:
                values = values_of_rank()
                before = values.clone()
                first = exchange(kind, direction, mesh, values)
                kept = first.clone()
                values.fill_(7)
                for _ in range(3):
                    exchange(kind, direction, mesh, torch.full_like(values, -3))
                assert torch.equal(first, kept), (kind, direction)
                assert torch.equal(exchange(kind, direction, mesh, before), kept)

    on_ranks((2,), body)


def test_11_scales_are_fp32_even_for_fp16() -> None:
    """2^-24 is the smallest fp16: 448 / 2^-24 is far above the largest, so a scale in half precision would be Inf."""
    smallest = 2.0**-24

    def body(mesh: DeviceMesh) -> None:
        with installed_session(mesh) as session, session.scope():
            for kind, direction in EXCHANGES:
                result = exchange(kind, direction, mesh, torch.full((ROWS, COLUMNS), smallest, dtype=torch.float16))
                factor = mesh.size() if kind in REDUCING else 1
                assert result.eq(smallest * factor).all(), (kind, direction)

    on_ranks((2,), body)


def test_11_offsets_go_beyond_32_bits() -> None:
    layout = MessageLayout.of((1 << 32) + 1, CodecConfig(element="e4m3", block_size=128))
    assert layout.num_blocks == (1 << 25) + 1
    assert layout.scale_offset_bytes == (1 << 32) + 128
    assert layout.message_bytes == (1 << 32) + 128 + (1 << 27) + 16
