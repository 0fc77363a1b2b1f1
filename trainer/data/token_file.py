"""Token files: little-endian uint16 or uint32 token ids and nothing else, memory-mapped.

The whole file is read once to check and to digest it; with a cache folder, once per host and file.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from recipes.errors import UserError
from recipes.schema import DataConfig
from trainer.data.cache import HostCache
from trainer.data.corpus import (
    Corpus,
    StoredTokens,
    TokenSequences,
    check_length,
    check_vocabulary,
    combine,
    split_tail,
)
from trainer.data.files import DataFile, local_path, refuse_shared_files, unreadable


def stored_dtype(config: DataConfig) -> np.dtype[Any]:
    """The little-endian type that ``data.token_dtype`` names."""
    return np.dtype({"uint16": "<u2", "uint32": "<u4"}[config.token_dtype])


def token_file_corpus(
    config: DataConfig, *, vocab_size: int, sequence_length: int, cache: HostCache
) -> Corpus:
    """Open a token file; without ``eval_path`` its tail is held out.

    Raises:
      UserError: a file is missing, unreadable, of another type, too short or has tokens out of range.
    """
    file = _named(config.path, "data.path")
    tokens, digest = _open(file, config, vocab_size, cache)
    if config.eval_path is None:
        train, held_out = split_tail(tokens, config.eval_fraction)
        held_out_digest = f"tail of {len(held_out)}"
    else:
        held_out_file = _named(config.eval_path, "data.eval_path")
        refuse_shared_files([file], [held_out_file])
        train, (held_out, held_out_digest) = tokens, _open(held_out_file, config, vocab_size, cache)
    check_length(len(train), sequence_length, f"{file.path}, part to train on")
    return Corpus(
        train=TokenSequences(tokens=train, sequence_length=sequence_length),
        held_out=TokenSequences(tokens=held_out, sequence_length=sequence_length),
        digest=combine("token-file-1", digest, held_out_digest),
    )


def _named(address: str | None, key: str) -> DataFile:
    path = local_path(address, key)
    return DataFile(name=path.name, path=path)


def _open(file: DataFile, config: DataConfig, vocab_size: int, cache: HostCache) -> tuple[StoredTokens, str]:
    """Memory-map one file and check all of it."""
    tokens = _map(file, stored_dtype(config))
    found = cache.scan(file, tokens)
    check_vocabulary(found.largest, vocab_size, f"{file.path}, read as {config.token_dtype}")
    return tokens, found.digest


def _map(file: DataFile, dtype: np.dtype[Any]) -> StoredTokens:
    size_bytes = file.status().st_size
    if size_bytes % dtype.itemsize:
        raise UserError(
            f"token file {file.path}: {size_bytes} bytes are no whole number of {dtype.name} tokens",
            hint="the file is cut short or data.token_dtype is wrong",
        )
    if not size_bytes:
        raise UserError(f"token file {file.path} is empty", hint="write it again, and check data.path")
    try:
        return np.memmap(file.path, dtype=dtype, mode="r")
    except OSError as error:
        raise unreadable(file.path, error) from None
