"""What all functions of the codec ask of their arguments, and whether they go through kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_taco import _compat
from lightning_taco.codec.layout import ALIGNMENT_BYTES, SCALE_BYTES, MessageLayout
from lightning_taco.config import CodecConfig

WORD_BYTES = SCALE_BYTES
VALUE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def uses_triton(tensor: Tensor) -> bool:
    """Whether kernels can read `tensor`."""
    return tensor.is_cuda and _compat.has_triton()


def require_resolved(codec: CodecConfig) -> None:
    """Refuse ``element="auto"``."""
    if codec.element == "auto":
        raise TypeError("the codec's element is still 'auto'; name one with codec.resolved('e4m3' or 'int8').")


def require_value_dtype(what: str, dtype: torch.dtype) -> None:
    """Refuse what is neither bf16, fp16 nor fp32."""
    if dtype not in VALUE_DTYPES:
        raise TypeError(f"{what} have dtype {dtype}; bfloat16, float16 or float32 is needed.")


def require_message(message: Tensor, message_bytes: int, what: str) -> None:
    """Refuse what is not the one contiguous message of `message_bytes` that `what` takes."""
    if message.dtype != torch.uint8 or message.shape != (message_bytes,) or not message.is_contiguous():
        raise ValueError(
            f"the message is {message.dtype} {tuple(message.shape)}{'' if message.is_contiguous() else ', with gaps'}; "
            f"{what} needs a contiguous uint8 [{message_bytes}]."
        )
    if message.numel() and message.data_ptr() % ALIGNMENT_BYTES:
        raise ValueError(
            f"the message begins {message.data_ptr() % ALIGNMENT_BYTES} bytes after a multiple of {ALIGNMENT_BYTES}, "
            "but its parts are read as whole words; pass message.clone(), or begin it at such a multiple."
        )


def require_messages(messages: Tensor, codec: CodecConfig, num_values: int) -> None:
    """Refuse what are not messages of `num_values` in `codec`, one after the other."""
    require_resolved(codec)
    message_bytes = MessageLayout.of(num_values, codec).message_bytes
    if messages.dtype != torch.uint8 or messages.dim() != 2 or messages.shape[1] != message_bytes:
        raise ValueError(
            f"messages have shape {tuple(messages.shape)} and dtype {messages.dtype}; {num_values} values in "
            f"{codec} need uint8 [rows, {message_bytes}]."
        )
    if not messages.is_contiguous():
        raise ValueError(
            "messages are not contiguous, but each must follow the one before; pass messages.contiguous()."
        )
    require_whole_words("the tensor of messages", messages)


def require_whole_words(what: str, messages: Tensor) -> None:
    """Refuse messages that begin within a word: codes and scales are read and written by words."""
    beyond = messages.storage_offset() * messages.element_size() % WORD_BYTES
    if beyond and messages.numel():
        raise ValueError(
            f"{what} begins {beyond} bytes after a multiple of {WORD_BYTES} in its storage, but is read and written by "
            f"words of {WORD_BYTES} bytes; let it begin at such a multiple, or pass a clone()."
        )


def require_seed(seed: int) -> None:
    """Refuse a seed that the generator does not take."""
    if not 0 <= seed < 1 << 62:
        raise ValueError(f"seed={seed} is out of range; give an integer from 0 to 2^62 - 1.")
