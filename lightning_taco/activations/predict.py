"""What one block of a language model keeps for its backward, from its sizes alone."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_taco.activations.ledger import StoredBytes
from lightning_taco.activations.settings import ActivationConfig


@dataclass(frozen=True, kw_only=True)
class BlockSizes:
    """Sizes of a transformer block, and how it is split.

    Args:
        num_tokens: of a batch: sequences times their length.
        hidden_size: width of the residual stream.
        ffn_size: width of the feed-forward layer.
        kv_size: width of keys and of values: heads times their width; below `hidden_size` for grouped queries.
        is_gated: SwiGLU (two projections into the feed-forward layer) instead of GELU.
        value_bytes: of one value: 2 for bf16.
        tensor_parallel_size: ranks that share a block.
        sequence_parallel: whether they share the residual stream too.
        shares_attention_output: whether the output projection reads attention's result as it lies in memory, so that
            both keep one tensor. Not where heads were put together anew, as rotary positions do.
    """

    num_tokens: int
    hidden_size: int
    ffn_size: int
    kv_size: int
    is_gated: bool = True
    value_bytes: int = 2
    tensor_parallel_size: int = 1
    sequence_parallel: bool = False
    shares_attention_output: bool = False


def predict_block(sizes: BlockSizes, config: ActivationConfig) -> dict[str, StoredBytes]:
    """Bytes on one rank, by kind, stock and stored; without the statistics of norms and of attention.

    Args:
        sizes: of the block.
        config: how it is stored.

    Returns:
        Kind of operation to bytes; add them up for the block.

    The block's input is among them: the norm that reads it keeps it, or its message. An allocator sees the former only
    if the input is made while it looks: a block alone, whose input is there already, seems to keep one tensor less.

    Source: AGoQ, arXiv 2605.00539, LAAQ, whose 28U and 7.75U (U = 2 bytes a value of the residual stream) are for a
    feed-forward layer of four times the hidden size, full heads, and norms that keep two copies of their input. Under
    sequence parallelism the layers behind a norm read what has been gathered, which is stored once more.
    """
    ranks = sizes.tensor_parallel_size
    stream = sizes.num_tokens * sizes.hidden_size
    own_stream = stream // ranks if sizes.sequence_parallel else stream
    heads, key_value = stream // ranks, 2 * sizes.num_tokens * sizes.kv_size // ranks
    ffn = sizes.num_tokens * sizes.ffn_size // ranks
    gathered = 2 * stream if sizes.sequence_parallel and ranks > 1 else 0
    output = 0 if sizes.shares_attention_output else heads

    def row(stock_values: int, few_bits_values: int, kept_values: int = 0) -> StoredBytes:
        few = int(few_bits_values * config.bits_per_value / 8)
        return StoredBytes(stock_values * sizes.value_bytes, few + kept_values * sizes.value_bytes)

    attention = 2 * heads + key_value
    return {
        "norm": row(2 * own_stream, 2 * own_stream),
        "activation": row(3 * ffn, 2 * ffn) if sizes.is_gated else row(ffn, ffn),
        "linear": row(2 * stream + output + ffn, gathered + output),
        "attention": row(attention, 0, attention),
    }
