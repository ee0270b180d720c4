"""Text files as fixed-length token samples: a byte-level BPE tokenizer trained once, tokens memory-mapped.

    data = TextDataModule(files="/data/books/**/*.txt", vocab_size=8192, sequence_length=1024, batch_size=8)

With no `files` the text is the Python standard library's own source code, which every machine has.
"""

import glob
import hashlib
import json
import logging
import os
import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

logger = logging.getLogger(__name__)

END_OF_TEXT = "<|endoftext|>"  # token 0, between two files
CACHE_FORMAT = 1  # part of the cache's key: raise it when what is written changes
SPLITS = {"train": (0.0, 0.9), "validation": (0.9, 0.95), "test": (0.95, 1.0)}  # parts of all tokens
MIN_VOCAB_SIZE = 257  # every byte, and the end of a text


class TokenSamples(Dataset[tuple[Tensor, Tensor]]):
    """Every `sequence_length` tokens with the tokens that follow each of them, both int64 [sequence_length]."""

    def __init__(self, tokens: np.ndarray, sequence_length: int) -> None:
        self.tokens = tokens
        self.sequence_length = sequence_length

    def __len__(self) -> int:
        return max(0, (len(self.tokens) - 1) // self.sequence_length)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.sequence_length
        window = torch.from_numpy(self.tokens[start : start + self.sequence_length + 1].astype(np.int64))
        return window[:-1], window[1:]


class TextDataModule(pl.LightningDataModule):
    """Next-token samples from text files.

    The files are shuffled once by a fixed seed and joined; the first 90% of the tokens are for training, then 5%
    for validation and 5% for testing. Which rank reads which batch is the strategy's matter: ranks of one
    tensor-parallel group get the same, for the Trainer puts in the sampler that the strategy describes.

    Args:
        files: a glob pattern, or a list of them (`**` for any depth); None takes the Python standard library.
        vocab_size: number of tokens to learn, at least 257; a small text may give fewer.
        sequence_length: tokens in a sample.
        batch_size: samples in a batch of one data-parallel rank.
        max_bytes: take whole files, in their shuffled order, up to this many bytes; None takes all.
        cache_dir: where tokenizer and tokens are kept; None takes `$XDG_CACHE_HOME/lightning_taco`, or
            `~/.cache/lightning_taco`.
        num_workers: processes that load batches; the tokens are memory-mapped, so 0 is fast enough.

    Raises:
        FileNotFoundError: no file matches.
        ValueError: a size out of range, no readable text, or too little of it for one batch.
    """

    def __init__(
        self,
        files: str | list[str] | None = None,
        vocab_size: int = 8192,
        sequence_length: int = 256,
        batch_size: int = 8,
        max_bytes: int | None = 16_000_000,
        cache_dir: str | None = None,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        if vocab_size < MIN_VOCAB_SIZE:
            raise ValueError(
                f"vocab_size={vocab_size} is too small: a byte-level tokenizer needs at least {MIN_VOCAB_SIZE}"
                f" (256 bytes and the end of a text)."
            )
        for name, value in (("sequence_length", sequence_length), ("batch_size", batch_size)):
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1.")
        self.patterns = _patterns(files)
        self.vocab_size = vocab_size
        self.sequence_length = sequence_length
        self.batch_size = batch_size
        self.max_bytes = max_bytes
        self.cache_dir = Path(cache_dir).expanduser() if cache_dir else _default_cache_dir()
        self.num_workers = num_workers
        self._samples: dict[str, TokenSamples] = {}

    def prepare_data(self) -> None:
        """Train the tokenizer and encode the text, unless the cache holds both; one process of a node does it."""
        paths = find_files(self.patterns, self.max_bytes)
        folder = self._folder(paths)
        if (folder / "tokens.npy").exists():
            return
        folder.mkdir(parents=True, exist_ok=True)
        texts = list(_read_texts(paths))
        if not texts:
            raise ValueError(
                f"None of the {len(paths)} files that match {_shown(self.patterns)} holds readable UTF-8 text."
            )
        logger.info("training a tokenizer of %d tokens on %d files", self.vocab_size, len(texts))
        tokenizer = train_tokenizer(texts, self.vocab_size)
        _write(folder / "tokenizer.json", lambda path: tokenizer.save(str(path)))
        tokens = encode_texts(tokenizer, texts)
        # Last, and in one step: a folder with this file is complete, whoever else is writing to it.
        _write(folder / "tokens.npy", lambda path: _save_array(path, tokens))

    def setup(self, stage: str | None = None) -> None:
        """Map the cached tokens and cut them into the three parts."""
        if self._samples:
            return
        paths = find_files(self.patterns, self.max_bytes)
        tokens = np.load(self._folder(paths) / "tokens.npy", mmap_mode="r")
        samples = {
            name: TokenSamples(tokens[int(start * len(tokens)) : int(end * len(tokens))], self.sequence_length)
            for name, (start, end) in SPLITS.items()
        }
        self._check_enough(samples, num_tokens=len(tokens), num_files=len(paths))
        self._samples = samples

    def samples(self, split: str) -> TokenSamples:
        """The samples of ``"train"``, ``"validation"`` or ``"test"``; call it after `setup`."""
        return self._samples[split]

    def tokenizer(self) -> Tokenizer:
        """The trained tokenizer; call it after `prepare_data`."""
        return Tokenizer.from_file(str(self._folder(find_files(self.patterns, self.max_bytes)) / "tokenizer.json"))

    def train_dataloader(self) -> DataLoader:
        return self._loader("train", shuffle=True, drop_last=True)  # batches of one shape only

    def val_dataloader(self) -> DataLoader:
        return self._loader("validation")

    def test_dataloader(self) -> DataLoader:
        return self._loader("test")

    def predict_dataloader(self) -> DataLoader:
        return self._loader("test")

    def _loader(self, split: str, shuffle: bool = False, drop_last: bool = False) -> DataLoader:
        return DataLoader(
            self._samples[split],
            batch_size=self.batch_size,
            shuffle=shuffle,
            drop_last=drop_last,
            num_workers=self.num_workers,
            pin_memory=torch.cuda.is_available(),
        )

    def _folder(self, paths: list[Path]) -> Path:
        stats = [(str(path), path.stat()) for path in paths]
        key = [CACHE_FORMAT, self.vocab_size, [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]]
        return self.cache_dir / f"text-{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:24]}"

    def _check_enough(self, samples: dict[str, TokenSamples], num_tokens: int, num_files: int) -> None:
        num_replicas = 1
        if self.trainer is not None and self.trainer.distributed_sampler_kwargs is not None:
            num_replicas = self.trainer.distributed_sampler_kwargs["num_replicas"]
        needed = {"train": self.batch_size * num_replicas, "validation": 1, "test": 1}
        for name, part in samples.items():
            if len(part) < needed[name]:
                raise ValueError(
                    f"The text is too short: {num_files} files that match {_shown(self.patterns)} gave"
                    f" {num_tokens} tokens, so {len(part)} {name} samples of sequence_length="
                    f"{self.sequence_length}, but at least {needed[name]} are needed (batch_size="
                    f"{self.batch_size}, {num_replicas} data-parallel ranks). Give more text, or lower"
                    f" sequence_length or batch_size."
                )


def find_files(patterns: list[str], max_bytes: int | None) -> list[Path]:
    """The files that match, in an order that is shuffled but always the same, up to `max_bytes` in all."""
    found = {Path(name) for pattern in patterns for name in glob.glob(pattern, recursive=True)}
    paths = sorted(path for path in found if path.is_file() and not _is_third_party(path, patterns))
    if not paths:
        raise FileNotFoundError(
            f"No file matches {_shown(patterns)} (seen from {os.getcwd()}). Check the pattern; use ** to search"
            f" folders at any depth."
        )
    random.Random(0).shuffle(paths)
    if max_bytes is None:
        return paths
    chosen, total = [], 0
    for path in paths:
        size = path.stat().st_size
        if total + size <= max_bytes:
            chosen.append(path)
            total += size
    if not chosen:
        raise ValueError(
            f"max_bytes={max_bytes} is less than each of the {len(paths)} files that match {_shown(patterns)}:"
            f" raise max_bytes."
        )
    return chosen


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """Learn a byte-level BPE: any text can be encoded, and decodes to itself."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer, length=len(texts))
    return tokenizer


def encode_texts(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    """All texts as one row of token ids, uint16 where that is enough, each followed by END_OF_TEXT."""
    dtype = np.uint16 if tokenizer.get_vocab_size() <= 2**16 else np.uint32
    end = np.array([tokenizer.token_to_id(END_OF_TEXT)], dtype=dtype)
    parts = []
    for start in range(0, len(texts), 256):  # the encodings hold far more than ids: a few files at a time
        for encoding in tokenizer.encode_batch(texts[start : start + 256], add_special_tokens=False):
            parts += [np.array(encoding.ids, dtype=dtype), end]
    return np.concatenate(parts)


def _patterns(files: str | list[str] | None) -> list[str]:
    if files is None:
        return [os.path.join(glob.escape(os.path.dirname(os.__file__)), "**", "*.py")]
    patterns = [files] if isinstance(files, str) else list(files)
    return [os.path.expanduser(pattern) for pattern in patterns]


def _shown(patterns: list[str]) -> str:
    return ", ".join(repr(pattern) for pattern in patterns) or "an empty list of patterns"


def _is_third_party(path: Path, patterns: list[str]) -> bool:
    """Whether the default pattern has strayed into packages that happen to be installed below the library."""
    installed = {"site-packages", "dist-packages"}
    return patterns == _patterns(None) and not installed.isdisjoint(path.parts)


def _default_cache_dir() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning_taco"


def _read_texts(paths: list[Path]) -> Iterator[str]:
    skipped: list[Path] = []
    for path in paths:
        try:
            text = path.read_bytes().decode("utf-8")
        except (OSError, UnicodeDecodeError):
            skipped.append(path)
            continue
        if "\0" in text:
            skipped.append(path)
        elif text:
            yield text
    if skipped:
        logger.warning(
            "skipped %d of %d files that are no UTF-8 text, such as %s", len(skipped), len(paths), skipped[0]
        )


def _write(path: Path, save: Callable[[Path], None]) -> None:
    """Save under another name, then rename: no other process ever sees half a file."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    os.close(descriptor)
    try:
        save(Path(temporary))
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _save_array(path: Path, array: np.ndarray) -> None:
    with path.open("wb") as file:
        np.save(file, array)
