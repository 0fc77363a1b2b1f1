"""What a data source is once open: training and held-out sequences, and a digest of both.

Also what the sources share: the split by hash, sequences cut from one run of tokens, and the
checks that hold for all of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from recipes.errors import UserError

type Tokens = npt.NDArray[np.int32]
"""Tokens as the trainer takes them."""

type StoredTokens = npt.NDArray[Any]
"""Tokens of an unsigned integer type, in memory or memory-mapped."""

_CHUNK_TOKENS = 1 << 22


class Sequences(Protocol):
    """Random access to sequences of ``sequence_length + 1`` tokens."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Tokens: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """One opened data source."""

    train: Sequences
    held_out: Sequences
    digest: str
    """Hex digest of every token of both parts and of how they are split."""
    unigram_entropy_nats: float | None = None
    """Entropy of the held-out byte frequencies; None where tokens are not bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenSequences:
    """Consecutive sequences of one run of tokens; each begins with the last token of the one before,
    so that every token but the first is predicted once."""

    tokens: StoredTokens
    sequence_length: int

    def __len__(self) -> int:
        return max(0, (len(self.tokens) - 1) // self.sequence_length)

    def __getitem__(self, index: int, /) -> Tokens:
        start = index * self.sequence_length
        return self.tokens[start : start + self.sequence_length + 1].astype(np.int32)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenScan:
    """What one pass over tokens finds."""

    digest: str
    """SHA-256 (hex) of the tokens as stored."""
    largest: int
    """Largest token; -1 where there are none."""


def chunks(tokens: StoredTokens) -> Iterator[StoredTokens]:
    """``tokens`` in parts of bounded size."""
    for start in range(0, len(tokens), _CHUNK_TOKENS):
        yield tokens[start : start + _CHUNK_TOKENS]


def scan(tokens: StoredTokens) -> TokenScan:
    """Read every token once."""
    digest, largest = hashlib.sha256(tokens.dtype.str.encode()), -1
    for chunk in chunks(tokens):
        digest.update(np.ascontiguousarray(chunk).data)
        largest = max(largest, int(chunk.max()))
    return TokenScan(digest=digest.hexdigest(), largest=largest)


def combine(*parts: object) -> str:
    """One hex digest of several values."""
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()


def name_hashes(names: Iterable[str]) -> npt.NDArray[np.uint64]:
    """A 64-bit hash of each name, the same everywhere."""
    return np.array([record_hash(name.encode(errors="surrogateescape")) for name in names], dtype=np.uint64)


def record_hash(data: bytes) -> int:
    """A 64-bit hash of one record, the same everywhere."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def held_out_mask(hashes: npt.NDArray[np.uint64], fraction: float) -> npt.NDArray[np.bool_]:
    """Which items are held out: the smallest hashes, ``fraction`` of all, but at least one and not the last.

    Equal hashes (copies of one record) fall on the same side.
    """
    count = max(1, min(round(fraction * len(hashes)), len(hashes) - 1))
    threshold: np.uint64 = np.partition(hashes, count - 1)[count - 1]
    mask: npt.NDArray[np.bool_] = hashes <= threshold
    return mask


def split_tail(tokens: StoredTokens, fraction: float) -> tuple[StoredTokens, StoredTokens]:
    """The head to train on, and the last ``fraction`` of the tokens, held out."""
    head = len(tokens) - round(len(tokens) * fraction)
    return tokens[:head], tokens[head:]


def byte_entropy_nats(tokens: StoredTokens) -> float:
    """Entropy of the frequencies of ``tokens``, which are bytes."""
    counts = np.zeros(256, dtype=np.int64)
    for chunk in chunks(tokens):
        counts += np.bincount(chunk, minlength=256)
    share = counts[counts > 0] / len(tokens)
    return float(-(share * np.log(share)).sum())


def check_vocabulary(largest: int, vocab_size: int, where: object) -> None:
    """Refuse a token that the embedding table has no row for.

    Raises:
      UserError: naming both numbers.
    """
    if largest >= vocab_size:
        raise UserError(
            f"{where}: token {largest} is outside the vocabulary, model.vocab_size={vocab_size}",
            hint=f"set model.vocab_size to at least {largest + 1}, or use data of the model's own tokenizer",
        )


def check_length(num_tokens: int, sequence_length: int, where: object) -> None:
    """Refuse data that are shorter than one sequence and its target.

    Raises:
      UserError: naming both numbers.
    """
    if num_tokens <= sequence_length:
        raise UserError(
            f"{where}: {num_tokens} tokens are less than one sequence"
            f" (train.sequence_length={sequence_length}, and one more to predict)",
            hint="give more data or a shorter train.sequence_length",
        )
