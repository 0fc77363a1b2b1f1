"""How text becomes tokens: bytes, or a Hugging Face tokenizer from a file.

Every document ends with a separator: byte 0, or the tokenizer's own end-of-text token where it has one.
"""

from __future__ import annotations

import hashlib
from typing import Any, Protocol

import numpy as np

from recipes.errors import UserError
from recipes.schema import DataConfig
from trainer.data.corpus import StoredTokens, check_vocabulary, combine
from trainer.data.files import DataFile, local_path

_END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
_PIECE_CHARACTERS = 1 << 16


class Encoder(Protocol):
    """Turns one document into tokens, separator included."""

    @property
    def digest(self) -> str:
        """Changes when any document might become other tokens."""
        ...

    @property
    def dtype(self) -> np.dtype[Any]:
        """Little-endian type of the tokens."""
        ...

    def encode(self, data: bytes, where: object) -> StoredTokens: ...


def make_encoder(config: DataConfig, vocab_size: int) -> Encoder:
    """The encoder that a recipe names.

    Raises:
      UserError: the tokenizer's file is missing, damaged or larger than the vocabulary.
    """
    if config.tokenizer == "byte":
        return ByteEncoder()
    path = local_path(config.tokenizer_path, "data.tokenizer_path")
    return HuggingFaceEncoder(DataFile(name=path.name, path=path), vocab_size)


class ByteEncoder:
    """One token a byte; byte 0 ends a document."""

    digest = "byte-1"
    dtype: np.dtype[Any] = np.dtype("u1")

    def encode(self, data: bytes, where: object) -> StoredTokens:
        return np.frombuffer(data + b"\0", dtype=np.uint8)


class HuggingFaceEncoder:
    """A ``tokenizer.json``, read from disk and never from a hub."""

    def __init__(self, file: DataFile, vocab_size: int) -> None:
        content = file.read()
        self._tokenizer = _parse(content, file)
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        largest = max(vocabulary.values(), default=-1)
        check_vocabulary(largest, vocab_size, file.path)
        self._end = next(([vocabulary[name]] for name in _END_OF_TEXT if name in vocabulary), [])
        self.dtype: np.dtype[Any] = np.dtype("<u2" if largest < 1 << 16 else "<u4")
        self.digest = combine("huggingface-1", hashlib.sha256(content).hexdigest())

    def encode(self, data: bytes, where: object) -> StoredTokens:
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise UserError(
                f"data file {where} is not UTF-8 text:"
                f" byte 0x{data[error.start]:02x} at offset {error.start}",
                hint="convert it to UTF-8, leave it out, or use data.tokenizer=byte",
            ) from None
        pieces = self._tokenizer.encode_batch_fast(_pieces(text), add_special_tokens=False)
        ids = [np.array(piece.ids, dtype=self.dtype) for piece in pieces]
        return np.concatenate([*ids, np.array(self._end, dtype=self.dtype)])


def _parse(content: bytes, file: DataFile) -> Any:
    from tokenizers import Tokenizer  # costs start-up time that byte data need not pay

    try:
        tokenizer = Tokenizer.from_buffer(content)
    except Exception as error:  # the Rust extension raises nothing narrower
        raise UserError(
            f"tokenizer {file.path} cannot be used: {error}",
            hint="give a complete tokenizer.json as saved by Hugging Face tokenizers",
        ) from None
    # Settings that would cut, pad or randomise a training text.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if getattr(tokenizer.model, "dropout", None):
        tokenizer.model.dropout = None
    return tokenizer


def _pieces(text: str) -> list[str]:
    """``text`` cut after line ends into parts that are encoded in parallel and in bounded memory."""
    pieces, start = [], 0
    while start < len(text):
        end = start + _PIECE_CHARACTERS
        if end < len(text):
            end = text.rfind("\n", start, end) + 1 or end
        pieces.append(text[start:end])
        start = end
    return pieces
