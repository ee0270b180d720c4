"""Stored activations on a CUDA device: the fused kernels in half precision, and what the allocator says."""

import pytest
import torch
from torch import nn

from examples.llama import Llama, LlamaConfig
from lightning_taco.activations import (
    ActivationConfig,
    BlockSizes,
    StoredBytes,
    functions,
    intercept,
    measure_stored,
    predict_block,
    store_in_few_bits,
)
from lightning_taco.codec import encode
from tests.test_activations import GatedUnit, relative_error
from tests.test_codec_family import content
from tests.test_codec_reference import assert_same_bits

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("element", ["fp4", "nf4", "int4", "int8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_fused_kernels_agree_with_decoded_tensors(
    element: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = nn.Sequential(GatedUnit())
    torch.manual_seed(0)
    inputs = [torch.randn(3, 517, 256, device="cuda", dtype=dtype) for _ in range(2)]
    unit = module[0]
    store_in_few_bits(unit, ActivationConfig(element=element, min_numel=0))  # type: ignore[arg-type]
    fused = cuda_gradients(unit, inputs)
    for place in (functions, intercept):
        monkeypatch.setattr(place, "can_read_messages", lambda tensor: False)
    tolerance = {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float32: 1e-6}[dtype]
    for ours, truth in zip(fused, cuda_gradients(unit, inputs), strict=True):
        assert relative_error(ours, truth) < tolerance


@pytest.mark.parametrize("element", ["fp4", "nf4", "int4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_multiplying_and_encoding_at_once_has_the_bits_of_both(element: str, dtype: torch.dtype) -> None:
    from lightning_taco.activations import kernels

    codec = ActivationConfig(element=element).codec  # type: ignore[arg-type]
    activated, up = (torch.randn(70_001, device="cuda", dtype=dtype) for _ in range(2))
    expected = encode(up.view(1, -1), codec)
    message = torch.full_like(expected, 255)
    assert_same_bits(kernels.multiply_and_encode_triton(activated, up, codec, message), activated * up)
    assert_same_bits(content(message, codec, 70_001), content(expected, codec, 70_001))


def cuda_gradients(module: nn.Module, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    return list(torch.autograd.grad(module(*leaves).float().square().sum(), leaves))


def test_the_allocator_sees_what_was_predicted() -> None:
    """Two layers more, so that what lies around the layers cancels."""
    growth = []
    config = ActivationConfig()
    for num_layers in (1, 3):
        sizes = LlamaConfig(
            num_layers=num_layers,
            hidden_size=1024,
            num_heads=16,
            num_kv_heads=4,
            ffn_size=2816,
            vocab_size=1024,
            sequence_length=2048,
        )
        with torch.device("cuda"):
            model = Llama(sizes).bfloat16()
        tokens = torch.randint(1024, (1, 2048), device="cuda")
        result = measure_stored(store_in_few_bits(model, config), lambda m=model, t=tokens: m(t).float().mean())
        assert result.allocator_stock_bytes is not None
        assert result.allocator_stored_bytes is not None
        growth.append((result.allocator_stock_bytes, result.allocator_stored_bytes))
    stock, stored = ((after - before) / 2 for before, after in zip(*growth, strict=True))
    sizes_of_block = BlockSizes(num_tokens=2048, hidden_size=1024, ffn_size=2816, kv_size=256)
    predicted = sum(predict_block(sizes_of_block, config).values(), StoredBytes())
    assert stored == pytest.approx(predicted.stored_bytes, rel=0.1)
    assert stock == pytest.approx(predicted.stock_bytes, rel=0.1)
    assert 1 - stored / stock > 0.7


def test_memory_is_flat_over_steps() -> None:
    with torch.device("cuda"):
        model = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512), nn.LayerNorm(512)).bfloat16()
    store_in_few_bits(model)
    x = torch.randn(512, 512, device="cuda", dtype=torch.bfloat16)
    levels = []
    for _ in range(100):
        model(x).square().sum().backward()
        levels.append(torch.cuda.memory_allocated())
    assert len(set(levels[3:])) == 1
