"""Real GPUs and NCCL: the bits of the CPU oracle, lifetimes of buffers, no wait on the host.

Every rank runs the whole file in lockstep:

    torchrun --nproc-per-node 2 -m pytest tests/test_multigpu.py -m multigpu

With two ranks an all-reduce is one-shot; run it on four for the two-shot one.
"""

import os
import random
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from lightning_taco.collectives import all_gather, all_reduce, all_to_all, reduce_scatter
from lightning_taco.config import CodecConfig, CompressionConfig
from tests.models import installed_session, make_model, make_tokens, tensor_parallel_mesh, train_step
from tests.test_collectives import (
    CODECS,
    assert_same_bits,
    expected_all_gather,
    expected_all_reduce,
    expected_all_to_all,
    expected_reduce_scatter,
    rank_inputs,
    shard_of,
)
from tests.test_sites import (
    PLAIN_BACKWARD,
    PLAIN_FORWARD,
    SEQUENCE_BACKWARD,
    SEQUENCE_FORWARD,
    exchanges,
)

LAUNCHED = "LOCAL_RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1
pytestmark = [
    pytest.mark.multigpu,
    pytest.mark.skipif(
        not LAUNCHED or torch.cuda.device_count() < 2, reason="needs torchrun and two CUDA devices; see the file's head"
    ),
]

E4M3 = CodecConfig(element="e4m3", block_size=128)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
NUM_STEPS = 200
SIDE = 4096


@pytest.fixture(scope="module", autouse=True)
def nccl() -> Iterator[None]:
    """The default process group, one GPU a rank; a rank that fails alone ends its peers after two minutes."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    torch.set_num_threads(8)  # of the oracle
    dist.init_process_group("nccl", device_id=device, timeout=timedelta(seconds=120))
    yield
    torch.cuda.synchronize()
    dist.destroy_process_group()


@pytest.fixture
def group() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


@pytest.fixture(scope="module")
def mesh(nccl: None) -> DeviceMesh:
    return tensor_parallel_mesh("cuda")


def assert_equals_oracle(found: Tensor, expected: Tensor) -> None:
    """The same bits; of a NaN, any."""
    found = found.cpu()
    assert torch.equal(found.isnan(), expected.isnan())
    assert_same_bits(found.nan_to_num(nan=0.0), expected.nan_to_num(nan=0.0))


def check_against_oracle(
    group: dist.ProcessGroup,
    everyone: list[Tensor],
    codec: CodecConfig,
    dim: int,
    ops: tuple[Literal["sum", "avg"], ...] = ("sum", "avg"),
) -> None:
    """All four collectives on the GPU, against the reference on the CPU; `everyone` is the same on all ranks."""
    world, rank = group.size(), group.rank()
    mine, full = everyone[rank].cuda(), everyone[0]
    for op in ops:
        assert_equals_oracle(all_reduce(mine, codec, group, op=op), expected_all_reduce(everyone, codec, op))
        shard = reduce_scatter(mine, codec, group, dim=dim, op=op)
        assert_equals_oracle(shard, expected_reduce_scatter(everyone, codec, op, dim, rank))
    own = shard_of(full, world, rank, dim).cuda()
    gathered = all_gather(own, codec, group, dim=dim, full_size=full.shape[dim])
    assert_equals_oracle(gathered, expected_all_gather(full, world, codec, dim))
    if full.dim() > 1 and full.shape[dim] % world == 0:
        other = (dim + 1) % full.dim()
        moved = all_to_all(mine, codec, group, gather_dim=other, scatter_dim=dim)
        assert_equals_oracle(moved, expected_all_to_all(everyone, codec, other, dim, rank))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("codec", [*CODECS, E4M3, CodecConfig(element="e4m3", block_size=512)], ids=str)
def test_collectives_equal_the_cpu_reference(group: dist.ProcessGroup, codec: CodecConfig, dtype: torch.dtype) -> None:
    shapes = (
        ((64, 256), 0),
        ((64, 256), 1),
        ((13, 7, 33), 0),
        ((13, 7, 33), -1),
        ((1, 1), 0),
        ((3, 129), 1),
        ((1000,), 0),
    )
    for seed, (shape, dim) in enumerate(shapes):
        check_against_oracle(group, rank_inputs(group.size(), shape, dtype, seed), codec, dim)


@pytest.mark.parametrize("codec", [E4M3, CodecConfig(element="int8", block_size=128)], ids=str)
@pytest.mark.parametrize(("shape", "dim"), [((1024, 1024), 0), ((2047, 1025), 1), ((4096, 8192), 0)])
def test_large_collectives_equal_the_cpu_reference(
    group: dist.ProcessGroup, shape: tuple[int, int], dim: int, codec: CodecConfig
) -> None:
    """Up to 64 MB of bf16."""
    generator = torch.Generator().manual_seed(11)
    everyone = [torch.randn(*shape, generator=generator).bfloat16() for _ in range(group.size())]
    check_against_oracle(group, everyone, codec, dim, ops=("sum",))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_non_finite_equals_the_cpu_reference(group: dist.ProcessGroup, codec: CodecConfig, bad: float) -> None:
    for dtype in DTYPES:
        everyone = rank_inputs(group.size(), (24, 96), dtype)
        everyone[-1][7, 50] = bad
        everyone[0][23, 95] = bad
        check_against_oracle(group, everyone, codec, 0)


@pytest.mark.parametrize("size", [0.0, 1e-30, 1e30])
def test_zeros_and_extremes_equal_the_cpu_reference(group: dist.ProcessGroup, size: float) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        for codec in CODECS:
            generator = torch.Generator().manual_seed(4)
            everyone = [
                (torch.randn(24, 96, generator=generator).double() * size).to(dtype) for _ in range(group.size())
            ]
            check_against_oracle(group, everyone, codec, 0)


def test_strided_input_equals_the_cpu_reference(group: dist.ProcessGroup) -> None:
    everyone = rank_inputs(group.size(), (48, 40), torch.bfloat16)
    for view in (lambda tensor: tensor.t(), lambda tensor: tensor[:, ::2], lambda tensor: tensor[1:, 1:]):
        dense = [view(tensor).contiguous() for tensor in everyone]
        strided = view(everyone[group.rank()].cuda())
        assert not strided.is_contiguous()
        assert_equals_oracle(all_reduce(strided, E4M3, group), expected_all_reduce(dense, E4M3, "sum"))
        shard = reduce_scatter(strided, E4M3, group)
        assert_equals_oracle(shard, expected_reduce_scatter(dense, E4M3, "sum", 0, group.rank()))


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_model_is_compressed_in_forward_and_in_autograds_own_thread(
    mesh: DeviceMesh, sequence_parallel: bool
) -> None:
    model = make_model(mesh, sequence_parallel=sequence_parallel).eval()
    tokens = make_tokens().cuda()
    stock_loss, stock_gradients = train_step(model, tokens)
    with installed_session(mesh, CompressionConfig(min_bytes=0), model) as session:
        losses, all_gradients = [], []
        for _ in range(3):
            loss, gradients = train_step(model, tokens, session)
            losses.append(loss)
            all_gradients.append(gradients)
            forward, backward = exchanges(session)
            assert forward == (SEQUENCE_FORWARD if sequence_parallel else PLAIN_FORWARD)
            assert backward == (SEQUENCE_BACKWARD if sequence_parallel else PLAIN_BACKWARD)
        outside_loss, _ = train_step(model, tokens)
        assert session.traffic.counts == {}
    assert 0 < abs(losses[0] - stock_loss).item() < 0.02 * stock_loss.item()
    assert abs(outside_loss - stock_loss).item() < 1e-5 * stock_loss.item()
    assert torch.equal(losses[0], losses[2])
    for found, truth in zip(all_gradients[0], stock_gradients, strict=True):
        assert found.isfinite().all()
        assert (found - truth).norm() < 0.4 * truth.norm()
    everyones = [torch.empty_like(losses[0]) for _ in range(mesh.size())]
    dist.all_gather(everyones, losses[0])
    assert all(torch.equal(theirs, everyones[0]) for theirs in everyones)


def redistributions(mesh: DeviceMesh) -> dict[str, Callable[[], Tensor]]:
    """What a large layer redistributes, in forward and backward, over [SIDE, SIDE] bf16 of known values."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    mine = torch.randn(SIDE, SIDE, generator=generator).bfloat16().cuda()
    rows = mine[: SIDE // mesh.size()].clone()

    def forward(local: Tensor, source: Partial | Shard, target: Replicate | Shard) -> Tensor:
        return DTensor.from_local(local, mesh, [source], run_check=False).redistribute(placements=[target]).to_local()

    def forward_and_backward() -> Tensor:
        leaf = rows.clone().requires_grad_()
        first = DTensor.from_local(leaf, mesh, [Shard(0)], run_check=False).redistribute(placements=[Replicate()])
        whole = first.to_local(grad_placements=[Partial()])
        (whole * mine).backward(mine)  # two consecutive exchanges, one of them in autograd's thread
        assert leaf.grad is not None
        return leaf.grad

    return {
        "all_reduce": lambda: forward(mine, Partial(), Replicate()),
        "reduce_scatter": lambda: forward(mine, Partial(), Shard(0)),
        "reduce_scatter along the last dim": lambda: forward(mine, Partial(), Shard(1)),
        "all_gather": lambda: forward(rows, Shard(0), Replicate()),
        "all_to_all": lambda: forward(rows, Shard(0), Shard(1)),
        "forward and backward": forward_and_backward,
    }


def test_200_steps_with_a_busy_allocator_give_the_same_values_in_flat_memory(mesh: DeviceMesh) -> None:
    churn = random.Random(dist.get_rank())  # ranks differ in it, as they do in life
    with installed_session(mesh, CompressionConfig(min_bytes=0)) as session, session.scope():
        runs = redistributions(mesh)
        first = {name: run() for name, run in runs.items()}
        torch.cuda.synchronize()
        num_wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        allocated_bytes = []
        for _ in range(NUM_STEPS):
            for name, run in runs.items():
                junk = [
                    torch.full((churn.randrange(1, 1 << 22),), torch.nan, device="cuda")
                    for _ in range(churn.randrange(4))
                ]
                result = run()
                del junk  # while the exchange still runs: whoever takes that memory next gets NaN in it
                more_junk = torch.full((churn.randrange(1, 1 << 24),), torch.nan, device="cuda")
                num_wrong += (result != first[name]).sum()
                del result, more_junk
            allocated_bytes.append(torch.cuda.memory_allocated())
        torch.cuda.synchronize()
        assert num_wrong.item() == 0
        assert max(allocated_bytes[3:]) <= allocated_bytes[2], allocated_bytes
        assert session.traffic.stock_reasons() == {}


def test_no_exchange_waits_on_the_host(mesh: DeviceMesh, group: dist.ProcessGroup) -> None:
    odd = torch.randn(515, 130, device="cuda", dtype=torch.bfloat16)
    even = torch.randn(512, 128, device="cuda", dtype=torch.bfloat16)
    strided = torch.randn(130, 515, device="cuda").t()
    own = shard_of(odd, group.size(), group.rank(), 0).contiguous()

    def collectives() -> list[Tensor]:
        results = []
        for codec in CODECS:
            results += [all_reduce(tensor, codec, group) for tensor in (odd, even, strided)]
            results += [reduce_scatter(tensor, codec, group, dim=dim) for tensor in (odd, strided) for dim in (0, 1)]
            results.append(all_gather(own, codec, group, full_size=odd.shape[0]))
            results.append(all_to_all(even, codec, group, gather_dim=1, scatter_dim=0))
        return results

    with installed_session(mesh, CompressionConfig(min_bytes=0)) as session, session.scope():
        runs = redistributions(mesh)
        for _ in range(2):  # warm up: kernels are compiled, NCCL connects
            collectives()
            for run in runs.values():
                run()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            kept = collectives()
            kept += [run() for run in runs.values()]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        assert all(tensor.isfinite().all() for tensor in kept)


def test_work_on_another_stream_is_ordered(mesh: DeviceMesh, group: dist.ProcessGroup) -> None:
    """Everything of an exchange is on the current stream, whichever it is."""
    values = torch.randn(2048, 2048, device="cuda").bfloat16()
    expected = all_reduce(values, E4M3, group)
    side = torch.cuda.Stream()
    for _ in range(20):
        with torch.cuda.stream(side):
            side.wait_stream(torch.cuda.default_stream())
            late = torch.zeros_like(values)
            torch.cuda._sleep(2_000_000)
            late.copy_(values)
            result = all_reduce(late, E4M3, group)
            wrong = (result != expected).sum()
        torch.cuda.current_stream().wait_stream(side)
        assert wrong.item() == 0


def test_the_result_of_an_asynchronous_stock_exchange_may_go_straight_into_a_compressed_one(mesh: DeviceMesh) -> None:
    """Last in this file: a kernel that is given the address of such a tensor reads from 0 and ends the CUDA context."""
    values = torch.randn(64, 128, device="cuda")
    with installed_session(mesh, CompressionConfig(min_bytes=values.numel() * 4 + 1)) as session, session.scope():
        small = DTensor.from_local(values, mesh, [Partial()], run_check=False)
        pending = small.redistribute(placements=[Replicate()], async_op=True).to_local()
        shard = DTensor.from_local(pending, mesh, [Shard(0)], run_check=False)
        found = shard.redistribute(placements=[Replicate()]).to_local()
        assert session.traffic.total(outcome="compressed").num_messages == 1
    total = values.clone()
    dist.all_reduce(total)
    truth = torch.cat([total] * mesh.size())
    assert (found - truth).norm() < 0.04 * truth.norm()
