"""Data for training: ``open_data(recipe)`` gives batches that are a pure function of seed and step.

Sources, splits, tokenizers, the fingerprint and its limits are described in docs/data.md.
"""

from __future__ import annotations

import json
from pathlib import Path

from recipes.errors import UserError
from recipes.schema import Recipe
from trainer.data.array_record import array_record_corpus
from trainer.data.batches import BatchStream, Data, eval_order, train_order
from trainer.data.cache import HostCache
from trainer.data.corpus import Corpus, combine
from trainer.data.synthetic import synthetic_corpus
from trainer.data.text import text_corpus
from trainer.data.token_file import token_file_corpus

__all__ = ["BatchStream", "Data", "open_data"]

_OPENERS = {
    "array_record": array_record_corpus,
    "python_stdlib": text_corpus,
    "text_files": text_corpus,
    "token_file": token_file_corpus,
}


def open_data(recipe: Recipe, *, cache_dir: Path | None) -> Data:
    """Open the data that a recipe names, checking all of it once.

    Args:
      recipe: the recipe; only ``data``, ``train`` and ``model.vocab_size`` matter.
      cache_dir: folder on this host, kept between attempts, for what costs a full read of the data;
        None computes it each time.

    Raises:
      UserError: the data are missing, unreadable, empty, damaged or do not fit the recipe.
    """
    corpus = _open_corpus(recipe, HostCache(folder=cache_dir))
    _check_held_out(corpus, recipe)
    train, seed = recipe.train, recipe.train.seed
    return Data(
        fingerprint=_fingerprint(recipe, corpus),
        train_tokens=len(corpus.train) * train.sequence_length,
        eval_tokens=len(corpus.held_out) * train.sequence_length,
        eval_unigram_entropy_nats=corpus.unigram_entropy_nats,
        global_batch_size=train.global_batch_size,
        eval_num_batches=train.eval_num_batches,
        prefetch_batches=recipe.data.prefetch_batches,
        _train=train_order(corpus.train, seed=seed, shuffle=recipe.data.shuffle),
        _held_out=eval_order(corpus.held_out),
    )


def _open_corpus(recipe: Recipe, cache: HostCache) -> Corpus:
    vocab_size, sequence_length = recipe.model.vocab_size, recipe.train.sequence_length
    if recipe.data.source == "synthetic":
        return synthetic_corpus(
            seed=recipe.train.seed, vocab_size=vocab_size, sequence_length=sequence_length
        )
    opener = _OPENERS[recipe.data.source]
    return opener(recipe.data, vocab_size=vocab_size, sequence_length=sequence_length, cache=cache)


def _check_held_out(corpus: Corpus, recipe: Recipe) -> None:
    if not len(corpus.held_out) and recipe.train.eval_num_batches:
        raise UserError(
            f"data.source={recipe.data.source}: the held-out part is shorter than one sequence"
            f" (train.sequence_length={recipe.train.sequence_length})",
            hint="raise data.eval_fraction, set data.eval_path, or set train.eval_num_batches to 0",
        )


def _fingerprint(recipe: Recipe, corpus: Corpus) -> str:
    train = recipe.train
    order = {
        "global_batch_size": train.global_batch_size,
        "seed": train.seed,
        "sequence_length": train.sequence_length,
        "shuffle": recipe.data.shuffle,
    }
    return combine("data-1", recipe.data.source, corpus.digest, json.dumps(order))
