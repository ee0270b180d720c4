"""Every way that an exchange can go on real GPUs gives the bits of the plain one: slices, mapped memory, CUDA graphs.

torchrun --nproc-per-node 2 -m pytest tests/test_multigpu_paths.py -m multigpu
"""

import random
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_taco.collectives.algorithms import KINDS, PEER_MEMORY, algorithms_of, exchange
from lightning_taco.collectives.peer_memory import PeerMemory
from lightning_taco.collectives.traffic import Kind
from lightning_taco.config import CodecConfig
from tests.test_codec_reference import assert_same_bits
from tests.test_multigpu import group, nccl, pytestmark  # noqa: F401  fixtures, and when to run

INT8 = CodecConfig(element="int8")
CODECS = [
    INT8,
    CodecConfig(element="e4m3", scale_mode="dual"),
    CodecConfig(element="int4", levels="gaussian", rounding="stochastic"),
]
SHAPES = [
    (8, 512, 1024),
    (4, 6, 33),
    (1, 2, 8),
]  # whole blocks in each segment, blocks across segments, one short block
NUM_STEPS = 100

Path = Callable[[Tensor, int], Tensor]


@pytest.fixture(scope="module")
def memory(nccl: None) -> Iterator[PeerMemory]:  # noqa: F811
    assert dist.group.WORLD is not None
    found, reason = PeerMemory.open(dist.group.WORLD, torch.device("cuda", torch.cuda.current_device()))
    if found is None:
        pytest.skip(f"the GPUs of this machine share no memory: {reason}")
    yield found
    found.close()


def paths_of(kind: Kind, codec: CodecConfig, ranks: dist.ProcessGroup, memory: PeerMemory) -> dict[str, Path]:
    """By name, all that can be chosen for `kind` but the one-shot and the two-shot of the other; plain first."""
    names = algorithms_of(kind, ranks.size(), overlaps=True, has_peer_memory=True)
    if kind == "all_reduce":  # they quantise once and twice, so their bits differ
        names = tuple(name for name in names if name.partition("/")[0] in (names[0], PEER_MEMORY))

    def path(name: str) -> Path:
        more = {"algorithm": name, "memory": memory, "dim": 1, "scatter_dim": 2}
        return lambda tensor, seed: exchange(kind, tensor, codec, ranks, seed=seed, **more)  # type: ignore[arg-type]

    return {name: path(name) for name in names}


def values_of(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    return torch.randn(shape, generator=generator).bfloat16().cuda()


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_every_path_has_the_bits_of_the_plain_one(
    kind: Kind,
    codec: CodecConfig,
    group: dist.ProcessGroup,  # noqa: F811
    memory: PeerMemory,
) -> None:
    for shape in SHAPES:
        if kind in ("all_to_all",) and shape[2] % group.size():
            continue
        values = values_of(shape)
        plain, *others = paths_of(kind, codec, group, memory).items()
        expected = plain[1](values, 7)
        for name, path in others:
            found = path(values, 7)
            assert found.shape == expected.shape, name
            assert_same_bits(found.cpu(), expected.cpu())


def test_non_finite_values_are_loud_on_every_path(group: dist.ProcessGroup, memory: PeerMemory) -> None:  # noqa: F811
    values = values_of((8, 512, 1024))
    if dist.get_rank() == dist.get_world_size() - 1:
        values[3, 100, 200], values[7, 511, 1023] = torch.nan, torch.inf
    for kind in ("all_reduce", "all_gather"):
        for name, path in paths_of(kind, INT8, group, memory).items():
            assert path(values, 0).isnan().sum() == 256, name


def test_a_busy_allocator_harms_no_path(group: dist.ProcessGroup, memory: PeerMemory) -> None:  # noqa: F811
    """Buffers outlive the streams that read them, and memory is flat."""
    churn = random.Random(dist.get_rank())
    runs = {
        (kind, name): (path, values_of((4, 1024, 2048)))
        for kind in KINDS
        for name, path in paths_of(kind, INT8, group, memory).items()
    }
    first = {key: path(values, 0) for key, (path, values) in runs.items()}
    num_wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    allocated_bytes = []
    for _ in range(NUM_STEPS):
        for key, (path, values) in runs.items():
            junk = torch.full((churn.randrange(1, 1 << 22),), torch.nan, device="cuda")
            result = path(values, 0)
            del junk
            more_junk = torch.full((churn.randrange(1, 1 << 23),), torch.nan, device="cuda")
            num_wrong += (result != first[key]).sum()
            del result, more_junk
        allocated_bytes.append(torch.cuda.memory_allocated())
    torch.cuda.synchronize()
    assert num_wrong.item() == 0
    assert max(allocated_bytes[3:]) <= allocated_bytes[2], allocated_bytes


def test_graphs_replayed_in_turn_with_eager_calls(group: dist.ProcessGroup, memory: PeerMemory) -> None:  # noqa: F811
    """A graph of three exchanges: an odd number, so that it leaves mapped memory's halves where it began."""
    shape = (4, 256, 1024)
    inputs = [values_of(shape, seed) for seed in range(4)]
    paths = paths_of("all_reduce", INT8, group, memory)
    expected = [next(iter(paths.values()))(values, 0) for values in inputs]
    for name, path in paths.items():
        static = inputs[0].clone()

        def step(path: Path = path, static: Tensor = static) -> Tensor:
            return path(static, 0) + 0 * path(static * 2, 0) + 0 * path(static * 3, 0)

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
            output = step()
        for turn in range(12):
            place = turn % len(inputs)
            static.copy_(inputs[place])
            graph.replay()
            assert torch.equal(output, expected[place]), (name, turn)
            eager = path(inputs[(turn + 1) % len(inputs)], 0)
            assert torch.equal(eager, expected[(turn + 1) % len(inputs)]), (name, turn)
        del graph, output


def test_no_path_waits_on_the_host(group: dist.ProcessGroup, memory: PeerMemory) -> None:  # noqa: F811
    values = values_of((8, 512, 1024))
    runs = [path for kind in KINDS for path in paths_of(kind, INT8, group, memory).values()]
    for path in runs:
        path(values, 0)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = [path(values, 0) for path in runs]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(result.isfinite().all() for result in results)
