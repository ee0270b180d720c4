"""Exchanges beside the current stream on real GPUs: the bits of those in its order, however busy the allocator is.

torchrun --nproc-per-node 2 -m pytest tests/test_multigpu_overlap.py -m multigpu
"""

import random
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import RowwiseParallel

from lightning_taco import OverlappedRowwiseParallel
from lightning_taco.collectives.peer_memory import PeerMemory
from lightning_taco.config import CodecConfig, CompressionConfig
from tests.models import installed_session
from tests.test_codec_reference import assert_same_bits
from tests.test_multigpu import mesh, nccl, pytestmark  # noqa: F401  fixtures, and when to run
from tests.test_multigpu_paths import memory  # noqa: F401  another
from tests.test_overlap import EVERYTHING, WIDTH, Layer, outcome, same

NUM_STEPS = 100
ASYNCHRONOUS = replace(EVERYTHING, asynchronous=True)
QUEUE_CYCLES = 40_000_000  # some 20 ms
CHANGES = [(Partial(), Replicate()), (Partial(), Shard(1)), (Shard(1), Replicate())]


def redistributed(values: Tensor, mesh: DeviceMesh, change: tuple[Placement, Placement], is_async: bool) -> Tensor:  # noqa: F811
    before, after = change
    given = DTensor.from_local(values, mesh, (before,), run_check=False)
    return given.redistribute(placements=(after,), async_op=is_async)._local_tensor


@pytest.fixture(params=["process group", "mapped memory"])
def way(request: pytest.FixtureRequest) -> PeerMemory | None:
    """Over what exchanges go: what the GPUs have mapped of each other, or ``None``."""
    return request.getfixturevalue("memory") if request.param == "mapped memory" else None


def test_results_on_their_way_have_the_bits_of_those_that_were_waited_for(
    mesh: DeviceMesh,  # noqa: F811
    way: PeerMemory | None,
) -> None:
    churn = random.Random(dist.get_rank())
    stochastic = CodecConfig(element="int4", rounding="stochastic")
    config = CompressionConfig(forward=stochastic, backward=stochastic, min_bytes=0, asynchronous=True)
    values = torch.randn(8, 512, 1024, device="cuda", dtype=torch.bfloat16)
    other = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    with installed_session(mesh, config) as session, session.scope():
        session.memory = way
        expected = [redistributed(values, mesh, change, False) for change in CHANGES]
        num_wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        for _ in range(NUM_STEPS):
            pending = [redistributed(values * 1, mesh, change, True) for change in CHANGES]
            junk = torch.full((churn.randrange(1, 1 << 23),), torch.nan, device="cuda")
            other = (other @ other).clamp(-1, 1)
            mixed = redistributed(values, mesh, CHANGES[0], False)  # in stream order, behind those under way
            del junk
            num_wrong += (mixed != expected[0]).sum()
            for found, wanted in zip(pending, expected, strict=True):
                assert isinstance(found, AsyncCollectiveTensor)
                num_wrong += (found != wanted).sum()
        assert num_wrong.item() == 0


def test_an_exchange_that_nobody_waits_for_runs_beside_the_next_product(mesh: DeviceMesh) -> None:  # noqa: F811
    """The product is launched behind the exchange and does not stand behind it."""
    values = torch.randn(16, 2048, 4096, device="cuda", dtype=torch.bfloat16)
    small = torch.randn(256, 256, device="cuda", dtype=torch.bfloat16)
    with installed_session(mesh, ASYNCHRONOUS) as session, session.scope():
        for is_async in (False, True, True):  # warm
            redistributed(values, mesh, CHANGES[0], is_async) + 0
            small @ small
        torch.cuda.synchronize()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        torch.cuda._sleep(QUEUE_CYCLES)  # until the host has launched all of it
        events[0].record()
        pending = redistributed(values, mesh, CHANGES[0], True)
        small @ small
        events[1].record()
        pending + 0
        events[2].record()
        torch.cuda.synchronize()
    assert events[0].elapsed_time(events[1]) < 0.5 * events[0].elapsed_time(events[2])


def test_a_graph_may_hold_an_exchange_that_is_asked_for_without_waiting(mesh: DeviceMesh) -> None:  # noqa: F811
    values = torch.randn(4, 256, 1024, device="cuda", dtype=torch.bfloat16)
    with installed_session(mesh, ASYNCHRONOUS) as session, session.scope():
        expected = redistributed(values, mesh, CHANGES[0], False)
        redistributed(values, mesh, CHANGES[0], True) + 0
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = redistributed(values, mesh, CHANGES[0], True) + 0
        graph.replay()
        assert_same_bits(result.cpu(), expected.cpu())
        del graph


def test_a_graph_may_hold_sliced_products(mesh: DeviceMesh) -> None:  # noqa: F811
    layer = Layer(OverlappedRowwiseParallel(num_slices=2), mesh, bias=False)
    x = torch.ones(4, 256, WIDTH // dist.get_world_size(), device="cuda")
    with installed_session(mesh, EVERYTHING, layer) as session, session.scope(), torch.no_grad():
        expected = [layer(x), layer(x), redistributed(x, mesh, CHANGES[0], True)][0]
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = layer(x)
        graph.replay()
        assert_same_bits(result.cpu(), expected.cpu())
        assert_same_bits(layer(x).cpu(), expected.cpu())
        del graph


@pytest.mark.parametrize("layout", [Replicate(), Shard(1)], ids=str)
@pytest.mark.parametrize("num_slices", [2, 4])
def test_sliced_products_have_the_bits_of_one_exchange(
    mesh: DeviceMesh,  # noqa: F811
    way: PeerMemory | None,
    num_slices: int,
    layout: Placement,
) -> None:
    generator = torch.Generator().manual_seed(dist.get_rank())
    part = WIDTH // dist.get_world_size()
    x = torch.randint(-4, 5, (4, 1024, part), generator=generator).float().cuda()
    results = []
    for style in (
        RowwiseParallel(output_layouts=layout),
        OverlappedRowwiseParallel(num_slices=num_slices, output_layouts=layout),
    ):
        layer = Layer(style, mesh, bias=False)
        with installed_session(mesh, EVERYTHING, layer) as session:
            session.memory = way
            results += [outcome(layer, session, x) for _ in range(20)]
    assert all(same(found, results[0]) for found in results)
