"""`TahQuant`: activations between pipeline stages in 4.4 bits a value (arXiv 2506.01352), as one ``uint8`` message.

CUDA tensors go through fused Triton kernels, all others, and CUDA without triton, through the torch reference. Both
give the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lightning_taco.codec.checks import require_message, require_seed, require_value_dtype, uses_triton
from lightning_taco.codec.tah_quant_layout import TahQuantLayout, samples_tokens_channels
from lightning_taco.codec.tah_quant_reference import decode_reference, encode_reference
from lightning_taco.config import ROUNDINGS, require_one_of

ROTATIONS = ("gated", "always", "never")
SCALE_FORMATS = ("bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class TahQuant:
    """Tile-wise adaptive Hadamard quantisation: 3 bits for the tokens of lowest entropy, 4 for the others.

    Args:
        low_entropy_share: share of each sample's tokens, rounded down, that take 3 bits a value; from 0 to 1.
        rotation: which tiles of 64 channels are rotated: ``"gated"``, the paper's, those whose largest magnitude is at
            least twice the second largest; ``"always"``, all but constant ones, with less error wherever some values
            are much larger than others; ``"never"``.
        scale_format: of each tile's scale and zero: ``"bfloat16"``, which holds whatever the values are, or the paper's
            ``"float16"``, in which small steps vanish and what is beyond 65504 makes its tile NaN.
        rounding: ``"nearest"``, the paper's, or ``"stochastic"``: without error on average, by a seed.

    Raises:
        ValueError: for a value that is not one of the above; the message says which are.

    Example:
        >>> codec = TahQuant()
        >>> activation = torch.randn(2, 10, 64, dtype=torch.bfloat16)
        >>> message = codec.encode(activation)
        >>> message.shape, codec.message_bytes(activation.shape, activation.dtype)
        (torch.Size([736]), 736)
        >>> codec.decode(message, activation.shape, activation.dtype).shape
        torch.Size([2, 10, 64])
    """

    low_entropy_share: float = 0.2
    rotation: Literal["gated", "always", "never"] = "gated"
    scale_format: Literal["bfloat16", "float16"] = "bfloat16"
    rounding: Literal["nearest", "stochastic"] = "nearest"

    def __post_init__(self) -> None:
        share = self.low_entropy_share
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share <= 1:
            raise ValueError(f"low_entropy_share={share!r} is not a share of tokens; use a number from 0 to 1.")
        require_one_of("rotation", self.rotation, ROTATIONS)
        require_one_of("scale_format", self.scale_format, SCALE_FORMATS)
        require_one_of("rounding", self.rounding, ROUNDINGS)

    def message_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Bytes of the message of a tensor, known from its shape alone.

        Args:
            shape: ``[samples, ..., channels]``, tokens between; ``[tokens, channels]`` or ``[channels]`` is one sample.
            dtype: bf16, fp16 or fp32; all take the same.

        Raises:
            TypeError: for another dtype.
        """
        require_value_dtype("values", dtype)
        return self._layout(shape).message_bytes

    @torch.no_grad()
    def encode(self, tensor: Tensor, *, seed: int = 0) -> Tensor:
        """Encode a tensor.

        Args:
            tensor: bf16, fp16 or fp32, of a shape as in `message_bytes`, with any strides.
            seed: of stochastic rounding, from 0 to 2^62 - 1.

        Returns:
            ``uint8 [message_bytes]``. What fills parts up to 16 bytes has no defined content.

        Raises:
            TypeError: for another dtype.
            ValueError: for a seed out of range.

        Cost: reads the tensor twice (once for the entropies), writes the message once; three launches.

        Source: TAH-Quant, arXiv 2506.01352, section 3; differences in `codec.tah_quant_reference`.
        """
        require_value_dtype("values", tensor.dtype)
        require_seed(seed)
        layout = self._layout(tensor.shape)
        if not uses_triton(tensor):
            return encode_reference(tensor.reshape(samples_tokens_channels(tensor.shape)), layout, self, seed)
        from lightning_taco.codec import kernels_tah_quant

        message = torch.empty(layout.message_bytes, dtype=torch.uint8, device=tensor.device)
        tokens = tensor.reshape(layout.num_tokens, layout.num_channels)
        tokens = tokens if tokens.stride(1) == 1 else tokens.contiguous()
        return kernels_tah_quant.encode_triton(tokens, layout, self, message, seed=seed)

    @torch.no_grad()
    def decode(self, message: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Decode a message.

        Args:
            message: ``uint8 [message_bytes]``, contiguous.
            shape: of the tensor that was encoded, by the same settings.
            dtype: of the result, bf16, fp16 or fp32.

        Returns:
            A tensor of `shape` and `dtype`. A tile that held a NaN or an Inf is NaN.

        Raises:
            TypeError: for another dtype.
            ValueError: for a message whose size does not fit.

        Cost: reads the message once, writes the tensor once; two launches.
        """
        require_value_dtype("decoded values", dtype)
        layout = self._layout(shape)
        require_message(message, layout.message_bytes, f"a tensor {tuple(shape)} in {self}")
        if not uses_triton(message):
            return decode_reference(message, layout, self, dtype).view(shape)
        from lightning_taco.codec import kernels_tah_quant

        tokens = torch.empty(layout.num_tokens, layout.num_channels, dtype=dtype, device=message.device)
        return kernels_tah_quant.decode_triton(message, layout, self, tokens).view(shape)

    def _layout(self, shape: tuple[int, ...]) -> TahQuantLayout:
        return TahQuantLayout.of(tuple(shape), self.low_entropy_share)
