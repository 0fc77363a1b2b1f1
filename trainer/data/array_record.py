"""ArrayRecord files: one record is one sequence of little-endian tokens, read at random by Grain.

Longer records are cut to ``sequence_length + 1`` tokens; shorter ones are refused. Every record is
read once to check it and to hash it; with a cache folder, once per host and shard.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grain
import numpy as np
import numpy.typing as npt
from array_record.python import array_record_module

from recipes.errors import UserError
from recipes.schema import DataConfig
from trainer.data.cache import Arrays, HostCache
from trainer.data.corpus import (
    Corpus,
    Tokens,
    check_vocabulary,
    combine,
    held_out_mask,
    record_hash,
)
from trainer.data.files import DataFile, find_files, refuse_shared_files, unreadable
from trainer.data.token_file import stored_dtype

_MARKS = (".array_record", ".arrayrecord")
_RECORDS_AT_ONCE = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """One checked file; the first four attributes are what Grain asks of a file instruction."""

    filename: str
    skip: int
    take: int
    examples_in_shard: int
    hashes: npt.NDArray[np.uint64]
    """A hash of each record's bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordSequences:
    """The records of some shards, all of them or those at ``indices``."""

    shards: list[Shard]
    source: Any
    indices: npt.NDArray[np.int64]
    dtype: np.dtype[Any]
    sequence_length: int

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int, /) -> Tokens:
        key = int(self.indices[index])
        try:
            record = self.source[key]
            return np.frombuffer(record, self.dtype, self.sequence_length + 1).astype(np.int32)
        except (RuntimeError, ValueError, OSError) as error:
            for shard in self.shards:
                if key < shard.take:
                    raise _damaged(shard.filename, f"record {key}: {error}") from None
                key -= shard.take
            raise


def array_record_corpus(
    config: DataConfig, *, vocab_size: int, sequence_length: int, cache: HostCache
) -> Corpus:
    """Open ArrayRecord files; without ``eval_path`` records are held out by a hash of their bytes.

    Raises:
      UserError: files are missing, unreadable, damaged, or hold records that do not fit the recipe.
    """

    def check(files: list[DataFile]) -> list[Shard]:
        return [_check(file, config, vocab_size, sequence_length, cache) for file in files]

    def sequences(shards: list[Shard], indices: npt.NDArray[np.int64]) -> RecordSequences:
        return RecordSequences(
            shards=shards,
            source=grain.sources.ArrayRecordDataSource(shards),
            indices=indices,
            dtype=stored_dtype(config),
            sequence_length=sequence_length,
        )

    train_files = _shard_files(config.path, "data.path")
    train = check(train_files)
    hashes = _hashes(train, "data.path")
    if config.eval_path is not None:
        held_out_files = _shard_files(config.eval_path, "data.eval_path")
        refuse_shared_files(train_files, held_out_files)
        held_out = check(held_out_files)
        held_out_hashes = _hashes(held_out, "data.eval_path")
        return Corpus(
            train=sequences(train, np.arange(len(hashes))),
            held_out=sequences(held_out, np.arange(len(held_out_hashes))),
            digest=combine("array-record-1", config.token_dtype, _digest(hashes), _digest(held_out_hashes)),
        )
    mask = held_out_mask(hashes, config.eval_fraction)
    if mask.all():
        raise UserError(
            f"data.path={config.path}: nothing is left to train on, {len(hashes)} records are held out",
            hint="give more records that differ, or set data.eval_path",
        )
    return Corpus(
        train=sequences(train, np.flatnonzero(~mask)),
        held_out=sequences(train, np.flatnonzero(mask)),
        digest=combine("array-record-1", config.token_dtype, _digest(hashes), f"{int(mask.sum())} held out"),
    )


def _shard_files(address: str | None, key: str) -> list[DataFile]:
    files = find_files(address, key)
    shards = [file for file in files if any(mark in file.path.name for mark in _MARKS)]
    if not shards:
        raise UserError(
            f"{key}={address}: no ArrayRecord file among {len(files)} files",
            hint="names of ArrayRecord files contain .array_record",
        )
    return shards


def _hashes(shards: list[Shard], key: str) -> npt.NDArray[np.uint64]:
    hashes = np.concatenate([shard.hashes for shard in shards])
    if not len(hashes):
        raise UserError(f"{key}: the ArrayRecord files hold no record", hint="write them again")
    return hashes


def _digest(hashes: npt.NDArray[np.uint64]) -> str:
    return hashlib.sha256(hashes.astype("<u8").tobytes()).hexdigest()


def _check(
    file: DataFile, config: DataConfig, vocab_size: int, sequence_length: int, cache: HostCache
) -> Shard:
    """Read one file, or what the cache knows of it, and check every record."""
    dtype = stored_dtype(config)
    found = cache.arrays(file, f"records-{config.token_dtype}", lambda: _scan(file, dtype))
    shortest, position = (int(number) for number in found["shortest"])
    if len(found["hashes"]) and shortest <= sequence_length:
        raise UserError(
            f"{file.path}: record {position} has {shortest} tokens, fewer than train.sequence_length"
            f" + 1 = {sequence_length + 1}",
            hint="write records of at least that many tokens, or use a shorter train.sequence_length",
        )
    largest, position = (int(number) for number in found["largest"])
    check_vocabulary(largest, vocab_size, f"{file.path}, record {position}, read as {config.token_dtype}")
    count = len(found["hashes"])
    return Shard(filename=str(file.path), skip=0, take=count, examples_in_shard=count, hashes=found["hashes"])


def _scan(file: DataFile, dtype: np.dtype[Any]) -> Arrays:
    hashes: list[int] = []
    shortest, largest = (1 << 62, -1), (-1, -1)
    for position, record in enumerate(_records(file)):
        if len(record) % dtype.itemsize:
            raise UserError(
                f"{file.path}: record {position} has {len(record)} bytes,"
                f" no whole number of {dtype.name} tokens",
                hint="check data.token_dtype, and how the file was written",
            )
        tokens = np.frombuffer(record, dtype)
        hashes.append(record_hash(record))
        shortest = min(shortest, (len(tokens), position))
        largest = max(largest, (int(tokens.max(initial=0)), position), key=lambda pair: pair[0])
    return {
        "hashes": np.array(hashes, dtype=np.uint64),
        "shortest": np.array(shortest),
        "largest": np.array(largest),
    }


def _records(file: DataFile) -> Iterator[bytes]:
    """Every record of one file, in order."""
    try:
        file.path.open("rb").close()  # the reader's own errors do not tell missing from damaged
    except OSError as error:
        raise unreadable(file.path, error) from None
    try:
        with contextlib.closing(array_record_module.ArrayRecordReader(str(file.path))) as reader:
            count = reader.num_records()
            for start in range(0, count, _RECORDS_AT_ONCE):
                yield from reader.read(start, min(count, start + _RECORDS_AT_ONCE))
            if not count:
                reader.read_all()  # a file cut short counts no records, and only fails here
    except RuntimeError as error:
        raise _damaged(str(file.path), str(error) or "cut short") from None


def _damaged(path: str, reason: str) -> UserError:
    return UserError(
        f"ArrayRecord file {path} is damaged: {reason}",
        hint="copy or write the file again; until then take it out of the data set",
    )
