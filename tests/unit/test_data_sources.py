"""What each data source yields, how it is split, and what its fingerprint covers."""

from __future__ import annotations

import math
import shutil
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import trainer.data.text
from tests.unit.data_support import make_recipe, write_records
from trainer.data import Data, open_data
from trainer.data.cache import HostCache
from trainer.data.corpus import held_out_mask, name_hashes


def open_(*, cache_dir: Path | None = None, **keys: Any) -> Data:
    return open_data(make_recipe(**keys), cache_dir=cache_dir)


def epoch(data: Data, sequence_length: int = 16, batch: int = 8) -> list[list[int]]:
    """All training sequences of the first epoch, and the few after it that fill the last batch."""
    num_steps = -(-data.train_tokens // sequence_length // batch)
    with data.train_batches(0, range(batch)) as stream:
        return [row for _ in range(num_steps) for row in next(stream).tolist()]


def write_texts(folder: Path, count: int = 20) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        (folder / f"part-{number:02}.txt").write_text(f"text {number}: " + chr(65 + number) * 100, "utf-8")
    return folder


def test_the_standard_library_opens_quickly_and_is_text() -> None:
    start = time.process_time()
    data = open_()
    elapsed_s = time.process_time() - start
    assert elapsed_s < 1.0
    assert 3e6 < data.train_tokens + data.eval_tokens < 15e6
    assert 0.03 < data.eval_tokens / data.train_tokens < 0.25
    assert data.eval_unigram_entropy_nats is not None
    assert 2.5 < data.eval_unigram_entropy_nats < 3.8
    with data.train_batches(0, range(8)) as stream:
        batch = next(stream)
    assert batch.shape == (8, 17)
    assert batch.dtype == np.int32


def test_the_standard_library_is_the_same_again() -> None:
    assert open_().fingerprint == open_().fingerprint


def test_stdlib_files_are_sources_in_order(tmp_path: Path) -> None:
    for name in [
        "b.py",
        "a.py",
        "json/x.py",
        "test/t.py",
        "site-packages/s.py",
        "_sysconfigdata_x.py",
        "n.txt",
    ]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("pass\n")
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n")
    assert [file.name for file in trainer.data.text.stdlib_files(tmp_path)] == ["a.py", "b.py", "json/x.py"]


@pytest.mark.parametrize("pattern", ["", "/*.txt", "/**/*.txt"])
def test_texts_come_from_a_folder_or_a_pattern(tmp_path: Path, pattern: str) -> None:
    write_texts(tmp_path / "texts")
    (tmp_path / "texts" / ".hidden").write_text("secret")
    data = open_(source="text_files", path=f"{tmp_path}/texts{pattern}")
    seen = bytes(byte for row in epoch(data) for byte in row)
    held_out = bytes(byte for rows in data.eval_batches(range(8)) for byte in rows.ravel().tolist())
    numbers = {int(name[5:7]) for name in held_out_names(20)}
    assert len(numbers) == 2
    for number in range(20):
        assert (chr(65 + number) * 9).encode() in (held_out if number in numbers else seen)
        assert (chr(65 + number) * 2).encode() not in (seen if number in numbers else held_out)
    assert b"secret" not in seen + held_out


def held_out_names(count: int) -> list[str]:
    names = [f"part-{number:02}.txt" for number in range(count)]
    return [name for name, out in zip(names, held_out_mask(name_hashes(names), 0.1), strict=True) if out]


def test_the_split_is_fixed() -> None:
    # Golden: another split would let old runs train on what they were evaluated on.
    assert held_out_names(20) == ["part-00.txt", "part-09.txt"]


@pytest.mark.parametrize(
    ("count", "fraction", "expected"), [(2, 0.1, 1), (2, 0.9, 1), (10, 0.1, 1), (100, 0.25, 25)]
)
def test_a_part_is_held_out_and_a_part_is_not(count: int, fraction: float, expected: int) -> None:
    mask = held_out_mask(name_hashes(map(str, range(count))), fraction)
    assert mask.sum() == expected


def test_copies_fall_on_one_side() -> None:
    mask = held_out_mask(np.array([1, 1, 1, 9, 8, 7], dtype=np.uint64), 0.2)
    assert mask.tolist() == [True, True, True, False, False, False]


def test_one_text_is_split_at_its_tail(tmp_path: Path) -> None:
    (tmp_path / "all.txt").write_text("a" * 900 + "b" * 99)
    data = open_(source="text_files", path=str(tmp_path / "all.txt"))
    assert {byte for row in epoch(data) for byte in row} == {ord("a")}
    assert {byte for rows in data.eval_batches([0, 5]) for byte in rows.ravel()} == {ord("b")}


def test_eval_path_is_held_out_whole_and_its_entropy_is_reported(tmp_path: Path) -> None:
    write_texts(tmp_path / "train", 3)
    (tmp_path / "eval.txt").write_text("ab" * 200)
    data = open_(source="text_files", path=str(tmp_path / "train"), eval_path=str(tmp_path / "eval.txt"))
    assert data.eval_tokens == 400
    counts = np.array([200, 200, 1]) / 401
    assert data.eval_unigram_entropy_nats == pytest.approx(-(counts * np.log(counts)).sum())


@pytest.fixture(scope="module")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer_ = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the text is the text of the test"] * 5, trainer_)
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=64)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def test_a_tokenizer_file_encodes_all_of_the_text(tmp_path: Path, tokenizer_path: Path) -> None:
    text = "the text of the test\n" * 20_000
    (tmp_path / "all.txt").write_text(text, "utf-8")
    data = open_(
        source="text_files",
        path=str(tmp_path / "all.txt"),
        tokenizer="huggingface",
        tokenizer_path=str(tokenizer_path),
        vocab_size=300,
        shuffle=False,
    )
    assert data.eval_unigram_entropy_nats is None
    rows = epoch(data)
    tokens = [token for row in rows for token in row[:-1]][: data.train_tokens]
    decoded = Tokenizer.from_file(str(tokenizer_path)).decode(tokens, skip_special_tokens=False)
    assert len(decoded) > 0.85 * len(text)
    assert text.startswith(decoded)


def test_documents_end_with_the_end_of_text_token(tmp_path: Path, tokenizer_path: Path) -> None:
    write_texts(tmp_path / "texts", 4)
    data = open_(
        source="text_files",
        path=str(tmp_path / "texts"),
        eval_path=str(write_texts(tmp_path / "eval", 1)),
        tokenizer="huggingface",
        tokenizer_path=str(tokenizer_path),
        vocab_size=300,
        sequence_length=1,
    )
    counts = Counter(row[1] for row in epoch(data, sequence_length=1)[: data.train_tokens])
    assert counts[0] == 4


def test_a_big_text_goes_through_a_token_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_texts(tmp_path / "texts")
    in_memory = open_(source="text_files", path=str(tmp_path / "texts"))
    monkeypatch.setattr(trainer.data.text, "IN_MEMORY_LIMIT_BYTES", 100)
    cache_dir = tmp_path / "cache"
    first = open_(source="text_files", path=str(tmp_path / "texts"), cache_dir=cache_dir)
    files = {path: path.stat().st_mtime_ns for path in cache_dir.iterdir() if path.suffix != ".lock"}
    second = open_(source="text_files", path=str(tmp_path / "texts"), cache_dir=cache_dir)
    assert {path: path.stat().st_mtime_ns for path in files} == files
    assert in_memory.fingerprint == first.fingerprint == second.fingerprint
    assert epoch(in_memory) == epoch(first) == epoch(second)
    (tmp_path / "texts" / "part-03.txt").write_text("other " * 50)
    changed = open_(source="text_files", path=str(tmp_path / "texts"), cache_dir=cache_dir)
    assert changed.fingerprint != first.fingerprint


def test_a_token_file_is_written_once_and_awaited(tmp_path: Path) -> None:
    (tmp_path / ".tokens-key.bin.killed").write_bytes(b"half")
    writes: list[int] = []
    together = threading.Barrier(4)

    def ask(number: int) -> bytes:
        def write(stream: BinaryIO) -> None:
            writes.append(number)
            stream.write(b"x" * 100_000)

        together.wait()
        return HostCache(folder=tmp_path).token_file("key", write).read_bytes()

    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(ask, range(4))) == {b"x" * 100_000}
    assert len(writes) == 1
    assert not list(tmp_path.glob(".tokens*"))


def test_a_damaged_cache_entry_is_made_again(tmp_path: Path) -> None:
    np.arange(200, dtype="<u2").tofile(tmp_path / "tokens.bin")
    cache_dir = tmp_path / "cache"
    first = open_(source="token_file", path=str(tmp_path / "tokens.bin"), cache_dir=cache_dir)
    for entry in cache_dir.iterdir():
        entry.write_bytes(entry.read_bytes()[:50])
    again = open_(source="token_file", path=str(tmp_path / "tokens.bin"), cache_dir=cache_dir)
    assert first.fingerprint == again.fingerprint


@pytest.mark.parametrize(("dtype", "largest"), [("uint16", 60_000), ("uint32", 100_000)])
def test_a_token_file_is_read_as_little_endian(tmp_path: Path, dtype: str, largest: int) -> None:
    tokens = np.arange(largest - 999, largest + 1)
    tokens.astype({"uint16": "<u2", "uint32": "<u4"}[dtype]).tofile(tmp_path / "tokens.bin")
    path = str(tmp_path / "tokens.bin")
    data = open_(
        source="token_file",
        path=path,
        token_dtype=dtype,
        vocab_size=largest + 1,
        shuffle=False,
        cache_dir=tmp_path / "cache",
    )
    np.testing.assert_array_equal(epoch(data)[1], tokens[16:33])
    assert data.eval_unigram_entropy_nats is None
    again = open_(
        source="token_file",
        path=path,
        token_dtype=dtype,
        vocab_size=largest + 1,
        shuffle=False,
        cache_dir=tmp_path / "cache",
    )
    assert again.fingerprint == data.fingerprint


def test_the_last_byte_of_a_token_file_counts(tmp_path: Path) -> None:
    path = tmp_path / "tokens.bin"
    prints = set()
    for last in (5, 6):
        np.append(np.zeros(100_000, "<u2"), np.array([last], "<u2")).tofile(path)
        prints.add(open_(source="token_file", path=str(path), cache_dir=tmp_path / "cache").fingerprint)
    assert len(prints) == 2


def records(count: int, length: int = 20, first: int = 0) -> list[bytes]:
    return [np.full(length, first + number, "<u2").tobytes() for number in range(count)]


def test_array_records_are_cut_and_split(tmp_path: Path) -> None:
    write_records(tmp_path / "data" / "a.array_record-00000-of-00002", records(30))
    write_records(tmp_path / "data" / "a.array_record-00001-of-00002", records(20, first=30))
    (tmp_path / "data" / "README").write_text("not a shard")
    for cache_dir in (None, tmp_path / "cache", tmp_path / "cache"):
        data = open_(source="array_record", path=str(tmp_path / "data"), cache_dir=cache_dir)
        rows = epoch(data)
        assert all(len(row) == 17 and len(set(row)) == 1 for row in rows)
        trained = {row[0] for row in rows}
        held_out = {int(row[0]) for rows_ in data.eval_batches(range(8)) for row in rows_}
        assert len(trained) == 45
        assert len(held_out) == 5
        assert trained | held_out == set(range(50))


def test_array_records_of_eval_path_are_held_out(tmp_path: Path) -> None:
    write_records(tmp_path / "a.array_record", records(8))
    write_records(tmp_path / "b.array_record", records(3, first=100))
    data = open_(
        source="array_record",
        path=f"{tmp_path}/a*",
        eval_path=str(tmp_path / "b.array_record"),
        shuffle=False,
    )
    assert [row[0] for row in epoch(data)] == list(range(8))
    assert data.eval_tokens == 3 * 16


def test_synthetic_sequences_can_be_learnt() -> None:
    data = open_(source="synthetic", vocab_size=512, sequence_length=64)
    with data.train_batches(0, range(8)) as stream:
        tokens = np.concatenate([next(stream) for _ in range(20)])
    assert tokens.min() >= 0
    assert tokens.max() < 512
    shares = np.unique_counts(tokens).counts / tokens.size
    assert -(shares * np.log(shares)).sum() < math.log(512) - 1.0
    # Copying the token of the best period (unknown to the model, at most 32) is right most of the time.
    best = [max((row[period:] == row[:-period]).mean() for period in range(4, 33)) for row in tokens]
    assert np.mean(best) > 0.7


def test_synthetic_sequences_are_golden() -> None:
    data = open_(source="synthetic", vocab_size=100_000, sequence_length=5, shuffle=False)
    with data.train_batches(0, [0, 1]) as stream:
        assert next(stream).tolist() == [[340, 15, 10148, 6369, 593, 80271], [11046, 5, 16313, 2, 315, 40]]


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({}, True),
        ({"prefetch_batches": 9}, True),
        ({"eval_num_batches": 1}, True),
        ({"vocab_size": 300}, True),
        ({"seed": 1}, False),
        ({"shuffle": False}, False),
        ({"sequence_length": 17}, False),
        ({"global_batch_size": 9}, False),
        ({"eval_fraction": 0.3}, False),
    ],
)
def test_the_fingerprint_covers_what_decides_the_batches(
    tmp_path: Path, change: dict[str, Any], same: bool
) -> None:
    write_texts(tmp_path / "texts")
    base = open_(source="text_files", path=str(tmp_path / "texts"))
    other = open_(**{"source": "text_files", "path": str(tmp_path / "texts"), **change})
    assert (base.fingerprint == other.fingerprint) is same


def test_the_fingerprint_follows_content_and_not_place(tmp_path: Path) -> None:
    write_texts(tmp_path / "texts")
    shutil.copytree(tmp_path / "texts", tmp_path / "elsewhere")
    first = open_(source="text_files", path=str(tmp_path / "texts"))
    assert open_(source="text_files", path=str(tmp_path / "elsewhere")).fingerprint == first.fingerprint
    (tmp_path / "elsewhere" / "part-07.txt").write_text("changed")
    assert open_(source="text_files", path=str(tmp_path / "elsewhere")).fingerprint != first.fingerprint
