"""Stored activations: what is kept for backward, what the gradients become, and when nothing is touched.

Two oracles. A store that keeps values as they are must give the bits of stock autograd for whole models: then nothing
is lost but by quantisation. And each operation's gradients at four bits must have the bits of stock autograd at the
decoded input.
"""

import copy
import gc
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from examples import gpt, llama
from examples.plans import next_token_loss
from lightning_taco.activations import ActivationConfig, StoredActivations, norms, store, store_in_few_bits
from lightning_taco.activations.storage import Quantized
from lightning_taco.codec import decode, encode

VOCAB = 61
SMALL = ActivationConfig(min_numel=0)
GAUSS_ERROR = 0.109
"""Relative L2 error of Gaussian values in unrotated FP4, block 128."""


class Exact:
    """Stands in for `Quantized` and keeps the values."""

    def __init__(self, tensor: Tensor, codec: Any, seed: int = 0) -> None:
        self.num_users = 0
        self.shape, self.values, self.num_bytes = tensor.shape, tensor.reshape(-1).clone(), 0

    def value(self) -> Tensor:
        return self.values.view(self.shape)


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "Quantized", Exact)


def make_model(kind: str, **overrides: Any) -> nn.Module:
    sizes = {"num_layers": 2, "hidden_size": 64, "num_heads": 4, "sequence_length": 24, "vocab_size": VOCAB}
    if kind == "gpt":
        return gpt.GPT(gpt.GPTConfig(**{**sizes, **overrides}), seed=3)
    return llama.Llama(llama.LlamaConfig(**{**sizes, "num_kv_heads": 2, "ffn_size": 96, **overrides}), seed=3)


def tokens() -> Tensor:
    return torch.randint(VOCAB, (2, 25), generator=torch.Generator().manual_seed(1))


def loss_and_gradients(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss = next_token_loss(model(tokens()[:, :-1]), tokens()[:, 1:])
    loss.backward()
    return loss.detach(), {name: weight.grad.clone() for name, weight in model.named_parameters()}


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in actual.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=0, msg=name)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual - expected).double().norm() / expected.double().norm()).item()


def stored(tensor: Tensor, config: ActivationConfig = SMALL) -> Tensor:
    """The values that come back."""
    message = encode(tensor.reshape(1, -1), config.codec)
    return decode(message, config.codec, tensor.numel(), tensor.dtype).view(tensor.shape)


def gradients_of(module: nn.Module, *inputs: Tensor) -> list[Tensor]:
    """Of the inputs and the parameters, for a fixed gradient of the output."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    output = module(*leaves)
    gradient = torch.randn(output.shape, generator=torch.Generator().manual_seed(2)).to(output.dtype)
    return list(torch.autograd.grad(output, [*leaves, *module.parameters()], gradient))


def perturbed(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for weight in module.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.3)
    return module


# Whole models.


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("kind", ["llama", "gpt"])
@pytest.mark.parametrize("autocast", [False, True])
def test_nothing_is_lost_but_by_quantisation(kind: str, autocast: bool) -> None:
    model = perturbed(make_model(kind))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected = loss_and_gradients(model)
        handle = store_in_few_bits(model, SMALL)
        actual = loss_and_gradients(model)
    assert torch.equal(actual[0], expected[0])
    # RMSNorm is several operations on CPU, whose gradients are added up in another order.
    tolerance = {"gpt": 0.0, "llama": 0.01 if autocast else 1e-5}[kind]
    for name, gradient in actual[1].items():
        assert relative_error(gradient, expected[1][name]) <= tolerance, name
    assert handle.ledger.total.num_tensors > 10


@pytest.mark.parametrize("kind", ["llama", "gpt"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_four_bits_leave_the_forward_alone_and_the_gradients_near(kind: str, dtype: torch.dtype) -> None:
    model = make_model(kind).to(dtype)
    expected = loss_and_gradients(model)
    handle = store_in_few_bits(model, SMALL)
    actual = loss_and_gradients(model)
    assert torch.equal(actual[0], expected[0])
    for name, gradient in actual[1].items():
        if not name.endswith("key.bias"):  # whose true gradient is nil: it moves all scores of a row alike
            assert 1e-4 < relative_error(gradient, expected[1][name]) < 0.2 or gradient.dim() == 1, name
    handle.remove()
    assert_same(loss_and_gradients(model)[1], expected[1])


@pytest.mark.parametrize(("kind", "ratio"), [("llama", 14.0), ("gpt", 6.5)])
def test_what_one_layer_stores(kind: str, ratio: float) -> None:
    """Norm inputs, the output projection's, and gate and up or the input of GELU; nothing else, and each once."""
    model = make_model(kind, num_layers=1, hidden_size=128, ffn_size=256)
    handle = store_in_few_bits(model, SMALL)
    loss_and_gradients(model)
    rows = handle.ledger.rows
    num_values = 2 * 24 * 128
    stock = num_values * 4
    bits = SMALL.bits_per_value

    def row(module: str, kind: str) -> tuple[int, int]:
        found = rows[(module, kind)]
        return found.stock_bytes, found.stored_bytes

    for module, size in (("attention_norm", 1), ("mlp_norm", 1)):
        assert row(f"blocks.0.{module}", "norm") == (stock * size, num_values * size * bits / 8)
    assert row("blocks.0.attention.query", "linear") == (stock, 0)
    assert ("blocks.0.attention.key", "linear") not in rows
    assert ("blocks.0.attention.value", "linear") not in rows
    assert row("blocks.0.mlp.down", "linear") == (2 * stock, 0)
    if kind == "llama":  # gate, silu(gate), up
        assert row("blocks.0.mlp", "activation") == (3 * 2 * stock, 2 * 2 * num_values * bits / 8)
        assert ("blocks.0.mlp.up", "linear") not in rows
    else:
        assert row("blocks.0.mlp", "activation") == (2 * stock, 2 * num_values * bits / 8)
    assert handle.ledger.total.ratio > ratio
    assert set(handle.ledger.by_layer()) == {"blocks.0", "final_norm", "head"}


def test_the_output_projection_shares_what_attention_keeps_where_it_can() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.output = nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            heads = x.unflatten(-1, (4, 16)).transpose(1, 2)
            return self.output(F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2))

    model = Attention()
    handle = store_in_few_bits(model, SMALL)
    x = torch.randn(2, 24, 64, requires_grad=True)
    output = model(x)
    shared = handle.ledger.rows[("output", "kept")]
    # torch's attention returns a transposed view of memory that lies as the projection reads it.
    assert shared.stored_bytes == shared.stock_bytes == 2 * 24 * 64 * 4
    gradient = torch.autograd.grad(output.sum(), model.output.weight)[0]
    handle.remove()
    assert torch.equal(gradient, torch.autograd.grad(model(x).sum(), model.output.weight)[0])


def test_a_layer_behind_relu_shares_what_relu_keeps(recorder: "Recorder") -> None:
    model = nn.Sequential(nn.ReLU(), nn.Linear(64, 8))
    x = torch.randn(4, 64)
    expected = gradients_of(model, x)
    store_in_few_bits(model, SMALL)
    for ours, truth in zip(gradients_of(model, x), expected, strict=True):
        torch.testing.assert_close(ours, truth, rtol=0, atol=0)
    assert recorder.packed == []


# Single operations, against stock autograd at the decoded input.


class GatedUnit(nn.Module):
    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate) * up


OPERATIONS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "rms_norm": (lambda: nn.RMSNorm(64, eps=1e-5), 1),
    "rms_norm_plain": (lambda: nn.RMSNorm(64, elementwise_affine=False), 1),
    "layer_norm": (lambda: nn.LayerNorm(64), 1),
    "gelu": (lambda: nn.GELU(), 1),
    "gelu_tanh": (lambda: nn.GELU(approximate="tanh"), 1),
    "silu": (lambda: nn.SiLU(), 1),
    "silu_times": (GatedUnit, 2),
}


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_gradients_are_those_at_the_stored_input(name: str, dtype: torch.dtype) -> None:
    make, num_inputs = OPERATIONS[name]
    module = perturbed(make()).to(dtype)
    inputs = [torch.randn(3, 37, 64).to(dtype) for _ in range(num_inputs)]
    expected = gradients_of(module, *[stored(tensor) for tensor in inputs])
    stock = gradients_of(module, *inputs)
    store_in_few_bits(module, SMALL)
    actual = gradients_of(module, *inputs)
    for ours, truth, unquantised in zip(actual, expected, stock, strict=True):
        torch.testing.assert_close(ours, truth, rtol=0, atol=0)
        assert 0 < relative_error(ours, unquantised) < 2 * GAUSS_ERROR or unquantised.dim() == 1  # a bias: exact


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_layer_has_an_exact_input_gradient_and_four_bits_in_its_weights(
    dtype: torch.dtype, bias: bool
) -> None:
    module = nn.Linear(64, 32, bias=bias).to(dtype)
    x = torch.randn(3, 37, 64).to(dtype)
    expected, at_stored = gradients_of(module, x), gradients_of(module, stored(x))
    store_in_few_bits(module, SMALL)
    actual = gradients_of(module, x)
    torch.testing.assert_close(actual[0], expected[0], rtol=0, atol=0)
    torch.testing.assert_close(actual[1], at_stored[1], rtol=0, atol=0)
    assert abs(relative_error(actual[1].float(), expected[1].float()) - GAUSS_ERROR) < 0.015
    if bias:
        torch.testing.assert_close(actual[2], expected[2], rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(1, 64), (5, 64), (2, 0, 64), (0, 64), (64,), (2, 3, 4, 64)])
@pytest.mark.parametrize("name", ["rms_norm", "gelu", "linear", "silu_times"])
def test_odd_and_empty_shapes(shape: tuple[int, ...], name: str) -> None:
    make, num_inputs = {**OPERATIONS, "linear": (lambda: nn.Linear(64, 3), 1)}[name]
    module, inputs = make(), [torch.randn(shape) for _ in range(num_inputs)]
    expected = gradients_of(module, *inputs)
    store_in_few_bits(module, SMALL)
    for ours, truth in zip(gradients_of(module, *inputs), expected, strict=True):
        assert ours.shape == truth.shape
        torch.testing.assert_close(ours, truth, rtol=0.5, atol=0.5 * float(truth.abs().max()) if truth.numel() else 0)


def test_non_contiguous_input_and_odd_width() -> None:
    module = nn.Linear(33, 7)
    x = torch.randn(33, 20).t()
    expected = gradients_of(module, stored(x.contiguous()))
    store_in_few_bits(module, SMALL)
    torch.testing.assert_close(gradients_of(module, x)[1], expected[1], rtol=0, atol=0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_inputs_give_non_finite_gradients(bad: float) -> None:
    module = nn.Linear(64, 8)
    store_in_few_bits(module, SMALL)
    x = torch.randn(4, 64)
    x[1, 3] = bad
    assert not gradients_of(module, x)[1].isfinite().any(dim=1).all()
    assert not gradients_of(module, x)[1][:, 3].isfinite().any()


def test_stochastic_rounding_gives_unbiased_weight_gradients() -> None:
    module = nn.Linear(64, 8, bias=False)
    x = torch.randn(16, 64)
    expected = gradients_of(module, x)[1]
    store_in_few_bits(module, ActivationConfig(min_numel=0, rounding="stochastic"))
    draws = torch.stack([gradients_of(module, x)[1] for _ in range(400)]).double()
    assert (draws[0] != draws[1]).any()
    standard_error = draws.std(0) / math.sqrt(400)
    assert ((draws.mean(0) - expected.double()).abs() <= 5 * standard_error).all()
    assert relative_error(draws.mean(0), expected) < 0.02 < relative_error(draws[0], expected)


# Who shares, and who must not.


def test_one_input_of_several_layers_is_stored_once_and_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = nn.ModuleList(nn.Linear(64, 16) for _ in range(3))

    class Fan(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, x: Tensor) -> Tensor:
            return sum(layer(x.view(-1, 64) if number else x).sum() for number, layer in enumerate(self.layers))

    model = Fan()
    handle = store_in_few_bits(model, SMALL)
    counts = {"encode": 0, "decode": 0}
    make, value = Quantized.__init__, Quantized.value
    monkeypatch.setattr(Quantized, "__init__", lambda *a: (counts.update(encode=counts["encode"] + 1), make(*a))[1])
    monkeypatch.setattr(Quantized, "value", lambda s: (counts.update(decode=counts["decode"] + 1), value(s))[1])
    model(torch.randn(2, 8, 64)).backward()
    assert counts == {"encode": 1, "decode": 1}
    assert handle.store._decoded is None  # its last user has had it
    assert handle.ledger.total.num_tensors == 1


def test_a_backward_that_failed_is_forgotten() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            raise torch.OutOfMemoryError("full")

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(64, 16), nn.Linear(64, 16)

        def forward(self, x: Tensor) -> Tensor:
            return (Fails.apply(self.first(x)) + self.second(x)).sum()

    model = Pair()
    handle = store_in_few_bits(model, SMALL)
    with pytest.raises(torch.OutOfMemoryError):
        model(torch.randn(4, 64)).backward()
    assert handle.store._decoded is not None  # for the first layer, which never came
    handle.forget()
    assert handle.store._decoded is handle.store._held is None
    assert handle.store._known == handle.store._recipes == {}


class Counting(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func._schema.name.removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("kind", "num_norms"), [("gpt", 5), ("llama", 5)])
def test_a_backward_decodes_each_message_of_a_norm_once_and_runs_each_norm_once(
    kind: str, num_norms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(kind)
    handle = store_in_few_bits(model, SMALL)
    loss = next_token_loss(model(tokens()[:, :-1]), tokens()[:, 1:])
    decoded: Counter[int] = Counter()
    value = Quantized.value
    monkeypatch.setattr(Quantized, "value", lambda source: (decoded.update([id(source)]), value(source))[1])
    with Counting() as counting:
        loss.backward()
    of_norms = [row for (_, name), row in handle.ledger.rows.items() if name == "norm"]
    assert len(of_norms) == num_norms
    gelu_or_gate_and_up = {"gpt": [2] * 2, "llama": [2] * 4}[kind]  # for their gradients, and for what follows of them
    of_others = [1] * 2 if kind == "llama" else []  # the output projection's input
    assert sorted(decoded.values()) == sorted([1] * num_norms + gelu_or_gate_and_up + of_others)
    if kind == "gpt":
        assert counting.counts["native_layer_norm"] == counting.counts["native_layer_norm_backward"] == num_norms
    assert handle.store._decoded is handle.store._held is None


def test_rms_norm_is_differentiated_by_its_statistics_where_torch_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the operation that torch has on CUDA only, written out."""
    ran: list[list[bool]] = []

    def backward(gradient: Tensor, x: Tensor, shape: Any, rstd: Tensor, weight: Tensor, mask: list[bool]) -> Any:
        ran.append(mask)
        normalized, scaled = x * rstd, gradient * weight
        of_x = rstd * (scaled - normalized * (scaled * normalized).mean(-1, keepdim=True))
        return of_x, (gradient * normalized).flatten(0, -2).sum(0)

    model, x = nn.Sequential(perturbed(nn.RMSNorm(64, eps=1e-5)), nn.Linear(64, 8)), torch.randn(3, 37, 64)
    handle = store_in_few_bits(model, SMALL)
    expected = gradients_of(model, x)
    monkeypatch.setattr(norms, "has_fused_rms_norm", lambda tensor: True)
    monkeypatch.setattr(torch.ops.aten, "_fused_rms_norm_backward", backward, raising=False)
    actual = gradients_of(model, x)
    assert ran == [[True, True]]
    for ours, truth in zip(actual, expected, strict=True):
        assert relative_error(ours, truth) < 1e-5
    model(x).sum().backward()
    assert ran[1:] == [[False, True]]
    with torch.autocast("cpu", torch.bfloat16):
        gradients_of(model, x)
    assert len(ran) == 2
    assert handle.store._held is None


@pytest.mark.parametrize("elementwise_affine", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("frozen", ["", "weight", "bias"])
def test_a_norm_behind_which_its_output_was_wanted_has_the_same_gradients(
    elementwise_affine: bool, dtype: torch.dtype, frozen: str
) -> None:
    norm = perturbed(nn.LayerNorm(64, elementwise_affine=elementwise_affine)).to(dtype)
    model = nn.Sequential(norm, nn.Linear(64, 8).to(dtype))
    if frozen and elementwise_affine:
        getattr(norm, frozen).requires_grad_(False)
    x = torch.randn(3, 37, 64).to(dtype)
    upstream = torch.randn(3, 37, 8).to(dtype)

    def run(given: Tensor) -> list[Tensor]:
        leaf = given.detach().requires_grad_()
        wanted = [leaf, *(weight for weight in norm.parameters() if weight.requires_grad)]
        return list(torch.autograd.grad(model(leaf), wanted, upstream))

    expected = run(stored(x))
    store_in_few_bits(model, SMALL)
    for ours, truth in zip(run(x), expected, strict=True):
        torch.testing.assert_close(ours, truth, rtol=0, atol=0)


def test_memory_that_is_used_again_is_not_taken_for_what_it_held_before(recorder: "Recorder") -> None:
    first, second = nn.Linear(64, 16, bias=False), nn.Linear(64, 16, bias=False)

    class Pair(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            left = first(x).sum()
            with torch.no_grad():
                x.mul_(2)  # the same memory, other values
            return left + second(x).sum()

    model = Pair()
    store_in_few_bits(model, SMALL)
    loss = model(torch.randn(4, 64))
    assert len(recorder.packed) == 2
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("make", [lambda: nn.Linear(64, 64), lambda: nn.GELU(), lambda: nn.LayerNorm(64)])
def test_in_place_modification_of_a_saved_tensor_is_detected(make: Callable[[], nn.Module]) -> None:
    module = make()

    def run() -> None:
        x = torch.randn(4, 64, requires_grad=True) * 1
        output = module(x)
        x.view(-1).add_(1)
        output.sum().backward()

    message = "one of the variables needed for gradient computation has been modified by an inplace operation"
    with pytest.raises(RuntimeError, match=message):
        run()
    store_in_few_bits(module, SMALL)
    with pytest.raises(RuntimeError, match=message):
        run()


def test_a_changed_weight_is_detected() -> None:
    module = nn.Linear(64, 64)
    store_in_few_bits(module, SMALL)
    output = module(torch.randn(4, 64, requires_grad=True))
    with torch.no_grad():
        module.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_a_gate_that_is_changed_after_silu_is_not_taken_for_its_input() -> None:
    class Changed(nn.Module):
        def forward(self, gate: Tensor, up: Tensor) -> Tensor:
            activated = F.silu(gate * 1)
            activated.mul_(2)
            return activated * up

    expected = gradients_of(Changed(), *(inputs := [torch.randn(4, 64), torch.randn(4, 64)]))
    model = Changed()
    store_in_few_bits(model, SMALL)
    for ours, truth in zip(gradients_of(model, *inputs), expected, strict=True):
        assert relative_error(ours, truth) < 2 * GAUSS_ERROR


def test_a_second_backward_needs_retain_graph_as_ever() -> None:
    module = nn.Sequential(nn.Linear(64, 64), nn.GELU())
    store_in_few_bits(module, SMALL)
    output = module(torch.randn(4, 64)).sum()
    output.backward(retain_graph=True)
    first = module[0].weight.grad.clone()  # type: ignore[union-attr]
    output.backward()
    torch.testing.assert_close(module[0].weight.grad, 2 * first, rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="second time"):
        output.backward()


# What is left alone.


class Recorder:
    """Counts what is packed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.packed: list[Tensor] = []
        init = Quantized.__init__

        def record(quantized: Quantized, tensor: Tensor, *rest: Any) -> None:
            self.packed.append(tensor)
            init(quantized, tensor, *rest)

        monkeypatch.setattr(Quantized, "__init__", record)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return Recorder(monkeypatch)


class Unknown(nn.Module):
    """Linear, dropout, embedding, a norm by hand, softmax and sums: what saved-tensor hooks meet."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 64)
        self.linear = nn.Linear(64, 64)
        self.scale = nn.Parameter(torch.ones(64))

    def forward(self, ids: Tensor) -> Tensor:
        x = F.dropout(self.linear(self.embedding(ids)), 0.1)
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.scale
        return F.softmax(torch.tanh(x), dim=-1).square().sum()


def test_hooks_pack_no_parameter_integer_boolean_small_tensor_or_anything_twice(recorder: Recorder) -> None:
    model = Unknown()
    ids = torch.randint(VOCAB, (4, 32))

    def gradients() -> dict[str, Tensor]:
        torch.manual_seed(0)
        model.zero_grad()
        model(ids).backward()
        return {name: weight.grad.clone() for name, weight in model.named_parameters()}

    expected = gradients()
    handle = store_in_few_bits(model, ActivationConfig(element="int8", min_numel=500, hooked=["*"]))
    actual = gradients()
    assert recorder.packed
    parameters = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    keys = set()
    for tensor in recorder.packed:
        assert tensor.dtype == torch.float32
        assert tensor.numel() >= 500
        assert tensor.shape[-1] != 1
        assert tensor.untyped_storage().data_ptr() not in parameters
        keys.add((tensor.untyped_storage()._cdata, tensor._version, tuple(tensor.shape)))
    assert len(keys) == len(recorder.packed)
    for name, gradient in actual.items():
        assert relative_error(gradient, expected[name]) < 0.05, name
    assert set(handle.ledger.by_kind()) == {"linear", "hooked"}


def test_without_hooks_unknown_modules_keep_what_stock_keeps(recorder: Recorder) -> None:
    model = Unknown()
    store_in_few_bits(model, SMALL)
    model(torch.randint(VOCAB, (4, 32))).backward()
    assert [tuple(tensor.shape) for tensor in recorder.packed] == [(4 * 32, 64)]  # the linear layer's input


@pytest.mark.parametrize("config", [SMALL, ActivationConfig(min_numel=0, hooked=["*"])], ids=["known", "hooked"])
def test_attention_is_never_quantised(recorder: Recorder, config: ActivationConfig) -> None:
    class Attention(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    inputs = [torch.randn(2, 4, 16, 32) for _ in range(3)]
    expected = gradients_of(Attention(), *inputs)
    module = Attention()
    store_in_few_bits(module, config)
    for ours, truth in zip(gradients_of(module, *inputs), expected, strict=True):
        torch.testing.assert_close(ours, truth, rtol=0, atol=0)
    assert recorder.packed == []


def test_nothing_is_stored_without_gradients(recorder: Recorder) -> None:
    model = make_model("llama")
    handle = store_in_few_bits(model, SMALL)
    with torch.no_grad():
        model(tokens()[:, :-1])
    with torch.inference_mode():
        model(tokens()[:, :-1])
    assert recorder.packed == []
    assert handle.ledger.rows == {}


def test_frozen_weights_store_nothing_that_stock_would_not(recorder: Recorder) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model.requires_grad_(False)
    store_in_few_bits(model, SMALL)
    model(torch.randn(4, 64, requires_grad=True)).sum().backward()
    assert recorder.packed == []


def test_a_small_tensor_is_kept_as_it_is(recorder: Recorder) -> None:
    module = nn.Linear(64, 8)
    store_in_few_bits(module, ActivationConfig(min_numel=1000))
    x = torch.randn(4, 64)
    gradient = gradients_of(module, x)[1]
    assert recorder.packed == []
    torch.testing.assert_close(gradient, gradients_of(nn.Linear(64, 8), x)[1], rtol=0, atol=0)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_layers_are_left_to_their_checkpoint(use_reentrant: bool, recorder: Recorder) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.2), nn.GELU(), nn.LayerNorm(64))
            self.second = nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(checkpoint(self.first, x, use_reentrant=use_reentrant))

    model = Model()
    x = torch.randn(8, 64)

    def gradients() -> list[Tensor]:
        torch.manual_seed(0)
        return gradients_of(model, x) if not use_reentrant else _gradients_by_backward(model, x)

    expected = gradients()
    store_in_few_bits(model, SMALL)
    actual = gradients()
    assert len(recorder.packed) == 1  # the second layer's input
    for place, (ours, truth) in enumerate(zip(actual, expected, strict=True)):
        if place == len(actual) - 2:  # its weight
            assert relative_error(ours, truth) < 2 * GAUSS_ERROR
        else:
            torch.testing.assert_close(ours, truth, rtol=0, atol=0)


def _gradients_by_backward(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    x = x.detach().requires_grad_()
    model(x).square().sum().backward()
    return [x.grad.clone(), *(weight.grad.clone() for weight in model.parameters())]


def test_hooks_of_others_are_left_in_charge(recorder: Recorder) -> None:
    module = nn.Linear(64, 64)
    store_in_few_bits(module, SMALL)
    seen = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t):
        module(torch.randn(4, 64, requires_grad=True)).sum().backward()
    assert seen
    assert recorder.packed == []


@pytest.mark.usefixtures("exact")
def test_dropout_draws_the_same_masks() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.GELU(), nn.Dropout(0.5), nn.Linear(64, 8))
    x = torch.randn(4, 64)
    torch.manual_seed(5)
    expected = gradients_of(model, x)
    store_in_few_bits(model, SMALL)
    torch.manual_seed(5)
    for ours, truth in zip(gradients_of(model, x), expected, strict=True):
        torch.testing.assert_close(ours, truth, rtol=0, atol=0)


def test_excluded_modules_are_exact(recorder: Recorder) -> None:
    model = make_model("llama")
    expected = loss_and_gradients(model)[1]
    store_in_few_bits(model, ActivationConfig(min_numel=0, exclude=["blocks.0", "blocks.1.mlp*", "head", "final_norm"]))
    actual = loss_and_gradients(model)[1]
    assert len(recorder.packed) == 2  # of blocks.1.attention_norm and blocks.1.attention.output
    for name in ("blocks.1.mlp.down.weight", "blocks.1.mlp_norm.weight", "head.weight"):
        assert torch.equal(actual[name], expected[name])
    assert not torch.equal(actual["blocks.1.attention.query.weight"], expected["blocks.1.attention.query.weight"])


# Lives and deaths.


def test_memory_is_flat_over_a_hundred_steps() -> None:
    model = make_model("llama", num_layers=1)
    handle = store_in_few_bits(model, SMALL)

    def num_tensors() -> int:
        gc.collect()
        return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())

    for _ in range(3):
        loss_and_gradients(model)
    before = num_tensors()
    for _ in range(97):  # a hundred steps
        loss_and_gradients(model)
    assert num_tensors() == before
    assert not handle.store._known
    assert not handle.store._recipes
    assert handle.store._decoded is None


def test_messages_are_freed_as_backward_passes_them() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    store_in_few_bits(model, SMALL)
    alive = []

    def count(*_: Any) -> None:
        alive.append(sum(type(thing) is Quantized for thing in gc.get_objects()))

    model[0].weight.register_post_accumulate_grad_hook(count)
    loss = model(torch.randn(4, 64)).sum()
    count()
    loss.backward()  # the graph lives on with it
    assert alive[0] == 4
    assert alive[1] <= 1


def test_an_exception_in_forward_leaves_no_mode_behind() -> None:
    class Failing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            self.linear(x)
            raise ValueError("stop")

    model = Failing()
    handle = store_in_few_bits(model, ActivationConfig(min_numel=0, hooked=["*"]))
    for _ in range(2):
        with pytest.raises(ValueError, match="stop"):
            model(torch.randn(4, 64))
        assert torch.overrides._len_torch_function_stack() == 0
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert handle._depth == 0
    handle.remove()


def test_removal_leaves_no_hook_and_a_copy_of_the_model_works() -> None:
    model = make_model("gpt")
    handle = store_in_few_bits(model, SMALL)
    twin = copy.deepcopy(model)
    loss_and_gradients(twin)
    handle.remove()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    loss = next_token_loss(model(tokens()[:, :-1]), tokens()[:, 1:])
    loss.backward()
    assert model.head.weight.grad is not None


def test_what_was_stored_before_removal_is_good_for_its_backward() -> None:
    module = nn.Linear(64, 8)
    handle = store_in_few_bits(module, SMALL)
    x = torch.randn(4, 64)
    output = module(x)
    handle.remove()
    output.sum().backward()
    assert relative_error(module.weight.grad, x.sum(0).expand(8, -1)) < 2 * GAUSS_ERROR


def test_a_compiled_model_is_refused() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU())
    model[1].compile()
    with pytest.raises(RuntimeError, match=r"module '1' is compiled.*Leave it uncompiled, or name it in exclude"):
        store_in_few_bits(model)
    assert isinstance(store_in_few_bits(model, {"exclude": ["1"]}), StoredActivations)


def test_a_model_that_is_compiled_later_is_refused_at_its_first_call() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU())
    store_in_few_bits(model, SMALL)
    compiled = torch.compile(model, backend="eager")
    with pytest.raises(RuntimeError, match=r"cannot be stored in few bits under torch.compile.* exclude the compiled"):
        compiled(torch.randn(4, 64))


@pytest.mark.parametrize("excluded", ["0", ""])
def test_excluded_modules_may_be_compiled(excluded: str) -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(64, 64), nn.GELU()), nn.Linear(64, 8))
    model[0].compile(backend="eager")
    handle = store_in_few_bits(model, ActivationConfig(min_numel=0, exclude=[excluded or "0.*", "0"]))
    for _ in range(2):
        model(torch.randn(4, 64)).sum().backward()
        assert set(handle.ledger.rows) == {("1", "linear")}


def test_no_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="config='none' stores nothing in few bits; use 'agoq'"):
        store_in_few_bits(nn.Linear(2, 2), "none")
