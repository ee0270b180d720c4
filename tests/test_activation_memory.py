"""What a forward leaves for its backward: predicted from sizes, counted by module and kind, and the same."""

import pytest
import torch
from torch import Tensor, nn

from examples.plans import next_token_loss
from lightning_taco.activations import (
    ActivationConfig,
    BlockSizes,
    Ledger,
    StoredBytes,
    measure_stored,
    predict_block,
    store_in_few_bits,
)
from tests.test_activations import SMALL, make_model, tokens

FULL = BlockSizes(num_tokens=1000, hidden_size=1024, ffn_size=4096, kv_size=1024)
U = 1000 * 1024 * 2


def forward_of(model: nn.Module) -> Tensor:
    return next_token_loss(model(tokens()[:, :-1]), tokens()[:, 1:])


@pytest.mark.parametrize("kind", ["llama", "gpt"])
def test_measured_as_predicted(kind: str) -> None:
    model = make_model(kind, num_layers=1, hidden_size=128, ffn_size=256)
    handle = store_in_few_bits(model, SMALL)
    result = measure_stored(handle, lambda: forward_of(model))
    is_llama = kind == "llama"
    sizes = BlockSizes(
        num_tokens=48,
        hidden_size=128,
        ffn_size=256,
        kv_size=64 if is_llama else 128,
        is_gated=is_llama,
        value_bytes=4,
        shares_attention_output=not is_llama,
    )
    predicted = predict_block(sizes, SMALL)
    rows = {key: row for key, row in result.ledger.rows.items() if key[0].startswith("blocks.0")}

    def measured(kind: str) -> StoredBytes:
        return sum((row for key, row in rows.items() if key[1] == kind and key != ROTARY), StoredBytes())

    assert measured("linear").stock_bytes == predicted["linear"].stock_bytes
    assert measured("linear").stored_bytes == predicted["linear"].stored_bytes
    assert measured("activation").stock_bytes == predicted["activation"].stock_bytes
    assert measured("activation").stored_bytes == predicted["activation"].stored_bytes
    assert measured("norm").stored_bytes == predicted["norm"].stored_bytes
    # RMSNorm is several operations on CPU and keeps a copy more; each norm keeps numbers for each token.
    copies = 2 if is_llama else 1
    assert measured("norm").stock_bytes == pytest.approx(copies * predicted["norm"].stock_bytes, rel=0.02)
    assert measured("attention").stock_bytes == pytest.approx(predicted["attention"].stock_bytes, rel=0.02)
    assert measured("attention").stored_bytes == measured("attention").stock_bytes
    assert result.allocator_stock_bytes is None
    assert result.saved_share > 0.6


ROTARY = ("blocks.0.attention", "activation")  # cosines and sines, which all layers share


def test_the_papers_units() -> None:
    """28U and 7.75U for full heads and 4H, where it counts four copies for the norms, five for attention."""
    predicted = predict_block(FULL, ActivationConfig())
    stock = {kind: row.stock_bytes / U for kind, row in predicted.items()}
    assert stock == {"norm": 2, "activation": 12, "linear": 7, "attention": 4}
    stored = sum(row.stored_bytes for row in predicted.values()) / U
    scales = 0.25 / 4  # of 4 bits
    assert stored == pytest.approx(4 + (0.5 + 2 + 0.25) * (1 + scales), abs=1e-3)
    assert stored < 7.75


def test_a_llama_8b_layer_stores_less_than_a_quarter() -> None:
    sizes = BlockSizes(num_tokens=8192, hidden_size=4096, ffn_size=14336, kv_size=1024)
    total = sum(predict_block(sizes, ActivationConfig()).values(), StoredBytes())
    assert total.stock_bytes == 21.5 * 8192 * 4096 * 2
    assert 1 - total.stored_bytes / total.stock_bytes > 0.75


def test_an_h200s_allocator_saw_what_is_predicted_but_for_the_input_that_it_was_given() -> None:
    """1,377 MB stock and 347 MB in FP4, of one block (examples/results, 2026-11-30) whose input was there before.

    Were it attention's result that is shared with the output projection, FP4 would have taken 18 MB less.
    """
    sizes = BlockSizes(num_tokens=8192, hidden_size=4096, ffn_size=14336, kv_size=1024)
    total = sum(predict_block(sizes, ActivationConfig()).values(), StoredBytes())
    given = 8192 * 4096 * 2
    statistics = 4 * 8192 * (32 + 2)  # one fp32 a token of each head and each norm
    assert (total.stock_bytes - given + statistics) / 1e6 == pytest.approx(1377, abs=1)
    assert (total.stored_bytes + statistics) / 1e6 == pytest.approx(347, abs=1)


def test_ranks_share_heads_and_feed_forward_and_the_stream_if_it_is_split() -> None:
    whole = predict_block(FULL, SMALL)
    plain = predict_block(BlockSizes(**{**vars(FULL), "tensor_parallel_size": 2}), SMALL)
    split = predict_block(BlockSizes(**{**vars(FULL), "tensor_parallel_size": 2, "sequence_parallel": True}), SMALL)
    assert plain["attention"].stored_bytes == whole["attention"].stored_bytes / 2
    assert plain["norm"] == whole["norm"]
    assert split["norm"].stored_bytes == whole["norm"].stored_bytes / 2
    gathered = 2 * 1000 * 1024 * SMALL.bits_per_value / 8
    assert split["linear"].stored_bytes == plain["linear"].stored_bytes + gathered


def test_layers_and_kinds_add_up() -> None:
    ledger = Ledger()
    ledger.add("model.blocks.3.mlp.up", "linear", 10, 2)
    ledger.add("model.blocks.3.norm", "norm", 20, 3)
    ledger.add("model.head", "linear", 30, 4)
    assert ledger.total == StoredBytes(60, 9, 3)
    assert ledger.by_kind() == {"norm": StoredBytes(20, 3, 1), "linear": StoredBytes(40, 6, 2)}
    assert ledger.by_layer() == {"model.blocks.3": StoredBytes(30, 5, 2), "model.head": StoredBytes(30, 4, 1)}
    assert StoredBytes(60, 9).ratio == pytest.approx(60 / 9)
    assert StoredBytes().ratio == 1
    assert StoredBytes(5, 0).ratio == float("inf")
    ledger.clear()
    assert ledger.total == StoredBytes()


def test_masks_and_integers_are_counted_and_parameters_are_not() -> None:
    model = nn.Sequential(nn.Embedding(50, 64), nn.Dropout(0.5), nn.Linear(64, 8))
    handle = store_in_few_bits(model, SMALL)
    result = measure_stored(handle, lambda: model(torch.randint(50, (4, 16))).sum())
    rows = result.ledger.rows
    assert rows[("0", "other")].stock_bytes == 4 * 16 * 8
    assert rows[("1", "other")].stock_bytes == rows[("1", "other")].stored_bytes > 0
    assert rows[("2", "linear")].stock_bytes == 4 * 16 * 64 * 4
    assert set(rows) == {("0", "other"), ("1", "other"), ("2", "linear")}
