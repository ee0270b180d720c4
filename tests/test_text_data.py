"""The text data module: what it reads, what it caches, how it splits, and what it says when it cannot."""

import logging
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import ModelParallelStrategy
from tokenizers import Tokenizer

from examples import text_data
from examples.text_data import TextDataModule, TokenSamples, find_files
from tests.ranks import run_forked

WORDS = ["lorem", "ipsum", "dolor sit", "amet,", "naïve", "Ω≈ç", "√∫", "\N{SNOWMAN}", "\n\tdef f(x):\n", "x\r\n"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "text"
    (root / "deep" / "er").mkdir(parents=True)
    for index in range(12):
        below = (root, root / "deep", root / "deep" / "er")[index % 3]
        text = " ".join(random.Random(index).choices(WORDS, k=240))
        below.joinpath(f"{index}.txt").write_bytes(f"lorem {index}\n{text}".encode())
    return root


@pytest.fixture
def cache(tmp_path: Path) -> str:
    return str(tmp_path / "cache")


def prepared(folder: Path, cache: str, **options: Any) -> TextDataModule:
    sizes = {"vocab_size": 300, "sequence_length": 16, "batch_size": 4, **options}
    data = TextDataModule(files=str(folder / "**" / "*.txt"), cache_dir=cache, **sizes)
    data.prepare_data()
    data.setup()
    return data


def parts(data: TextDataModule) -> list[np.ndarray]:
    return [np.asarray(data._samples[name].tokens) for name in ("train", "validation", "test")]


def test_tokens_decode_to_the_text_byte_for_byte(folder: Path, cache: str) -> None:
    data = prepared(folder, cache)
    text = data.tokenizer().decode(np.concatenate(parts(data)).tolist(), skip_special_tokens=False)
    paths = find_files(data.patterns, None)
    assert text == "".join(path.read_bytes().decode() + text_data.END_OF_TEXT for path in paths)
    assert len(paths) == 12


def test_parts_are_disjoint_and_complete(folder: Path, cache: str) -> None:
    data = prepared(folder, cache)
    train, validation, test = parts(data)
    whole = np.load(next(Path(cache).glob("*/tokens.npy")))
    assert np.array_equal(np.concatenate([train, validation, test]), whole)
    assert len(train) == int(0.9 * len(whole))
    assert len(validation) == pytest.approx(0.05 * len(whole), abs=1)


def test_samples_hold_each_token_with_its_successor() -> None:
    samples = TokenSamples(np.arange(65500, 65521, dtype=np.uint16), sequence_length=4)
    assert len(samples) == 5
    pairs = [samples[index] for index in range(5)]
    assert torch.cat([inputs for inputs, _ in pairs]).tolist() == list(range(65500, 65520))
    assert all(torch.equal(inputs + 1, targets) for inputs, targets in pairs)  # uint16 would wrap at 65536
    assert all(tensor.dtype == torch.int64 for pair in pairs for tensor in pair)
    assert [len(TokenSamples(np.zeros(n, np.uint16), 4)) for n in (0, 1, 4, 5, 8, 9)] == [0, 0, 0, 1, 1, 2]


def test_training_batches_have_one_shape(folder: Path, cache: str) -> None:
    data = prepared(folder, cache, batch_size=7)
    data._samples["train"].tokens = data._samples["train"].tokens[: 16 * 24 + 1]  # 3 batches and 3 samples
    assert [inputs.shape for inputs, _ in data.train_dataloader()] == [(7, 16)] * 3
    assert sum(len(inputs) for inputs, _ in data.val_dataloader()) == len(data._samples["validation"])


def test_second_run_reads_the_cache(folder: Path, cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = parts(prepared(folder, cache))
    monkeypatch.setattr(text_data, "train_tokenizer", lambda *_: pytest.fail("trained a second time"))
    again = prepared(folder, cache, sequence_length=8, batch_size=2)  # neither is part of what is cached
    assert all(np.array_equal(now, then) for now, then in zip(parts(again), before, strict=True))
    assert isinstance(again._samples["train"].tokens, np.memmap)


@pytest.mark.parametrize("change", ["edited", "added", "vocabulary"])
def test_changed_text_is_encoded_anew(folder: Path, cache: str, change: str) -> None:
    prepared(folder, cache)
    if change == "edited":  # as long as before, and later
        path = folder / "0.txt"
        path.write_bytes(path.read_bytes().replace(b"lorem", b"merol"))
        os.utime(path, (2e9, 2e9))
    elif change == "added":
        (folder / "more.txt").write_text("more")
    prepared(folder, cache, vocab_size=299 if change == "vocabulary" else 300)
    assert len(list(Path(cache).glob("*/tokens.npy"))) == 2


def test_interrupted_preparation_leaves_nothing_half_done(
    folder: Path, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(path: Path, array: np.ndarray) -> None:
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(text_data, "_save_array", interrupted)
        with pytest.raises(KeyboardInterrupt):
            prepared(folder, cache)
    assert [path.name for path in Path(cache).glob("*/*")] == ["tokenizer.json"]
    assert len(prepared(folder, cache)._samples["train"]) > 0


def test_order_is_fixed_and_max_bytes_takes_whole_files(folder: Path) -> None:
    pattern = [str(folder / "**" / "*.txt")]
    paths = find_files(pattern, None)
    assert paths == find_files(pattern, None)
    assert paths != sorted(paths)
    total = sum(path.stat().st_size for path in paths[:3])
    assert find_files(pattern, total) == paths[:3]
    assert sum(path.stat().st_size for path in find_files(pattern, 2 * total + 7)) <= 2 * total + 7


def test_several_patterns_count_a_file_once(folder: Path) -> None:
    assert len(find_files([str(folder / "*.txt"), str(folder / "0.txt"), str(folder / "deep" / "*.txt")], None)) == 8


def test_default_is_the_standard_library_without_what_is_installed_below_it() -> None:
    paths = find_files(TextDataModule().patterns, None)
    names = {path.name for path in paths}
    assert {"argparse.py", "dataclasses.py", "statistics.py"} <= names
    assert not any("site-packages" in path.parts for path in paths)
    assert sum(path.stat().st_size for path in paths) > 4_000_000  # what the tiny configurations take


def test_default_cache_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert TextDataModule().cache_dir == tmp_path / "lightning_taco"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert TextDataModule().cache_dir == tmp_path / "home" / ".cache" / "lightning_taco"


def test_files_that_are_no_text_are_skipped_with_one_line(
    folder: Path, cache: str, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "latin.txt").write_bytes("naïve".encode("latin-1"))
    (folder / "zeros.txt").write_bytes(b"a\0b")
    (folder / "empty.txt").write_bytes(b"")
    with caplog.at_level(logging.WARNING):
        data = prepared(folder, cache)
    (record,) = [record for record in caplog.records if record.name == text_data.__name__]
    assert "skipped 2 of 15 files that are no UTF-8 text, such as" in record.getMessage()
    assert "a\0b" not in data.tokenizer().decode(np.concatenate(parts(data)).tolist())


def test_no_file_shows_the_pattern(cache: str) -> None:
    with pytest.raises(FileNotFoundError, match=r"No file matches '/nowhere/\*\*/\*\.txt', 'b\*'"):
        TextDataModule(files=["/nowhere/**/*.txt", "b*"], cache_dir=cache).prepare_data()
    with pytest.raises(FileNotFoundError, match="No file matches an empty list of patterns"):
        TextDataModule(files=[], cache_dir=cache).prepare_data()


def test_binary_files_only_is_an_error(tmp_path: Path, cache: str) -> None:
    (tmp_path / "a.bin").write_bytes(b"\xff\0")
    data = TextDataModule(files=str(tmp_path / "*.bin"), cache_dir=cache)
    with pytest.raises(ValueError, match=r"None of the 1 files that match '.*\*\.bin' holds readable UTF-8 text"):
        data.prepare_data()


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"batch_size": 10_000}, r"12 files .* gave \d+ tokens, so \d+ train samples .* at least 10000 are needed"),
        ({"sequence_length": 1000}, r"so 0 validation samples of sequence_length=1000, but at least 1 are needed"),
    ],
)
def test_too_little_text_shows_the_counts(folder: Path, cache: str, sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prepared(folder, cache, **sizes)


def test_cap_below_every_file_is_an_error(folder: Path, cache: str) -> None:
    with pytest.raises(ValueError, match="max_bytes=5 is less than each of the 12 files"):
        prepared(folder, cache, max_bytes=5)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"vocab_size": 256}, "vocab_size=256 is too small: a byte-level tokenizer needs at least 257"),
        ({"sequence_length": 0}, "sequence_length=0 must be at least 1"),
        ({"batch_size": 0}, "batch_size=0 must be at least 1"),
    ],
)
def test_impossible_sizes_are_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TextDataModule(**sizes)


def test_tokenizer_knows_every_byte(folder: Path, cache: str) -> None:
    tokenizer: Tokenizer = prepared(folder, cache).tokenizer()
    text = "".join(map(chr, range(0x180))) + "\N{GRINNING FACE}"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.get_vocab_size() == 300
    assert tokenizer.token_to_id(text_data.END_OF_TEXT) == 0


@pytest.mark.parametrize("tensor_parallel_size", [1, 2])
def test_ranks_of_one_tensor_parallel_group_read_the_same(folder: Path, cache: str, tensor_parallel_size: int) -> None:
    """Two ranks: with TP=2 they get equal batches, with DP=2 different ones."""
    prepared(folder, cache)

    class Reader(BoringModel):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[torch.Tensor] = []

        def configure_model(self) -> None:
            pass

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.seen.append(batch[0])
            return self.layer(torch.zeros(1, 32)).sum()

    def rank(rank: int) -> torch.Tensor:
        module = Reader()
        trainer = Trainer(
            accelerator="cpu",
            devices=2,
            strategy=ModelParallelStrategy(
                data_parallel_size=2 // tensor_parallel_size, tensor_parallel_size=tensor_parallel_size
            ),
            plugins=[LightningEnvironment()],
            max_steps=3,
            limit_val_batches=0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        data = TextDataModule(
            str(folder / "**" / "*.txt"), vocab_size=300, sequence_length=16, batch_size=4, cache_dir=cache
        )
        trainer.fit(module, data)
        return torch.cat(module.seen)

    first, second = run_forked(2, rank)
    if tensor_parallel_size == 2:
        assert torch.equal(first, second)
    else:
        rows = {tuple(row) for row in first.tolist()}
        assert not rows & {tuple(row) for row in second.tolist()}
