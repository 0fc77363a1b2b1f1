"""Synthetic sequences: a pure hash of seed and index, with something to learn.

Tokens are skewed towards small numbers (learnt in the first steps) and each sequence repeats its
own pattern with noise (learnt later, by attention). No file is read.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trainer.data.corpus import Corpus, Tokens, combine

NUM_TRAIN_SEQUENCES = 1 << 20
NUM_HELD_OUT_SEQUENCES = 1 << 14
_TRAIN, _HELD_OUT = 0, 1
_SHORTEST_PERIOD, _NUM_PERIODS = 4, 29
_NOISE = 0.1


def synthetic_corpus(*, seed: int, vocab_size: int, sequence_length: int) -> Corpus:
    """Sequences of both parts, never the same hash input."""

    def part(split: int, count: int) -> SyntheticSequences:
        return SyntheticSequences(
            split=split, count=count, seed=seed, vocab_size=vocab_size, sequence_length=sequence_length
        )

    return Corpus(
        train=part(_TRAIN, NUM_TRAIN_SEQUENCES),
        held_out=part(_HELD_OUT, NUM_HELD_OUT_SEQUENCES),
        digest=combine("synthetic-1", seed, vocab_size, sequence_length),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class SyntheticSequences:
    """Sequence ``index`` is a function of (seed, split, index) alone."""

    split: int
    count: int
    seed: int
    vocab_size: int
    sequence_length: int

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int, /) -> Tokens:
        length = self.sequence_length + 1
        # Raw Philox words, not Generator methods: NumPy promises that only the former never change.
        key = (self.split << 64) | (self.seed & 0xFFFF_FFFF_FFFF_FFFF)
        words = np.random.Philox(key=key, counter=index << 192).random_raw(2 * length + 1)
        period = _SHORTEST_PERIOD + int(words[0]) % _NUM_PERIODS
        tokens, noise = self._skewed(words[1 : length + 1]), _unit(words[length + 1 :]) < _NOISE
        pattern = tokens[np.arange(length) % period]
        return np.where(noise, tokens, pattern).astype(np.int32)

    def _skewed(self, words: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        scaled = (_unit(words) ** 2) ** 2 * self.vocab_size
        return np.minimum(scaled.astype(np.int64), self.vocab_size - 1)


def _unit(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """Uniform in [0, 1) from the upper 53 bits."""
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53
