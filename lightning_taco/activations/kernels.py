"""SwiGLU on stored messages as fused Triton kernels: what is decoded never reaches memory.

`activations.functions` has the oracle: decode, then torch's own operations. These differ from it by rounding, since
they stay in fp32 between the steps.

A program owns a tile of blocks, as in `codec.kernels`.

Example: 300 values, block 128: one program; blocks [0..127], [128..255], [256..299 and zeros].
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_taco.codec.kernel_launch import SEEDS, constants_of, grid_of, launch, seed_halves
from lightning_taco.codec.kernels_messages import load_blocks, store_message, store_values, to_fp32, value_mask
from lightning_taco.codec.kernels_numbers import hadamard, rotated
from lightning_taco.codec.layout import MessageLayout
from lightning_taco.config import CodecConfig


@triton.jit
def _values(message, blocks, num_blocks, kind_ptr, C: tl.constexpr):
    """The tile's values, parts of fp32 [tile, width], each at its place.

    Rounded to the dtype that `kind_ptr` points at, as a decoded tensor would be: so all that is made of one message is
    made of the same values.
    """
    PARTS: tl.constexpr = C.parts
    parts = load_blocks(message, blocks, num_blocks, C)
    if C.is_rotated:
        parts = hadamard(parts, C)
    rounded = ()
    for part in tl.static_range(PARTS):
        rounded = rounded + (parts[part].to(kind_ptr.dtype.element_ty).to(tl.float32),)
    return rounded


@triton.jit
def _gate_and_up(gate_ptr, up_ptr, num_blocks, kind_ptr, C: tl.constexpr):
    """This program's blocks, int64 [tile], and their values of gate and of up."""
    blocks = tl.program_id(0).to(tl.int64) * C.tile + tl.arange(0, C.tile)
    num_blocks = tl.cast(num_blocks, tl.int64)
    return blocks, _values(gate_ptr, blocks, num_blocks, kind_ptr, C), _values(up_ptr, blocks, num_blocks, kind_ptr, C)


@triton.jit
def silu_times_kernel(gate_ptr, up_ptr, product_ptr, num_values, num_blocks, C: tl.constexpr):
    """Messages of gate and up -> silu(gate) * up, [num_values]."""
    PARTS: tl.constexpr = C.parts
    blocks, gate, up = _gate_and_up(gate_ptr, up_ptr, num_blocks, product_ptr, C)
    product = ()
    for part in tl.static_range(PARTS):
        product = product + (gate[part] / (1.0 + tl.exp(-gate[part])) * up[part],)
    store_values(product_ptr, product, blocks, num_values, C)


@triton.jit
def silu_times_backward_kernel(
    gate_ptr, up_ptr, gradient_ptr, gate_gradient_ptr, up_gradient_ptr, num_values, num_blocks, C: tl.constexpr
):
    """Messages of gate and up, and the gradient of their product -> the gradients of gate and up, [num_values] each."""
    PARTS: tl.constexpr = C.parts
    blocks, gate, up = _gate_and_up(gate_ptr, up_ptr, num_blocks, gradient_ptr, C)
    of_gate, of_up = (), ()
    for part in tl.static_range(PARTS):
        offsets = blocks[:, None] * C.block_size + part * C.width + tl.arange(0, C.width)[None, :]
        gradient = tl.load(gradient_ptr + offsets, mask=value_mask(offsets, num_values, C), other=0.0)
        gradient = to_fp32(gradient, C)
        sigmoid = 1.0 / (1.0 + tl.exp(-gate[part]))
        slope = sigmoid * (1.0 + gate[part] * (1.0 - sigmoid))
        of_gate = of_gate + (gradient * up[part] * slope,)
        of_up = of_up + (gradient * gate[part] * sigmoid,)
    store_values(gate_gradient_ptr, of_gate, blocks, num_values, C)
    store_values(up_gradient_ptr, of_up, blocks, num_values, C)


@triton.jit(do_not_specialize=SEEDS)
def multiply_and_encode_kernel(
    activated_ptr, up_ptr, product_ptr, message_ptr, num_values, num_blocks, seed_low, seed_high, C: tl.constexpr
):
    """activated * up, [num_values], and the message of up, which is read for both at once."""
    PARTS: tl.constexpr = C.parts
    blocks = tl.program_id(0).to(tl.int64) * C.tile + tl.arange(0, C.tile)
    kind = product_ptr.dtype.element_ty
    parts = ()
    for part in tl.static_range(PARTS):
        offsets = blocks[:, None] * C.block_size + part * C.width + tl.arange(0, C.width)[None, :]
        mask = value_mask(offsets, num_values, C)
        up = to_fp32(tl.load(up_ptr + offsets, mask=mask, other=0.0), C)
        activated = to_fp32(tl.load(activated_ptr + offsets, mask=mask, other=0.0), C)
        tl.store(product_ptr + offsets, (activated * up).to(kind), mask=mask)
        parts = parts + (up,)
    parts = rotated(parts, kind, C)
    alpha = tl.full([C.tile, 1], 1.0, tl.float32)
    num_blocks = tl.cast(num_blocks, tl.int64)
    store_message(parts, alpha, 1.0, message_ptr, blocks, 0, num_blocks, seed_low, seed_high, C)


def multiply_and_encode_triton(
    activated: Tensor, up: Tensor, codec: CodecConfig, message: Tensor, *, seed: int = 0
) -> Tensor:
    """``activated * up``, as torch rounds it, and the message of `up`, as `encode` writes it.

    Args:
        activated: floating point, contiguous.
        up: the same, of the same shape and dtype.
        codec: of the message; merged scales.
        message: ``uint8 [1, message_bytes]``, to write to.
        seed: of stochastic rounding.

    Cost: reads both tensors once, writes the product and the message once; one launch.
    """
    product = torch.empty_like(up)
    num_values, num_blocks = _sizes(up.numel(), codec)
    if num_values:
        constants = constants_of(codec, up.device, num_values)
        arguments = (activated, up, product, message, num_values, num_blocks, *seed_halves(seed))
        launch(multiply_and_encode_kernel, grid_of(num_values, constants, 1), arguments, (constants,))
    return product


def silu_times_triton(gate: Tensor, up: Tensor, codec: CodecConfig, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """``silu(gate) * up`` from the messages of both.

    Args:
        gate: ``uint8 [1, message_bytes]``.
        up: the same.
        codec: of both; merged scales.
        shape: of the values.
        dtype: of the values.

    Cost: reads both messages once, writes the product once; one launch.
    """
    product = gate.new_empty(shape, dtype=dtype)
    if product.numel():
        sizes = _sizes(product.numel(), codec)
        constants = constants_of(codec, gate.device, sizes[0])
        launch(silu_times_kernel, grid_of(sizes[0], constants, 1), (gate, up, product, *sizes), (constants,))
    return product


def silu_times_backward_triton(gate: Tensor, up: Tensor, codec: CodecConfig, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up from their messages and the gradient of ``silu(gate) * up``.

    Args:
        gate: ``uint8 [1, message_bytes]``.
        up: the same.
        codec: of both; merged scales.
        gradient: floating point, any shape of as many values.

    Returns:
        Two tensors like `gradient`, contiguous.

    Cost: reads both messages and the gradient once, writes both gradients once; one launch.
    """
    gradient = gradient.contiguous()
    of_gate, of_up = torch.empty_like(gradient), torch.empty_like(gradient)
    if gradient.numel():
        sizes = _sizes(gradient.numel(), codec)
        constants = constants_of(codec, gate.device, sizes[0])
        arguments = (gate, up, gradient, of_gate, of_up, *sizes)
        launch(silu_times_backward_kernel, grid_of(sizes[0], constants, 1), arguments, (constants,))
    return of_gate, of_up


def _sizes(num_values: int, codec: CodecConfig) -> tuple[int, int]:
    return num_values, MessageLayout.of(num_values, codec).num_blocks
