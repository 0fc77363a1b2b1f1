"""Text as data: the Python standard library's own sources, or the user's files.

Files are split whole into training and held-out ones by a hash of their names; a single file is split
at its tail. Tokens live in memory, or beyond IN_MEMORY_LIMIT_BYTES in a token file in the cache.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import BinaryIO

import numpy as np

from recipes.errors import UserError
from recipes.schema import DataConfig
from trainer.data.cache import HostCache, source_key
from trainer.data.corpus import (
    Corpus,
    StoredTokens,
    TokenScan,
    TokenSequences,
    byte_entropy_nats,
    check_length,
    check_vocabulary,
    combine,
    held_out_mask,
    name_hashes,
    scan,
    split_tail,
)
from trainer.data.encoders import ByteEncoder, Encoder, make_encoder
from trainer.data.files import DataFile, find_files, refuse_shared_files, walk

IN_MEMORY_LIMIT_BYTES = 64 << 20
_NOT_SOURCES = (
    # Installed packages and byte code.
    *("site-packages", "dist-packages", "__pycache__"),
    # Tests, tables and what distributions ship apart: they would be two thirds of all bytes.
    *("test", "tests", "idlelib", "lib2to3", "pydoc_data", "encodings"),
)


def text_corpus(config: DataConfig, *, vocab_size: int, sequence_length: int, cache: HostCache) -> Corpus:
    """Open ``python_stdlib`` or ``text_files``.

    Raises:
      UserError: files are missing, unreadable, too short, or do not fit the tokenizer or the vocabulary.
    """
    encoder = make_encoder(config, vocab_size)
    where = "the Python standard library" if config.source == "python_stdlib" else f"data.path={config.path}"
    train, held_out, digest, largest = _split(config, encoder, cache)
    check_length(len(train), sequence_length, f"{where}, part to train on")
    check_vocabulary(largest, vocab_size, where)
    return Corpus(
        train=TokenSequences(tokens=train, sequence_length=sequence_length),
        held_out=TokenSequences(tokens=held_out, sequence_length=sequence_length),
        digest=combine("text-1", encoder.digest, digest),
        unigram_entropy_nats=byte_entropy_nats(held_out) if isinstance(encoder, ByteEncoder) else None,
    )


def _split(
    config: DataConfig, encoder: Encoder, cache: HostCache
) -> tuple[StoredTokens, StoredTokens, str, int]:
    """Both parts, the digest of both, and the largest token."""
    files = _files(config)
    if config.eval_path is not None:
        held_out_files = find_files(config.eval_path, "data.eval_path")
        refuse_shared_files(files, held_out_files)
    elif len(files) == 1:
        tokens, found = _tokens(files, encoder, cache)
        train, held_out = split_tail(tokens, config.eval_fraction)
        return train, held_out, combine(found.digest, len(train)), found.largest
    else:
        mask = held_out_mask(name_hashes(file.name for file in files), config.eval_fraction)
        held_out_files = [file for file, out in zip(files, mask, strict=True) if out]
        files = [file for file, out in zip(files, mask, strict=True) if not out]
    train, train_scan = _tokens(files, encoder, cache)
    held_out, held_out_scan = _tokens(held_out_files, encoder, cache)
    digest = combine(train_scan.digest, held_out_scan.digest)
    return train, held_out, digest, max(train_scan.largest, held_out_scan.largest)


def _files(config: DataConfig) -> list[DataFile]:
    if config.source == "python_stdlib":
        return stdlib_files(Path(sysconfig.get_paths()["stdlib"]))
    files = find_files(config.path, "data.path")
    if not any(file.status().st_size for file in files):
        raise UserError(f"data.path={config.path}: every file is empty", hint="give files with text in them")
    return files


def stdlib_files(root: Path) -> list[DataFile]:
    """The standard library's ``.py`` files that are readable UTF-8, by name."""
    found = [
        file
        for file in walk(root, skip_folders=_NOT_SOURCES)
        # The build's own settings differ between two builds of one Python.
        if file.name.endswith(".py") and not file.name.startswith("_sysconfigdata") and _is_text(file.path)
    ]
    if not found:
        raise UserError(
            f"data.source=python_stdlib: no Python source under {root}",
            hint="this Python ships without sources; use data.source=text_files or another Python",
        )
    return sorted(found, key=lambda file: file.name)


def _is_text(path: Path) -> bool:
    try:
        path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    return True


def _tokens(files: list[DataFile], encoder: Encoder, cache: HostCache) -> tuple[StoredTokens, TokenScan]:
    """The tokens of all ``files``, in order."""
    size_bytes = sum(file.status().st_size for file in files)
    if cache.folder is None or size_bytes <= IN_MEMORY_LIMIT_BYTES:
        empty = np.empty(0, dtype=encoder.dtype)
        tokens = np.concatenate([empty, *(encoder.encode(file.read(), file.path) for file in files)])
        return tokens, scan(tokens)

    def write(stream: BinaryIO) -> None:
        for file in files:
            stream.write(encoder.encode(file.read(), file.path).data)  # ndarray.tofile hides a full disk

    path = cache.token_file(source_key(files, encoder.digest), write)
    mapped = np.memmap(path, dtype=encoder.dtype, mode="r")
    return mapped, cache.scan(DataFile(name=path.name, path=path), mapped)
