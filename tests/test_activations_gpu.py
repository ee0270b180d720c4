"""Stored activations on a CUDA device: the fused kernels in half precision, and what the allocator says."""

from typing import Any

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
    norms,
    predict_block,
    store_in_few_bits,
    weight_gradient,
)
from lightning_taco.codec import decode, encode
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


@pytest.mark.parametrize("element", ["fp4", "nf4", "int4"])
@pytest.mark.parametrize("block_size", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_weight_gradient_from_the_message_agrees_with_decode_and_a_product(
    element: str, block_size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lightning_taco.activations import kernels_weight_gradient as kernels

    stock = torch.Tensor.new_empty
    poison = float("nan")

    def new_empty(*arguments: Any, **options: Any) -> torch.Tensor:
        made = stock(*arguments, **options)
        return made.fill_(poison) if made.is_floating_point() else made

    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)
    codec = ActivationConfig(element=element, block_size=block_size).codec  # type: ignore[arg-type]
    for num_tokens, num_outputs, num_channels in [(1, 1, 128), (517, 300, 640), (64, 128, 256), (2049, 77, 1152)]:
        x = torch.randn(num_tokens, num_channels, device="cuda", dtype=dtype)
        message = encode(x.view(1, -1), codec)
        values = decode(message, codec, x.numel(), dtype).view(x.shape)
        gradient = torch.randn(num_tokens, num_outputs, device="cuda", dtype=dtype)
        expected = gradient.double().t() @ values.double()
        picked = torch.zeros(num_tokens, num_tokens, device="cuda", dtype=dtype).fill_diagonal_(1)
        for tile in kernels.TILES:
            result = kernels.weight_gradient_triton(gradient, message, codec, num_channels, tile)
            assert relative_error(result.double(), expected) < (4e-3 if dtype is torch.bfloat16 else 5e-4)
            assert torch.equal(kernels.weight_gradient_triton(picked, message, codec, num_channels, tile), values)


@pytest.mark.parametrize("way", ["auto", "fused"])
def test_a_layer_that_owns_its_message_agrees_with_a_decoded_one(way: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", weight_gradient.__name__)
    weight_gradient._chosen.clear()
    module = nn.Linear(512, 384, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(3, 700, 512, device="cuda", dtype=torch.bfloat16)
    gradients = {}
    for each in ("separate", way):
        handle = store_in_few_bits(module, ActivationConfig(weight_gradient=each))  # type: ignore[arg-type]
        module.zero_grad()
        module(x).float().square().sum().backward()
        assert module.weight.grad is not None
        gradients[each] = module.weight.grad.clone()
        handle.remove()
    assert relative_error(gradients[way].float(), gradients["separate"].float()) < 5e-3
    assert len(caplog.records) == (way == "auto")


def test_a_step_with_messages_that_products_read_is_captured_in_a_graph() -> None:
    """What has been measured before holds in the graph; what has not is decoded, and nothing waits for the device."""
    module = nn.Linear(512, 384, bias=False, device="cuda", dtype=torch.bfloat16)
    handle = store_in_few_bits(module, ActivationConfig(weight_gradient="auto"))
    plain = nn.Linear(512, 384, bias=False, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(2100, 512, device="cuda", dtype=torch.bfloat16)
    for is_measured in (False, True):
        module.zero_grad()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            encode(x.view(1, -1), handle.store.codec)  # kernels are compiled outside of a graph
            decode(encode(x.view(1, -1), handle.store.codec), handle.store.codec, x.numel(), x.dtype)
            plain(x).sum().backward()  # the backward's thread has a handle of its own to the library of products
            if is_measured:
                module(x).sum().backward()
                module.zero_grad()
            else:
                weight_gradient._chosen.clear()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            module(x).sum().backward()
        graph.replay()
        torch.cuda.synchronize()
        expected = x.float().sum(0).expand(384, -1)
        assert module.weight.grad is not None
        assert relative_error(module.weight.grad.float(), expected) < 0.2
        assert bool(weight_gradient._chosen) == is_measured


@pytest.mark.parametrize("norm", [nn.RMSNorm(256, eps=1e-5), nn.LayerNorm(256)], ids=["rms", "layer"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_norm_behind_which_its_output_was_wanted_has_the_gradients_at_the_stored_input(
    norm: nn.Module, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(norm, nn.Linear(256, 64)).to("cuda", dtype)
    x = torch.randn(3, 517, 256, device="cuda", dtype=dtype)
    codec = ActivationConfig().codec
    at_stored = decode(encode(x.view(1, -1), codec), codec, x.numel(), dtype).view(x.shape)
    expected = cuda_gradients_of(model, at_stored)
    ran: list[Any] = []
    differentiate = norms.RMSNorm.differentiate
    monkeypatch.setattr(norms.RMSNorm, "differentiate", lambda *a: (ran.append(a), differentiate(*a))[1])
    store_in_few_bits(model, ActivationConfig(min_numel=0))
    for ours, truth in zip(cuda_gradients_of(model, x), expected, strict=True):
        assert torch.equal(ours, truth)
    assert len(ran) == isinstance(norm, nn.RMSNorm)


def cuda_gradients_of(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    leaf = x.detach().requires_grad_()
    output = model(leaf)
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(2)).to(output)
    return list(torch.autograd.grad(output, [leaf, *model[0].parameters()], upstream))  # type: ignore[index]


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
    # One tensor of the residual stream is 5% of what stock autograd keeps, and 19% of what is stored.
    assert stored == pytest.approx(predicted.stored_bytes, rel=0.03)
    assert stock == pytest.approx(predicted.stock_bytes, rel=0.03)
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
