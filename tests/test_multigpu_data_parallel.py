"""Gradients over NCCL, in one piece and in slices: the bits of the same steps on a CPU.

torchrun --nproc-per-node 2 -m pytest tests/test_multigpu_data_parallel.py -m multigpu
"""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_taco.codec import decode_sum, encode
from lightning_taco.data_parallel import DataParallelTraffic, GradientExchange, make_node_groups
from lightning_taco.data_parallel.exchange import INSIDE
from lightning_taco.data_parallel.seeds import derived_seed
from lightning_taco.data_parallel.settings import DataParallelConfig
from lightning_taco.data_parallel.slices import column_slices
from tests.test_codec_reference import assert_same_bits
from tests.test_multigpu import group, nccl, pytestmark  # noqa: F401  fixtures, and when to run

SEED = 5
CONFIG = DataParallelConfig()


def exchange_of(ranks: dist.ProcessGroup, bits: int) -> GradientExchange:
    """All ranks on one node, which takes 8 bits, or each on its own, which takes 4."""
    groups = make_node_groups(ranks, ranks.size() if bits == 8 else 1)
    return GradientExchange(groups, CONFIG.gradients_inside_node, CONFIG.gradients_between_nodes, DataParallelTraffic())


def rows_of(rank: int, num_ranks: int, num_values: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(num_ranks, num_values, generator=generator).to(dtype)


def expected_sum(exchange: GradientExchange, num_values: int, dtype: torch.dtype, num_slices: int | None) -> Tensor:
    """This rank's row of the mean, step by step on the CPU."""
    num_ranks, own, codec = exchange.groups.world_size, exchange.groups.whole.rank(), exchange.first_codec
    result = torch.full((num_values,), torch.nan, dtype=dtype)
    everyone = [rows_of(rank, num_ranks, num_values, dtype) for rank in range(num_ranks)]
    for start, stop in column_slices(everyone[0], codec.block_size, num_slices):
        seeds = [derived_seed(derived_seed(SEED, start), INSIDE, rank) for rank in range(num_ranks)]
        messages = [encode(rows[:, start:stop], codec, seed=seed) for rows, seed in zip(everyone, seeds, strict=True)]
        own_rows = torch.stack([each[own] for each in messages])
        result[start:stop] = decode_sum(own_rows, codec, stop - start, dtype, factor=1 / num_ranks).view(-1)
    return result


@pytest.mark.parametrize(("bits", "dtype"), [(8, torch.bfloat16), (4, torch.float32)], ids=str)
@pytest.mark.parametrize(("num_values", "num_slices"), [(1, None), (70_001, None), (70_001, 3)])
def test_reduce_scatter_has_the_bits_of_the_same_steps_on_a_cpu(
    group: dist.ProcessGroup,  # noqa: F811
    bits: int,
    num_values: int,
    num_slices: int | None,
    dtype: torch.dtype,
) -> None:
    exchange = exchange_of(group, bits)
    rows = rows_of(group.rank(), group.size(), num_values, dtype).cuda()
    out = torch.full((num_values,), torch.nan, dtype=dtype, device="cuda")
    exchange.reduce_scatter(rows, out, factor=1 / group.size(), seed=SEED, num_slices=num_slices)
    assert_same_bits(out.cpu(), expected_sum(exchange, num_values, dtype, num_slices))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("num_slices", [None, 3])
def test_all_reduce_gives_every_rank_the_same_bits(
    group: dist.ProcessGroup,  # noqa: F811
    bits: int,
    num_slices: int | None,
) -> None:
    exchange, num_values = exchange_of(group, bits), 70_001
    values = [rows_of(rank, 1, num_values, torch.float32)[0] for rank in range(group.size())]
    mine, exact = values[group.rank()].cuda(), torch.stack(values).mean(dim=0)
    exchange.all_reduce(mine, mine, factor=1 / group.size(), seed=SEED, num_slices=num_slices)
    gathered = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(gathered, mine, group=group)
    for each in gathered:
        assert_same_bits(each.cpu(), mine.cpu())
    error = ((mine.cpu() - exact).norm() / exact.norm()).item()
    assert error < (0.03 if bits == 8 else 0.27)
