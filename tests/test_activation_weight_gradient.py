"""The gradient of a weight from the message of the layer's input: the kernel, the layer, and the choice between them.

In Triton's interpreter, whose casts to bf16 truncate: fp16 and fp32 here, bf16 in `test_activations_gpu`.
"""

import logging
import math
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_taco.activations import ActivationConfig, store_in_few_bits, weight_gradient
from lightning_taco.activations.storage import Quantized
from lightning_taco.codec import decode, encode
from lightning_taco.config import CodecConfig
from tests.test_activations import gradients_of, relative_error

pytest.importorskip("triton")
kernels = pytest.importorskip("lightning_taco.activations.kernels_weight_gradient")

pytestmark = [
    pytest.mark.interpreter,
    # numpy, on which the interpreter runs, warns of the Inf and NaN that some inputs hold.
    pytest.mark.filterwarnings("ignore:(invalid value|overflow|divide by zero) .*:RuntimeWarning"),
]
FUSED = ActivationConfig(min_numel=0, weight_gradient="fused")


def codec_of(element: Any, block_size: int = 128) -> CodecConfig:
    return ActivationConfig(element=element, block_size=block_size).codec


def message_and_values(shape: tuple[int, int], codec: CodecConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A message with nothing but NaN behind its scales, and what it decodes to."""
    values = (torch.randn(shape) * torch.logspace(-3, 2, shape[0])[:, None]).to(dtype)
    message = encode(values.reshape(1, -1), codec)
    decoded = decode(message, codec, values.numel(), dtype).view(shape)
    return torch.cat([message, torch.full_like(message, 255)], dim=1)[:, : message.shape[1]], decoded


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let new memory hold NaN, so that what a kernel leaves out shows."""
    stock = Tensor.new_empty

    def new_empty(*arguments: Any, **options: Any) -> Tensor:
        made = stock(*arguments, **options)
        return made.fill_(math.nan) if made.is_floating_point() else made

    monkeypatch.setattr(Tensor, "new_empty", new_empty)


# The kernel.


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("element", ["fp4", "nf4", "int4"])
@pytest.mark.parametrize("block_size", [64, 128])
@pytest.mark.parametrize("tile", kernels.TILES, ids=str)
def test_the_operands_are_the_decoded_values(element: str, block_size: int, tile: Any) -> None:
    """A gradient that picks one token for each output gives that token's values, bit for bit."""
    codec, num_tokens = codec_of(element, block_size), 70
    message, values = message_and_values((num_tokens, 3 * block_size), codec, torch.float16)
    picked = torch.randperm(num_tokens)[:65]
    gradient = torch.zeros(num_tokens, 65, dtype=torch.float16)
    gradient[picked, torch.arange(65)] = 1
    result = kernels.weight_gradient_triton(gradient, message, codec, 3 * block_size, tile)
    assert torch.equal(result, values[picked])


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    ("num_tokens", "num_outputs", "num_channels"),
    [(1, 1, 128), (64, 128, 256), (63, 7, 128), (65, 129, 384), (130, 200, 640), (200, 1200, 128)],
)
@pytest.mark.parametrize("tile", kernels.TILES, ids=str)
def test_the_kernel_agrees_with_decode_and_a_product(
    num_tokens: int, num_outputs: int, num_channels: int, tile: Any
) -> None:
    codec = codec_of("fp4")
    message, values = message_and_values((num_tokens, num_channels), codec, torch.float32)
    gradient = torch.randn(num_tokens, num_outputs)
    result = kernels.weight_gradient_triton(gradient, message, codec, num_channels, tile)
    torch.testing.assert_close(result, gradient.t() @ values, rtol=1e-5, atol=1e-4)


@pytest.mark.usefixtures("poisoned")
def test_gradients_in_other_layouts_and_none_at_all() -> None:
    codec = codec_of("nf4", 64)
    message, values = message_and_values((20, 128), codec, torch.float32)
    wide = torch.randn(20, 50)
    for gradient in (wide[:, 3:33], torch.randn(30, 20).t(), torch.ones(1, 1).expand(20, 30)):
        result = kernels.weight_gradient_triton(gradient, message, codec, 128)
        torch.testing.assert_close(result, gradient.t() @ values, rtol=1e-5, atol=1e-4)
    empty = kernels.weight_gradient_triton(torch.empty(0, 3), encode(torch.empty(1, 0), codec), codec, 128)
    assert torch.equal(empty, torch.zeros(3, 128))
    assert kernels.weight_gradient_triton(torch.empty(20, 0), message, codec, 128).shape == (0, 128)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_values_reach_their_block_and_no_other(bad: float) -> None:
    codec = codec_of("fp4")
    x = torch.randn(5, 384)
    x[3, 200] = bad
    result = kernels.weight_gradient_triton(torch.randn(5, 4), encode(x.view(1, -1), codec), codec, 384)
    assert not result[:, 128:256].isfinite().any()
    assert result[:, :128].isfinite().all()
    assert result[:, 256:].isfinite().all()


def test_a_message_of_fewer_values_is_refused() -> None:
    codec = codec_of("fp4")
    message, _ = message_and_values((4, 128), codec, torch.float32)
    with pytest.raises(ValueError, match="a message of 272 bytes is not one of 8 x 128 values, which takes 544; give"):
        kernels.weight_gradient_triton(torch.randn(8, 3), message, codec, 128)


# The layer.


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Take the way of CUDA tensors here; the shapes of the gradients that the kernel gave, and no choice remembered."""
    ran: list[tuple[int, ...]] = []
    stock = kernels.weight_gradient_triton

    def record(*arguments: Any) -> Tensor:
        result = stock(*arguments)
        ran.append(tuple(result.shape))
        return result

    monkeypatch.setattr(weight_gradient, "runs_kernels", lambda tensor: True)
    monkeypatch.setattr(kernels, "weight_gradient_triton", record)
    monkeypatch.setattr(weight_gradient, "_chosen", {})
    return ran


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(37, 128), (3, 37, 128), (2, 3, 4, 128), (0, 128)])
def test_a_layer_has_the_gradients_of_the_decoded_input(
    here: list[tuple[int, ...]], bias: bool, shape: tuple[int, ...]
) -> None:
    module = nn.Linear(128, 24, bias=bias).half()
    x = torch.randn(shape).half()
    stock = module(x)
    handle = store_in_few_bits(module, ActivationConfig(min_numel=0, weight_gradient="separate"))
    expected = gradients_of(module, x)
    rows = dict(handle.ledger.rows)
    handle.remove()
    handle = store_in_few_bits(module, FUSED)
    assert torch.equal(module(x), stock)
    actual = gradients_of(module, x)
    assert handle.ledger.rows == rows
    assert here == ([(24, 128)] if x.numel() else [])
    for index, (ours, truth) in enumerate(zip(actual, expected, strict=True)):
        if index == 1 and x.numel():
            assert relative_error(ours.float(), truth.float()) < 1e-3
        else:
            torch.testing.assert_close(ours, truth, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("module", "config"),
    [
        (nn.Linear(96, 8).half(), FUSED),  # no whole blocks
        (nn.Linear(128, 8), FUSED),  # fp32
        (nn.Linear(128, 8).half(), ActivationConfig(element="int8", min_numel=0)),
        (nn.Linear(128, 8).half(), ActivationConfig(rotation=True, min_numel=0)),
        (nn.Linear(128, 8).half(), ActivationConfig(min_numel=0, weight_gradient="separate")),
        (nn.Linear(128, 8).half(), ActivationConfig(min_numel=1 << 20, weight_gradient="fused")),
        (nn.Sequential(nn.LayerNorm(128), nn.Linear(128, 8)).half(), FUSED),  # computed again from the norm's input
        (nn.Sequential(nn.ReLU(), nn.Linear(128, 8)).half(), FUSED),  # shares what ReLU keeps
    ],
)
def test_what_no_product_can_read_is_decoded(
    here: list[tuple[int, ...]], module: nn.Module, config: ActivationConfig
) -> None:
    width = next(layer.in_features for layer in module.modules() if isinstance(layer, nn.Linear))
    x = torch.randn(5, width, dtype=next(module.parameters()).dtype)
    expected = gradients_of(module, x)
    store_in_few_bits(module, config)
    for ours, truth in zip(gradients_of(module, x), expected, strict=True):
        assert relative_error(ours.float(), truth.float()) < 0.25
    assert here == []


def test_under_autocast_and_on_a_cpu_it_is_decoded(here: list[tuple[int, ...]], monkeypatch: Any) -> None:
    module = nn.Linear(128, 8).bfloat16()
    store_in_few_bits(module, FUSED)
    with torch.autocast("cpu", torch.bfloat16):
        module(torch.randn(4, 128, dtype=torch.bfloat16)).sum().backward()
    monkeypatch.undo()
    module(torch.randn(4, 128, dtype=torch.bfloat16)).sum().backward()
    assert here == []
    assert not weight_gradient.runs_kernels(torch.empty(0))


def test_a_shared_input_is_stored_once_also_in_another_shape(here: list[tuple[int, ...]]) -> None:
    layers = nn.ModuleList([nn.Linear(128, 16), nn.Linear(256, 8), nn.Linear(128, 16)]).half()

    class Fan(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, x: Tensor) -> Tensor:
            return sum(layer(x.view(-1, layer.in_features)).sum() for layer in self.layers)

    model, x = Fan(), torch.randn(6, 128).half()
    handle = store_in_few_bits(model, ActivationConfig(min_numel=0, weight_gradient="separate"))
    model(x).backward()
    expected = [layer.weight.grad.clone() for layer in layers]
    handle.remove()
    model.zero_grad()
    handle = store_in_few_bits(model, FUSED)
    model(x).backward()
    assert handle.ledger.total.num_tensors == 1
    assert handle.store._decoded is None
    assert sorted(here) == [(8, 256), (16, 128), (16, 128)]
    for layer, truth in zip(layers, expected, strict=True):
        assert relative_error(layer.weight.grad.float(), truth.float()) < 1e-3


@pytest.mark.usefixtures("here")
def test_changes_in_place_second_backwards_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Linear(128, 16).half()
    store_in_few_bits(module, FUSED)
    x = torch.randn(6, 128).half()
    messages: list[Any] = []
    make = Quantized.__init__

    def record(source: Quantized, *arguments: Any, **options: Any) -> None:
        make(source, *arguments, **options)
        messages.append(weakref.ref(source))

    monkeypatch.setattr(Quantized, "__init__", record)
    output = module(x).sum()
    output.backward(retain_graph=True)
    assert messages[0]() is not None
    first = module.weight.grad.clone()
    output.backward()
    torch.testing.assert_close(module.weight.grad, 2 * first, rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="second time"):
        output.backward()
    assert messages[0]() is None  # let go of by autograd, although `output` still has its graph
    output = module(x).sum()
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.backward()
    output = module(x).sum()
    with torch.no_grad():
        module.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.backward()


def test_frozen_weights_and_inputs_without_gradients(here: list[tuple[int, ...]]) -> None:
    module = nn.Linear(128, 16).half()
    store_in_few_bits(module, FUSED)
    module(torch.randn(6, 128).half()).sum().backward()  # of the weight alone
    assert here == [(16, 128)]
    module.weight.requires_grad_(False)
    x = torch.randn(6, 128).half().requires_grad_()
    module(x).sum().backward()
    assert here == [(16, 128)]
    assert x.grad is not None


def test_hooked_modules_pack_no_weight(here: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[Any] = []
    make = Quantized.__init__

    def record(source: Quantized, tensor: Tensor, *rest: Any, **options: Any) -> None:
        shapes.append(tuple(tensor.shape))
        make(source, tensor, *rest, **options)

    monkeypatch.setattr(Quantized, "__init__", record)
    module = nn.Sequential(nn.Linear(128, 256), nn.Tanh(), nn.Linear(256, 8)).half()
    store_in_few_bits(module, ActivationConfig(min_numel=0, weight_gradient="fused", hooked=["*"]))
    gradients_of(module, torch.randn(6, 128).half())
    assert shapes == [(6, 128), (6, 256)]


# The choice.


@pytest.fixture
def timed(here: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Stands in for the clock: microseconds of a product, of decoding, and of the kernel with each tile."""
    clock: dict[str, Any] = {"product": 100.0, "decode": 30.0, "fused": [120.0, 140.0], "calls": []}

    def microseconds(run: Any) -> float:
        name = getattr(getattr(run, "func", run), "__name__", "")
        clock["calls"].append(name)
        if name == "_fused":
            return clock["fused"][kernels.TILES.index(run.args[-1])]
        return clock["decode"] if name == "value" else clock["product"]

    monkeypatch.setattr(weight_gradient, "microseconds", microseconds)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: clock.get("capturing", False))
    return clock


def step(num_tokens: int = 6, num_layers: int = 1) -> None:
    layers = nn.ModuleList(nn.Linear(128, 16) for _ in range(num_layers)).half()

    class Fan(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, x: Tensor) -> Tensor:
            return sum(layer(x).sum() for layer in self.layers)

    model = Fan()
    store_in_few_bits(model, ActivationConfig(min_numel=0, weight_gradient="auto"))
    model(torch.randn(num_tokens, 128).half()).backward()


def test_the_faster_way_is_measured_once_and_kept(
    here: list[tuple[int, ...]], timed: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, weight_gradient.__name__)
    step()
    assert here == [(16, 128)]
    assert len(timed["calls"]) == 2 + len(kernels.TILES)
    assert "130 us decoded and multiplied" in caplog.text
    assert "120 us in one kernel; kept: fused" in caplog.text
    step(num_tokens=8)  # as many, to the next power of two
    assert len(timed["calls"]) == 4
    assert len(caplog.records) == 1
    assert len(here) == 2
    timed["fused"] = [150.0, 140.0]
    step(num_tokens=9)
    assert "kept: separate" in caplog.records[-1].message
    assert len(here) == 2
    timed["fused"] = [float("inf"), 110.0]  # the first does not fit the device
    step(num_tokens=17)
    (problem,) = [each for each in weight_gradient._chosen if each.log2_tokens == 5]
    assert weight_gradient._chosen[problem] == kernels.TILES[1]


def test_what_is_decoded_once_for_three_is_paid_by_three(here: list[tuple[int, ...]], timed: dict[str, Any]) -> None:
    step(num_layers=3)  # 100 + 30 / 3 < 120
    assert here == []
    assert len(weight_gradient._chosen) == 1  # the others find it decoded
    timed["fused"] = [105.0, 140.0]
    weight_gradient._chosen.clear()
    step(num_layers=3)
    assert here == [(16, 128)] * 3
    assert {problem.num_readers for problem in weight_gradient._chosen} == {1, 2, 3}


def test_nothing_is_measured_while_a_graph_is_captured(here: list[tuple[int, ...]], timed: dict[str, Any]) -> None:
    timed["capturing"] = True
    step()
    assert here == []
    assert timed["calls"] == []
    assert weight_gradient._chosen == {}
    timed["capturing"] = False
    step()
    timed["capturing"] = True
    step()
    assert len(here) == 2  # what has been chosen before holds
