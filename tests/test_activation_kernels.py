"""The fused kernels of stored activations in Triton's interpreter: what decoding and torch's operations give.

They stay in fp32 between the steps, and the interpreter's exponential is numpy's, so results are compared to within
rounding; fp32 throughout, since the interpreter truncates casts to bf16 (`test_activations_gpu` has those).
"""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_taco.activations import ActivationConfig, functions, intercept, store_in_few_bits
from lightning_taco.activations.functions import silu_times
from lightning_taco.codec import decode, encode
from lightning_taco.config import CodecConfig
from tests.test_activations import SMALL, GatedUnit, gradients_of, loss_and_gradients, make_model, relative_error
from tests.test_codec_family import content
from tests.test_codec_reference import assert_same_bits

pytest.importorskip("triton")
kernels = pytest.importorskip("lightning_taco.activations.kernels")

pytestmark = [
    pytest.mark.interpreter,
    # numpy, on which the interpreter runs, warns of the Inf and NaN that some inputs hold.
    pytest.mark.filterwarnings("ignore:(invalid value|overflow|divide by zero) .*:RuntimeWarning"),
]
CODECS = [
    CodecConfig(element="fp4", rotation=False),
    CodecConfig(element="nf4", rotation=False, block_size=64),
    CodecConfig(element="int4", levels="gaussian", block_size=64),
    CodecConfig(element="int6", rotation=False, block_size=32),
    CodecConfig(element="int8", rotation=False, block_size=256),
]


KERNELS = ["multiply_and_encode_triton", "silu_times_triton", "silu_times_backward_triton"]


def adversarial(num_values: int, codec: CodecConfig) -> Tensor:
    values = torch.randn(num_values) * 3
    blocks = [values[start : start + codec.block_size] for start in range(0, num_values, codec.block_size)]
    for block, filling in zip(blocks, (0.0, 1e-30, 1e4, -200.0), strict=False):
        block[:] = filling
    if len(blocks) > 5:
        blocks[4][3], blocks[5][-1] = math.nan, math.inf
    return values


def expected(messages: list[Tensor], codec: CodecConfig, gradient: Tensor) -> tuple[Tensor, list[Tensor]]:
    leaves = [
        decode(message, codec, gradient.numel(), torch.float32).view(gradient.shape).requires_grad_()
        for message in messages
    ]
    product = silu_times(*leaves)
    return product.detach(), list(torch.autograd.grad(product, leaves, gradient))


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("num_values", [1, 63, 8 * 256 + 17])
def test_kernels_agree_with_decoded_tensors(codec: CodecConfig, num_values: int) -> None:
    gate, up, gradient = adversarial(num_values, codec), torch.randn(num_values), torch.randn(num_values)
    messages = [encode(values.view(1, -1), codec) for values in (gate, up)]
    product, gradients = expected(messages, codec, gradient)
    shape = torch.Size((num_values,))
    actual = kernels.silu_times_triton(*messages, codec, shape, torch.float32)
    torch.testing.assert_close(actual, product, rtol=2e-6, atol=1e-12, equal_nan=True)
    for ours, truth in zip(kernels.silu_times_backward_triton(*messages, codec, gradient), gradients, strict=True):
        torch.testing.assert_close(ours, truth, rtol=1e-5, atol=1e-7, equal_nan=True)


@pytest.mark.parametrize("codec", [*CODECS, replace(CODECS[0], rounding="stochastic")], ids=str)
@pytest.mark.parametrize("num_values", [1, 63, 8 * 256 + 17])
def test_multiplying_and_encoding_at_once_has_the_bits_of_both(codec: CodecConfig, num_values: int) -> None:
    activated, up = torch.randn(num_values), adversarial(num_values, codec)
    expected_message = encode(up.view(1, -1), codec, seed=77)
    message = torch.full_like(expected_message, 255)
    product = kernels.multiply_and_encode_triton(activated, up, codec, message, seed=77)
    torch.testing.assert_close(product, activated * up, rtol=0, atol=0, equal_nan=True)
    assert_same_bits(content(message, codec, num_values), content(expected_message, codec, num_values))


def test_nothing_to_do() -> None:
    codec = CODECS[0]
    empty = [encode(torch.empty(1, 0), codec) for _ in range(2)]
    assert kernels.silu_times_triton(*empty, codec, torch.Size((0, 3)), torch.float32).shape == (0, 3)
    product = kernels.multiply_and_encode_triton(torch.empty(0, 3), torch.empty(0, 3), codec, empty[0])
    assert product.shape == (0, 3)
    assert [each.shape for each in kernels.silu_times_backward_triton(*empty, codec, torch.empty(0, 3))] == [(0, 3)] * 2


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Take the way of CUDA tensors here, and say which kernels ran."""
    ran: list[str] = []
    for module in (functions, intercept):
        monkeypatch.setattr(module, "can_read_messages", lambda tensor: True)
    for name in KERNELS:
        monkeypatch.setattr(kernels, name, _recording(ran, name))
    return ran


def _recording(ran: list[str], name: str) -> Any:
    stock = getattr(kernels, name)

    def run(*arguments: Any, **options: Any) -> Any:
        ran.append(name)
        return stock(*arguments, **options)

    return run


def test_a_model_that_takes_the_kernels_has_the_same_gradients(
    monkeypatch: pytest.MonkeyPatch, fused: list[str]
) -> None:
    model = make_model("llama", num_layers=1)
    handle = store_in_few_bits(model, SMALL)
    actual = loss_and_gradients(model)
    rows = dict(handle.ledger.rows)
    assert fused == KERNELS
    for module in (functions, intercept):
        monkeypatch.setattr(module, "can_read_messages", lambda tensor: False)
    truth = loss_and_gradients(model)
    assert torch.equal(actual[0], truth[0])
    for name, gradient in actual[1].items():
        assert relative_error(gradient, truth[1][name]) < 1e-5, name
    assert rows == handle.ledger.rows


def test_small_tensors_and_other_layouts_take_the_other_way(fused: list[str]) -> None:
    module = GatedUnit()
    handle = store_in_few_bits(module, ActivationConfig(min_numel=1000))
    gradients_of(module, torch.randn(4, 64), torch.randn(4, 64))
    handle.remove()
    store_in_few_bits(module, SMALL)
    gradients_of(module, torch.randn(64, 20).t(), torch.randn(64, 20).t())
    assert fused == []


@pytest.mark.usefixtures("fused")
def test_in_place_modification_is_detected_by_the_kernels_way_too() -> None:
    module = GatedUnit()
    store_in_few_bits(module, SMALL)
    gate, up = (torch.randn(4, 64, requires_grad=True) * 1 for _ in range(2))
    output = module(gate, up)
    up.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()
