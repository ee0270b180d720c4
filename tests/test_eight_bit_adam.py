"""QuanGrad beside torchao's 8-bit Adam: the optimizer takes the bits that it would take of all gradients at once.

Compilation, which that optimizer asks for, is left out: it takes a minute on a CPU and changes nothing that is ours.
"""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning_taco.config import CodecConfig
from lightning_taco.data_parallel import quan_grad
from lightning_taco.data_parallel.quan_grad import QuantizedGradients
from lightning_taco.data_parallel.quantized_gradient import like_parameter, local_part, quantized_gradient
from tests.ranks import run_forked

pytestmark = pytest.mark.torchao
WIDTH = 128
KEPT = [
    CodecConfig(element="e4m3", rotation=False, rounding="stochastic"),
    CodecConfig(element="int8", rotation=False),
]


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1))


def train_twins(ours: nn.Module, twin: nn.Module, codec: CodecConfig) -> tuple[list[float], list[bool], Any]:
    """Losses, and after each step whether both have the same weights; the twin gets what the gradients decode to."""
    from torchao.optim import AdamW8bit

    optimizer, other = AdamW8bit(ours.parameters(), lr=1e-2), AdamW8bit(twin.parameters(), lr=1e-2)
    kept = QuantizedGradients(ours.parameters(), codec, seed=0)
    kept.attach(optimizer)
    losses, are_equal = [], []
    rank = dist.get_rank() if dist.is_initialized() else 0
    with torch.compiler.set_stance("force_eager"):
        for step in range(5):
            for part in range(3):
                generator = torch.Generator().manual_seed(100 * step + 10 * part + rank)
                loss = (ours(torch.randn(16, WIDTH, generator=generator)) - 1).square().mean() / 3
                loss.backward()
            losses.append(loss.item())
            for parameter, its_twin in zip(ours.parameters(), twin.parameters(), strict=True):
                assert parameter.grad is None
                gradient = quantized_gradient(parameter)
                assert gradient is not None
                its_twin.grad = like_parameter(its_twin, gradient.read())
            for each in (optimizer, other):
                each.step()
                each.zero_grad()
            are_equal.append(all(map(torch.equal, parts_of(ours), parts_of(twin))))
    kept.detach()
    return losses, are_equal, optimizer


def parts_of(module: nn.Module) -> list[Tensor]:
    return [local_part(parameter).detach() for parameter in module.parameters()]


@pytest.mark.parametrize("codec", KEPT, ids=str)
def test_gradients_few_at_a_time_are_those_of_all_at_once(codec: CodecConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quan_grad, "HAND_OVER_BYTES", 1)  # one parameter after the other
    net = make_net()
    losses, are_equal, optimizer = train_twins(net, copy.deepcopy(net), codec)
    assert are_equal == [True] * 5
    assert losses[-1] < 0.8 * losses[0]
    state = [optimizer.state[parameter] for parameter in net.parameters()]
    assert [each["step"].item() for each in state] == [5.0] * 6
    assert type(state[0]["exp_avg"]).__name__ == "OptimState8bit"  # of a weight of 4,096 values or more


def test_shards_of_fsdp2_have_eight_bit_moments_too() -> None:
    def train(rank: int) -> tuple[list[float], list[bool], str]:
        mesh = init_device_mesh("cpu", (2,))
        net, twin = (fully_shard(make_net(), mesh=mesh) for _ in range(2))
        losses, are_equal, optimizer = train_twins(net, twin, KEPT[0])
        moment = optimizer.state[net[0].weight]["exp_avg"]  # type: ignore[index]
        return losses, are_equal, type(moment._local_tensor).__name__

    for losses, are_equal, kind in run_forked(2, train):
        assert are_equal == [True] * 5
        assert losses[-1] < 0.8 * losses[0]
        assert kind == "OptimState8bit"
