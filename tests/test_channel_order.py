"""Calibrated channel order, and the compression's state in checkpoints: a resumed run has the unbroken run's bits.

Ranks are forked processes, as the seam lives once per process; several checks share each fork.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy as FabricModelParallelStrategy
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import lightning_taco.fabric
from lightning_taco import CompressionConfig, TacoTPStrategy
from lightning_taco.codec import decode, encode
from lightning_taco.collectives import all_reduce
from lightning_taco.config import CodecConfig
from lightning_taco.dtensor import CompressionSession, Exchange, channel_order
from lightning_taco.dtensor.channel_order import (
    CALIBRATION_STEPS,
    ChannelOrder,
    OrderKey,
    order_by_size,
    spread_within_blocks,
    why_natural,
)
from lightning_taco.dtensor.errors import ErrorKey, ReconstructionErrors
from lightning_taco.dtensor.sites import Site
from tests import lightning_models
from tests.lightning_models import (
    TinyModule,
    captured_messages,
    full_weights,
    make_trainer,
    tiny_dataloader,
    warm_lightning,  # noqa: F401  a fixture
)
from tests.models import (
    HIDDEN,
    Mlp,
    TinyLm,
    installed_session,
    local,
    loss_of,
    make_model,
    make_plan,
    make_tokens,
    tensor_parallel_mesh,
    train_step,
)
from tests.ranks import run_forked

CHANNELS, BLOCK = 128, 32
NATURAL = CodecConfig(element="int8", block_size=BLOCK)
CALIBRATED = replace(NATURAL, reshape="calibrated")
STOCHASTIC = replace(CALIBRATED, rounding="stochastic")


def settings(codec: CodecConfig, **others: Any) -> CompressionConfig:
    return CompressionConfig(forward=codec, backward=codec, min_bytes=0, **others)


COMPRESSION = settings(STOCHASTIC)


def sizes_of_channels() -> Tensor:
    """From 1 to about 1000, in no order: every natural block holds small channels beside large ones."""
    exponents = torch.randperm(CHANNELS, generator=torch.Generator().manual_seed(1)) / CHANNELS
    return 1000**exponents


def values_of(rank: int, *rows: int) -> Tensor:
    """``[*rows, CHANNELS]`` Gaussians with `sizes_of_channels`."""
    return torch.randn(*rows, CHANNELS, generator=torch.Generator().manual_seed(10 + rank)) * sizes_of_channels()


def moved(mesh: DeviceMesh, values: Tensor, source: Placement, target: Placement) -> Tensor:
    tensor = DTensor.from_local(values, mesh, [source], run_check=False)
    return tensor.redistribute(placements=[target]).to_local().clone()


def reduced(mesh: DeviceMesh, values: Tensor) -> Tensor:
    return moved(mesh, values, Partial(), Replicate())


def calibrate(session: CompressionSession, function: Callable[[], Any]) -> list[Any]:
    """What `function` gives in each step of the calibration."""
    results = []
    for _ in range(CALIBRATION_STEPS):
        with session.scope(is_new_step=True):
            results.append(function())
    return results


def of_all_ranks(tensor: Tensor) -> list[Tensor]:
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.contiguous())
    return parts


def error_of_tensor(found: Tensor, truth: Tensor) -> float:
    return ((found - truth).norm() / truth.norm()).item()


def error_of_channels(found: Tensor, truth: Tensor) -> float:
    """Geometric mean of the channels' relative errors."""
    found, truth = found.reshape(-1, CHANNELS), truth.reshape(-1, CHANNELS)
    return ((found - truth).norm(dim=0) / truth.norm(dim=0)).log().mean().exp().item()


# --- pure functions


def test_order_is_by_size_and_ties_are_by_index() -> None:
    assert order_by_size(torch.tensor([1.0, 9.0, 1.0, 0.0, 9.0])).tolist() == [1, 4, 0, 2, 3]
    assert order_by_size(torch.ones(300)).tolist() == list(range(300))


def test_restoring_undoes_sorting_exactly() -> None:
    order = ChannelOrder.of(torch.tensor([0, 2, 3, 1], dtype=torch.int32))
    assert order.inverse.tolist() == [0, 3, 1, 2]  # the example in the module's docstring
    for tensor in (torch.randn(3, 4), torch.randn(4, 3, 2).bfloat16().transpose(0, 2)):
        assert torch.equal(order.sort(tensor), tensor[..., [0, 2, 3, 1]])
        assert torch.equal(order.restore(order.sort(tensor)), tensor)


@pytest.mark.parametrize("name", ["", "blocks.0.mlp", "odd/name.1"])
def test_a_key_survives_its_text(name: str) -> None:
    key = OrderKey(name, "backward", "reduce_scatter", 64)
    assert OrderKey.parse(str(key)) == key


@pytest.mark.parametrize(
    ("num_channels", "dims", "codec", "reason"),
    [
        (128, (), CALIBRATED, None),
        (128, (0,), CALIBRATED, None),
        (128, (0, 1), CALIBRATED, None),
        (128, (2,), CALIBRATED, "the exchange cuts or joins the last dim"),
        (128, (-1,), CALIBRATED, "the exchange cuts or joins the last dim"),
        (128, (0, 2), CALIBRATED, "the exchange cuts or joins the last dim"),
        (128, (-1, 0), CALIBRATED, "the exchange cuts or joins the last dim"),
        (80, (), CALIBRATED, "80 channels are no multiple of block_size=32"),
        (16, (), CALIBRATED, "16 channels are no multiple of block_size=32"),
        (32, (), CALIBRATED, "one block holds all channels"),
        (64, (), CodecConfig(block_size=64, scale_mode="fine"), None),  # 32 values share a scale
    ],
)
def test_what_keeps_the_natural_order(
    num_channels: int, dims: tuple[int, ...], codec: CodecConfig, reason: str | None
) -> None:
    assert why_natural(3, num_channels, dims, codec) == reason


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_relative_error_of_a_channel_falls_as_the_spread_does(rounding: Any) -> None:
    codec = replace(CALIBRATED, rounding=rounding)
    values = values_of(0, 256)
    squares = values.double().square().sum(0)
    order = ChannelOrder.of(order_by_size(squares))

    def decoded(tensor: Tensor) -> Tensor:
        return decode(encode(tensor.reshape(1, -1), codec), codec, tensor.numel(), torch.float32).view_as(tensor)

    expected = spread_within_blocks(squares, BLOCK) / spread_within_blocks(squares[order.indices], BLOCK)
    found = error_of_channels(decoded(values), values) / error_of_channels(
        order.restore(decoded(order.sort(values))), values
    )
    assert expected > 4
    assert found == pytest.approx(expected, rel=0.25)


def test_spread_of_channels_that_are_zero_or_extreme() -> None:
    assert spread_within_blocks(torch.zeros(64), 32) == 1.0
    tiny_beside_huge = torch.tensor([1e60, 1e-60] * 16, dtype=torch.float64)
    assert spread_within_blocks(tiny_beside_huge, 32) == pytest.approx(math.sqrt(0.5) * 1e30)
    assert spread_within_blocks(torch.tensor([4.0, 0.0]), 2) == pytest.approx(math.sqrt(0.5))  # one live channel


# --- exchanges


def test_order_is_calibrated_used_and_the_same_on_all_ranks() -> None:
    truth = sum(values_of(rank, 4, 16) for rank in range(2))

    def check_use(mesh: DeviceMesh, codec: CodecConfig) -> tuple[float, float, float, float]:
        """Errors of the tensor and of its channels, before and after; and the bits are those that the order must give.

        The oracle sorts by the sums of both ranks' squares itself and exchanges by the collective.
        """
        lines: list[str] = []
        values = values_of(dist.get_rank(), 4, 16)
        with installed_session(mesh, settings(codec)) as session:
            session = CompressionSession(session.config, mesh.get_group(), inform=lines.append)
            seeds = []
            session_seed = session.seed
            session.seed = lambda *place: seeds.append(session_seed(*place)) or seeds[-1]  # type: ignore[method-assign,func-returns-value]
            before = calibrate(session, lambda: reduced(mesh, values))
            assert lines == []
            for result, seed in zip(before, seeds, strict=True):
                assert torch.equal(result, all_reduce(values, codec, mesh.get_group(), seed=seed))
            with session.scope(is_new_step=True):
                after = reduced(mesh, values)
                again = reduced(mesh, values.transpose(0, 1)).transpose(0, 1)  # not contiguous
        squares = sum(values_of(rank, 4, 16).double().square().sum((0, 1)) for rank in range(2))
        order = torch.argsort(squares, descending=True)  # type: ignore[arg-type]
        expected = torch.empty_like(after)
        expected[..., order] = all_reduce(values[..., order], codec, mesh.get_group(), seed=seeds[-1])
        assert torch.equal(after, expected)
        assert codec.rounding == "stochastic" or torch.equal(again, after)
        assert len(set(seeds)) == CALIBRATION_STEPS + 1
        assert len(lines) == 1
        assert "sorted by size from now on at 1 site(s), where a channel was" in lines[0]
        for result in (*before, after):
            assert all(torch.equal(result, other) for other in of_all_ranks(result))
        pairs = [(error_of_tensor(each, truth), error_of_channels(each, truth)) for each in (before[0], after)]
        return (pairs[0][0], pairs[1][0], pairs[0][1], pairs[1][1])

    def check_all_kinds(mesh: DeviceMesh) -> None:
        """Whatever the dims, values stay at their places; an order is used unless the last dim is cut or joined."""
        values = values_of(dist.get_rank(), 4, 16)
        moves: dict[str, tuple[Placement, Placement, bool]] = {
            "reduce_scatter": (Partial(), Shard(1), True),
            "reduce_scatter, last dim": (Partial(), Shard(2), False),
            "all_gather": (Shard(1), Replicate(), True),
            "all_gather, last dim": (Shard(2), Replicate(), False),
            "all_to_all": (Shard(0), Shard(1), True),
            "all_to_all, to the last dim": (Shard(0), Shard(2), False),
            "all_to_all, from the last dim": (Shard(2), Shard(0), False),
        }
        exact = {name: moved(mesh, values, source, target) for name, (source, target, _) in moves.items()}
        for name, (source, target, has_order) in moves.items():
            with installed_session(mesh, settings(CALIBRATED)) as session:
                (before, *_) = calibrate(session, lambda: moved(mesh, values, source, target))  # noqa: B023
                with session.scope(is_new_step=True):
                    after = moved(mesh, values, source, target)
                assert session.channel_orders is not None
                assert len(session.channel_orders.orders) == int(has_order), name
                assert torch.equal(before, after) != has_order, name
                assert error_of_tensor(after, exact[name]) < 0.02, name
                if has_order:
                    assert error_of_channels(after, exact[name]) < error_of_channels(before, exact[name]) / 3, name

    def check_block_size(mesh: DeviceMesh) -> None:
        lines: list[str] = []
        values = values_of(dist.get_rank(), 4)[:, :80].contiguous()
        with installed_session(mesh, settings(CALIBRATED)):
            session = CompressionSession(settings(CALIBRATED), mesh.get_group(), inform=lines.append)
            before, *_ = calibrate(session, lambda: reduced(mesh, values))
            for _ in range(2):
                with session.scope(is_new_step=True):
                    assert torch.equal(reduced(mesh, values), before)
        assert lines == [
            "lightning_taco: channels are sorted by size from now on at 0 site(s); natural order stays at 1 (80 "
            "channels are no multiple of block_size=32)"
        ]

    def body(rank: int) -> dict[str, tuple[float, float, float, float]]:
        mesh = tensor_parallel_mesh()
        codecs = {"rotated": CALIBRATED, "not rotated": replace(CALIBRATED, rotation=False), "stochastic": STOCHASTIC}
        errors = {name: check_use(mesh, codec) for name, codec in codecs.items()}
        check_all_kinds(mesh)
        check_block_size(mesh)
        return errors

    errors, others = run_forked(2, body)
    assert errors == others
    for tensor_before, tensor_after, channels_before, channels_after in errors.values():
        assert channels_after < channels_before / 3
        assert tensor_after < 1.3 * tensor_before  # ruled by the largest channels, which gain nothing
    before, after, *_ = errors["not rotated"]
    assert after < before  # fewer blocks have the large step of a large channel


def test_what_the_ranks_look_at() -> None:
    """A NaN, validation and recomputed forwards in the calibration; the sampled error is that of what is sent."""

    def check_nan(mesh: DeviceMesh) -> None:
        """On one rank, in one step, at one of two sites: that site keeps its order, on both ranks."""
        lines: list[str] = []
        values = values_of(dist.get_rank(), 8)
        poisoned = values.clone()
        poisoned[3, 7] = math.nan if dist.get_rank() == 0 else 1.0
        with installed_session(mesh, settings(CALIBRATED)):
            session = CompressionSession(settings(CALIBRATED), mesh.get_group(), inform=lines.append)
            for step in range(CALIBRATION_STEPS):
                with session.scope(is_new_step=True):
                    reduced(mesh, poisoned if step == 1 else values)
                    plain = moved(mesh, values, Partial(), Shard(0))
            with session.scope(is_new_step=True):
                assert torch.equal(reduced(mesh, values), all_reduce(values, NATURAL, mesh.get_group()))
                assert not torch.equal(moved(mesh, values, Partial(), Shard(0)), plain)
        assert session.channel_orders is not None
        assert list(session.channel_orders.orders) == [OrderKey("", "forward", "reduce_scatter", CHANNELS)]
        assert len(lines) == 1
        assert lines[0].endswith("natural order stays at 1 (values were NaN or Inf)")

    def check_validation_and_recompute(mesh: DeviceMesh) -> None:
        """Neither has a say: they show channels of the opposite sizes, many times larger."""
        values = values_of(dist.get_rank(), 8)
        exchange = Exchange(kind="all_reduce", tensor=1000 / values)
        recompute = Site("", "forward", True)
        with installed_session(mesh, settings(CALIBRATED)) as session:
            assert session.channel_orders is not None
            for _ in range(CALIBRATION_STEPS):
                with session.scope(is_new_step=True):
                    reduced(mesh, values)
                    session.channel_orders.order_for(exchange, recompute, CALIBRATED, is_training=True)
                with session.scope():
                    reduced(mesh, 1000 / values)
            with session.scope(is_new_step=True):
                pass
            (order,) = session.channel_orders.orders.values()
        squares = sum(values_of(rank, 8).double().square().sum(0) for rank in range(2))
        assert torch.equal(order.indices, torch.argsort(squares, descending=True))  # type: ignore[arg-type]

    def check_observers(mesh: DeviceMesh) -> None:
        values = values_of(dist.get_rank(), 8)
        with installed_session(mesh, settings(CALIBRATED)) as session:
            calibrate(session, lambda: reduced(mesh, values))
            seen: list[Tensor] = []
            sampler = ReconstructionErrors()
            session.observers += [lambda exchange, *_: seen.append(exchange.tensor), sampler]
            with session.scope(is_new_step=True):
                reduced(mesh, values)
            assert session.channel_orders is not None
            (order,) = session.channel_orders.orders.values()
            errors = sampler.read(mesh.get_group())
        assert torch.equal(seen[0], values[:, order.indices])
        flat = values[:, order.indices].reshape(1, -1)
        error = decode(encode(flat, NATURAL), NATURAL, flat.numel(), torch.float32) - flat
        sums = torch.stack([error.double().square().sum(), flat.double().square().sum()])
        dist.all_reduce(sums)
        expected = (sums[0] / sums[1]).sqrt().item()
        assert errors[ErrorKey("", "forward", "all_reduce")].relative_l2_error == pytest.approx(expected, rel=1e-6)

    def check_no_op(mesh: DeviceMesh) -> None:
        """Without a codec that asks for it nothing of it exists."""

        def fail(*_: Any, **__: Any) -> None:
            raise AssertionError("used without being asked for")

        original = channel_order.ChannelOrders.__init__, Tensor.index_select
        channel_order.ChannelOrders.__init__ = Tensor.index_select = fail  # type: ignore[method-assign,assignment]
        try:
            with installed_session(mesh, settings(NATURAL)) as session:
                for _ in range(CALIBRATION_STEPS + 1):
                    with session.scope(is_new_step=True):
                        reduced(mesh, values_of(0, 2))
                assert session.channel_orders is None
                assert session.state_dict()["channel_orders"] is None
        finally:
            channel_order.ChannelOrders.__init__, Tensor.index_select = original  # type: ignore[method-assign]

    def body(rank: int) -> None:
        mesh = tensor_parallel_mesh()
        for check in (check_nan, check_validation_and_recompute, check_observers, check_no_op):
            check(mesh)

    run_forked(2, body)


def test_recomputed_forwards_have_the_order_of_the_first() -> None:
    """Loss and gradients with checkpointing are those without, to the last bit, in every step around the switch."""

    def run(checkpointing: str | None) -> tuple[list[Any], set[OrderKey]]:
        mesh = tensor_parallel_mesh()
        model = make_model(mesh, sequence_parallel=True)
        for block in model.blocks:
            block.checkpointing, block.dropout.p = checkpointing, 0.0
        results = []
        with installed_session(mesh, COMPRESSION, model) as session:
            for step in range(CALIBRATION_STEPS + 2):
                results.append(train_step(model, make_tokens().roll(step, 1), session))
            assert session.channel_orders is not None
            return results, set(session.channel_orders.orders)

    def body(rank: int) -> set[OrderKey]:
        expected, keys = run(None)
        for checkpointing in ("non-reentrant", "reentrant"):
            found, found_keys = run(checkpointing)
            assert found_keys == keys
            for step, ((loss, gradients), (other_loss, others)) in enumerate(zip(found, expected, strict=True)):
                assert torch.equal(loss, other_loss), (checkpointing, step)
                assert all(map(torch.equal, gradients, others)), (checkpointing, step)
        return keys

    keys, *_ = run_forked(2, body)
    assert OrderKey("blocks.0.mlp.down", "forward", "reduce_scatter", HIDDEN) in keys
    assert OrderKey("blocks.1.mlp", "backward", "reduce_scatter", HIDDEN) in keys
    assert {key.num_channels for key in keys} == {HIDDEN}  # not the logits: 50 channels, gathered along them


def test_a_forward_that_is_computed_again_within_backward_begins_no_step() -> None:
    def body(rank: int) -> None:
        with installed_session(tensor_parallel_mesh(), settings(CALIBRATED)) as session:
            leaf = torch.ones(1, requires_grad=True)

            def recompute(gradient: Tensor) -> None:
                with session.scope(is_new_step=True):
                    steps.append(session.step)

            steps: list[int] = []
            with session.scope(is_new_step=True):
                output = leaf * 2
                output.register_hook(recompute)
            with session.scope():
                output.backward()
            assert steps == [1]

    run_forked(1, body)


@pytest.mark.usefixtures("compiler_is_loaded")
def test_compiled_exchanges_keep_the_natural_order_and_it_is_said_once() -> None:
    def body(rank: int) -> None:
        mesh = tensor_parallel_mesh()
        torch.manual_seed(0)
        mlp = parallelize_module(Mlp(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        inputs = torch.randn(2, 8, HIDDEN, generator=torch.Generator().manual_seed(0))
        with installed_session(mesh, settings(NATURAL)) as session, session.scope(is_new_step=True):
            expected = mlp(inputs)
        compiled = torch.compile(mlp, backend="aot_eager")
        warnings: list[str] = []
        session = CompressionSession(settings(CALIBRATED), mesh.get_group(), warn=warnings.append)
        session.observers.append(lambda exchange, site, codec: codecs.add(codec))
        codecs: set[CodecConfig] = set()
        with installed_session(mesh):
            for _ in range(CALIBRATION_STEPS + 1):
                with session.scope(is_new_step=True):
                    output = compiled(inputs)
                    output.square().sum().backward()
                assert torch.equal(output, expected)
        assert session.channel_orders is not None
        assert session.channel_orders.orders == {}
        assert codecs == {NATURAL}
        assert warnings == [
            "reshape='calibrated' is not available under torch.compile: compiled exchanges go in natural channel order."
        ]

    run_forked(2, body)


def test_replicas_take_the_orders_of_the_first() -> None:
    """Two by two ranks with different data: one checkpoint fits all ranks, before and after the switch."""

    def body(rank: int) -> Any:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data_parallel", "tensor_parallel"))
        axis = mesh["tensor_parallel"]
        group, replicas = axis.get_group(), mesh["data_parallel"].get_group()
        values = values_of(rank, 8) if rank < 2 else values_of(rank, 8).flip(1)
        states = []
        with installed_session(axis, settings(CALIBRATED)):
            session = CompressionSession(settings(CALIBRATED), group, replicas=replicas)
            for _ in range(CALIBRATION_STEPS + 1):
                with session.scope(is_new_step=True):
                    reduced(axis, values)
                    if rank >= 2:
                        moved(axis, values, Partial(), Shard(0))  # of which the first replica knows nothing
                states.append(session.state_dict())
        return [(state["channel_orders"]["sums"], state["channel_orders"]["orders"]) for state in states]

    first, *others = run_forked(4, body)
    squares = [values_of(rank, 8).double().square().sum(0) for rank in range(2)]
    key = f"/forward/all_reduce/{CHANNELS}"
    torch.testing.assert_close(first[0][0][key], torch.stack(squares))
    assert first[-1][0] == {}
    assert torch.equal(first[-1][1][key].long(), torch.argsort(squares[0] + squares[1], descending=True))
    for other in others:
        for (sums, orders), (expected_sums, expected_orders) in zip(other, first, strict=True):
            assert sums.keys() == expected_sums.keys()
            assert orders.keys() == expected_orders.keys()
            assert all(torch.equal(sums[name], expected_sums[name]) for name in sums)
            assert all(torch.equal(orders[name], expected_orders[name]) for name in orders)


# --- the state of a session


def test_state_goes_on_at_any_size_and_says_what_it_drops() -> None:
    def state_of(num_steps: int) -> dict[str, Any]:
        mesh = tensor_parallel_mesh()
        values = values_of(dist.get_rank(), 8)
        with installed_session(mesh, settings(CALIBRATED)) as session:
            for _ in range(num_steps):
                with session.scope(is_new_step=True):
                    reduced(mesh, values)
            return session.state_dict()

    def save(rank: int) -> list[dict[str, Any]]:
        return [state_of(2), state_of(CALIBRATION_STEPS + 1)]

    (calibrating, calibrated), other = run_forked(2, save)
    assert str(calibrating) == str(other[0])
    assert str(calibrated) == str(other[1])
    assert calibrated["step"] == CALIBRATION_STEPS + 1
    key = f"/forward/all_reduce/{CHANNELS}"
    order = calibrated["channel_orders"]["orders"][key]
    squares = sum(values_of(rank, 8).double().square().sum(0) for rank in range(2))
    assert torch.equal(order.long(), torch.argsort(squares, descending=True))  # type: ignore[arg-type]

    def loaded(state: dict[str, Any], codec: CodecConfig) -> tuple[CompressionSession, list[str], list[str]]:
        lines: list[str] = []
        warnings: list[str] = []
        session = CompressionSession(settings(codec), dist.group.WORLD, inform=lines.append, warn=warnings.append)  # type: ignore[arg-type]
        session.load_state_dict(state)
        return session, lines, warnings

    def load(rank: int) -> None:
        mesh = tensor_parallel_mesh()
        session, lines, warnings = loaded(calibrated, CALIBRATED)
        assert lines == warnings == []
        assert session.step == CALIBRATION_STEPS + 1
        assert str(session.state_dict()) == str(calibrated)
        # in the midst of the calibration: two steps are left, and the sums that count are those of the old ranks
        session, _, _ = loaded(calibrating, CALIBRATED)
        with installed_session(mesh, settings(CALIBRATED)):
            for _ in range(3):
                with session.scope(is_new_step=True):
                    reduced(mesh, 1e-9 * values_of(rank, 2))
        assert torch.equal(session.state_dict()["channel_orders"]["orders"][key], order)
        # other codecs
        session, lines, warnings = loaded(calibrated, NATURAL)
        assert session.step == CALIBRATION_STEPS + 1
        assert lines == []
        assert len(warnings) == 1
        assert (
            "forward was 'int8, block 32, Hadamard, calibrated channel order', now 'int8, block 32, Hadam"
            in warnings[0]
        )
        _, lines, _ = loaded(calibrated, replace(CALIBRATED, block_size=256))
        assert len(lines) == 1
        assert "1 channel order(s) of the checkpoint do not fit the block size and are dropped" in lines[0]
        # a model of another width
        wider = torch.randn(4, 2 * CHANNELS)
        session, lines, _ = loaded(calibrated, CALIBRATED)
        with installed_session(mesh, settings(CALIBRATED)):
            for _ in range(2):
                with session.scope(is_new_step=True):
                    reduced(mesh, wider)
        assert session.channel_orders is not None
        assert session.channel_orders.orders == {}
        assert len(lines) == 1
        assert f"dropped, such as {CHANNELS} channels of (outside any module), forward all_reduce" in lines[0]

    run_forked(3, load)


# --- checkpoints of the Trainer


@contextmanager
def wide_models() -> Iterator[None]:
    """`lightning_models` with two blocks of channels."""
    previous, lightning_models.HIDDEN = lightning_models.HIDDEN, 2 * BLOCK
    try:
        yield
    finally:
        lightning_models.HIDDEN = previous


def fit(
    strategy: TacoTPStrategy | ModelParallelStrategy,
    folder: Path | None = None,
    resume_from: Path | None = None,
    max_steps: int = 7,
) -> TinyModule:
    """Fit a `TinyModule` in epochs of two steps, with a checkpoint after each: ``step=2.ckpt`` first."""
    saver = ModelCheckpoint(folder, filename="{step}", save_top_k=-1)
    trainer = make_trainer(
        strategy,
        max_epochs=10,
        max_steps=max_steps,
        limit_val_batches=1,
        callbacks=[] if folder is None else [saver],
        enable_checkpointing=folder is not None,
    )
    module = TinyModule()
    data = tiny_dataloader(num_samples=8)
    trainer.fit(module, data, data, ckpt_path=None if resume_from is None else str(resume_from))
    return module


@pytest.mark.usefixtures("warm_lightning")
def test_resumed_trainer_run_is_the_unbroken_run_bit_for_bit(tmp_path: Path) -> None:
    """Stochastic rounding and calibrated order, broken in the calibration, at its end and after it; both formats."""
    calibrating, at_switch, in_use = (f"step={step}.ckpt" for step in (2, 4, 6))

    def strategy(is_distributed: bool, compression: Any = COMPRESSION) -> TacoTPStrategy:
        return TacoTPStrategy(compression, save_distributed_checkpoint=is_distributed)

    def check_resume(is_distributed: bool, names: tuple[str, ...]) -> None:
        folder = tmp_path / str(is_distributed)
        unbroken = fit(strategy(is_distributed), folder)
        weights = full_weights(unbroken)
        for name in names:
            with captured_messages() as messages:
                resumed = fit(strategy(is_distributed), resume_from=folder / name)
            assert resumed.losses == unbroken.losses[int(name[5]) :], name
            assert all(torch.equal(weights[key], value) for key, value in full_weights(resumed).items()), name
            sorted_now = [line for line in messages if "sorted by size from now on" in line]
            assert len(sorted_now) == (0 if name == in_use or dist.get_rank() else 1), name
            assert not any("written with" in line for line in messages)

    def check_others(rank: int) -> None:
        """Other settings, none at all, Lightning's own strategy, and a checkpoint without the state."""
        path = tmp_path / "True" / in_use
        with captured_messages() as messages:
            fit(strategy(True, settings(NATURAL)), resume_from=path)
            fit(strategy(True, None), resume_from=path)
        texts = [line for line in messages if "checkpoint was written with" in line]
        if rank == 0:
            assert len(texts) == 2
            assert "stochastic rounding, calibrated channel order', now 'int8, block 32, Hadamard'" in texts[0]
            assert texts[1].endswith("but compression is off now.")
        for is_distributed, name in ((True, in_use), (False, at_switch)):
            path = tmp_path / str(is_distributed) / name
            stock = ModelParallelStrategy(save_distributed_checkpoint=is_distributed)
            assert len(fit(stock, tmp_path / "stock", resume_from=path).losses) == 7 - int(name[5])
        # and back: step 6 of Lightning's own strategy
        with captured_messages() as messages:
            assert len(fit(strategy(False), resume_from=tmp_path / "stock" / in_use).losses) == 1
        assert not any("written with" in line for line in messages)

    def body(rank: int) -> None:
        check_resume(True, (calibrating, in_use))
        check_resume(False, (at_switch,))
        check_others(rank)

    with wide_models():
        run_forked(2, body)
    state = torch.load(tmp_path / "True" / in_use / "meta.pt", weights_only=True)["lightning_taco"]
    assert state["step"] == 6
    assert set(state["channel_orders"]["orders"]) == {
        f"model.mlp.down/forward/all_reduce/{2 * BLOCK}",
        f"model.mlp.up/backward/all_reduce/{2 * BLOCK}",
    }
    state = torch.load(tmp_path / "False" / at_switch, weights_only=True)["lightning_taco"]
    assert state["channel_orders"]["num_steps"] == CALIBRATION_STEPS
    assert {rows.shape for rows in state["channel_orders"]["sums"].values()} == {(2, 2 * BLOCK)}


@pytest.mark.usefixtures("warm_lightning")
def test_a_checkpoint_that_is_saved_after_the_fit_has_the_state(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        module = fit(TacoTPStrategy(COMPRESSION, save_distributed_checkpoint=False), max_steps=5)
        assert isinstance(module.trainer, L.Trainer)
        module.trainer.validate(module, tiny_dataloader(), verbose=False)
        module.trainer.save_checkpoint(tmp_path / "last.ckpt")

    with wide_models():
        run_forked(2, body)
    state = torch.load(tmp_path / "last.ckpt", weights_only=True)["lightning_taco"]
    assert state["step"] == 5
    assert len(state["channel_orders"]["orders"]) == 2


# --- checkpoints of Fabric


def test_resumed_fabric_run_is_the_unbroken_run_bit_for_bit(tmp_path: Path) -> None:
    def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        return parallelize_module(model, mesh["tensor_parallel"], make_plan(2, sequence_parallel=False))

    def set_up(strategy: Any) -> tuple[Fabric, Any, Any]:
        fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
        fabric.launch()
        torch.manual_seed(0)
        model = TinyLm()
        module = fabric.setup_module(model)
        for block in model.blocks:
            block.dropout.p = 0.0
        optimizer = fabric.setup_optimizers(torch.optim.AdamW(module.parameters(), lr=1e-2, foreach=False))
        return fabric, module, optimizer

    def train(fabric: Fabric, module: Any, optimizer: Any, steps: range) -> list[float]:
        losses = []
        for step in steps:
            loss = loss_of(module, make_tokens().roll(step, 1))
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def body(rank: int) -> None:
        for is_distributed in (True, False):

            def strategy(cls: Any = lightning_taco.fabric.TacoTPStrategy, **extra: Any) -> Any:
                return cls(parallelize, save_distributed_checkpoint=is_distributed, **extra)  # noqa: B023

            taco = {"compression": COMPRESSION}
            fabric, module, optimizer = set_up(strategy(**taco))
            state = {"model": module, "optimizer": optimizer, "epoch": 3}
            losses, paths = [], {}
            for step in range(7):
                if step in (3, 6):
                    paths[step] = tmp_path / f"{is_distributed} {step}"
                    fabric.save(paths[step], state)
                losses += train(fabric, module, optimizer, range(step, step + 1))
            assert set(state) == {"model", "optimizer", "epoch"}
            expected = [local(parameter).clone() for parameter in module.parameters()]
            fabric.strategy.teardown()
            for step, path in paths.items():
                fabric, module, optimizer = set_up(strategy(**taco))
                state = {"model": module, "optimizer": optimizer, "epoch": 0}
                assert fabric.load(path, state) == {}
                assert state["epoch"] == 3
                assert train(fabric, module, optimizer, range(step, 7)) == losses[step:]
                found = [local(parameter) for parameter in module.parameters()]
                assert all(map(torch.equal, found, expected)), (is_distributed, step)
                fabric.strategy.teardown()
            fabric, module, optimizer = set_up(strategy(FabricModelParallelStrategy))
            remainder = fabric.load(paths[6], {"model": module, "optimizer": optimizer})
            assert remainder["lightning_taco"]["step"] == 6

    run_forked(2, body)
