"""Bad data: one error that names the file and says what to do, exit code 2."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trainer.data.text
from recipes.contract import ExitCode
from recipes.errors import UserError
from tests.unit.data_support import make_recipe, write_records
from trainer.data import open_data


def refusal(*, cache_dir: Path | None = None, **keys: Any) -> UserError:
    """The error for these data; it has a hint and the exit code of bad input."""
    with pytest.raises(UserError) as caught:
        open_data(make_recipe(**keys), cache_dir=cache_dir)
    assert caught.value.hint
    assert caught.value.exit_code == ExitCode.BAD_INPUT
    return caught.value


SOURCES = ["text_files", "token_file", "array_record"]


@pytest.mark.parametrize("source", SOURCES)
def test_a_missing_file_is_named(source: str, tmp_path: Path) -> None:
    path = tmp_path / "none.array_record"
    assert str(path) in refusal(source=source, path=str(path)).message


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("path", [None, "", "a\0b"])
def test_no_path_is_refused(source: str, path: str | None) -> None:
    assert "data.path" in refusal(source=source, path=path).message


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("key", ["path", "eval_path"])
def test_a_bucket_is_refused(source: str, key: str, tmp_path: Path) -> None:
    keys: dict[str, Any] = {"path": good(source, tmp_path), key: "gs://bucket/data"}
    error = refusal(source=source, **keys)
    assert f"data.{key}=gs://bucket/data" in error.message
    assert "mount" in error.hint


def good(source: str, folder: Path) -> str:
    """The path of data that open."""
    if source == "text_files":
        (folder / "good.txt").write_text("good " * 200)
    elif source == "token_file":
        np.arange(200, dtype="<u2").tofile(folder / "good.txt")
    else:
        write_records(folder / "good.array_record", records(20))
        return str(folder / "good.array_record")
    return str(folder / "good.txt")


def records(count: int, length: int = 20, dtype: str = "<u2") -> list[bytes]:
    return [np.full(length, number, dtype).tobytes() for number in range(count)]


@pytest.mark.parametrize("source", SOURCES)
def test_good_data_open(source: str, tmp_path: Path) -> None:
    assert open_data(make_recipe(source=source, path=good(source, tmp_path)), cache_dir=None).train_tokens


@contextlib.contextmanager
def unprivileged() -> Iterator[None]:
    """As a user whom file permissions bind, which root is not."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("what", ["file", "folder"])
def test_a_forbidden_file_is_named(source: str, what: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "in")
        folder.mkdir()
        folder.parent.chmod(0o755)
        path = Path(good(source, folder))
        (path if what == "file" else folder).chmod(0o000)
        try:
            with unprivileged():
                error = refusal(source=source, path=str(path))
        finally:
            folder.chmod(0o755)
        assert "permission denied" in error.message
        assert str(path) in error.message


@pytest.mark.parametrize("source", SOURCES)
def test_a_forbidden_tokenizer_or_listing_is_named(source: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = Path(good(source, folder))
        folder.chmod(0o000)
        try:
            with unprivileged():
                error = refusal(source=source, path=str(path.parent))
        finally:
            folder.chmod(0o755)
        assert "permission denied" in error.message


@pytest.mark.parametrize("source", SOURCES)
def test_an_empty_file_is_refused(source: str, tmp_path: Path) -> None:
    path = tmp_path / "empty.array_record"
    path.touch()
    message = refusal(source=source, path=str(path)).message
    assert str(path) in message
    assert "empty" in message or "at least" in message


@pytest.mark.parametrize("source", ["text_files", "array_record"])
@pytest.mark.parametrize("pattern", ["", "/*.txt"])
def test_an_empty_folder_is_refused(source: str, pattern: str, tmp_path: Path) -> None:
    assert f"{tmp_path}{pattern}" in refusal(source=source, path=f"{tmp_path}{pattern}").message


def test_a_folder_is_no_token_file(tmp_path: Path) -> None:
    assert str(tmp_path) in refusal(source="token_file", path=str(tmp_path)).message


@pytest.mark.parametrize("source", SOURCES)
def test_data_shorter_than_one_sequence_are_refused(source: str, tmp_path: Path) -> None:
    message = refusal(source=source, path=good(source, tmp_path), sequence_length=5000).message
    assert "5000" in message or "5001" in message


@pytest.mark.parametrize("source", ["text_files", "token_file"])
def test_a_held_out_part_shorter_than_one_sequence_is_refused(source: str, tmp_path: Path) -> None:
    keys: dict[str, Any] = {"source": source, "path": good(source, tmp_path), "eval_fraction": 0.01}
    error = refusal(**keys)
    assert "held-out" in error.message
    assert open_data(make_recipe(**keys, eval_num_batches=0), cache_dir=None).eval_tokens == 0


@pytest.mark.parametrize("source", SOURCES)
def test_a_token_outside_the_vocabulary_names_both_numbers(source: str, tmp_path: Path) -> None:
    message = refusal(source=source, path=good(source, tmp_path), vocab_size=15).message
    largest = {"text_files": ord("o"), "token_file": 199, "array_record": 19}[source]
    assert f"token {largest} " in message
    assert "model.vocab_size=15" in message


@pytest.mark.parametrize("source", SOURCES)
def test_held_out_data_that_are_trained_on_are_refused(source: str, tmp_path: Path) -> None:
    path = good(source, tmp_path)
    os.symlink(path, f"{path}.array_record")
    assert "both" in refusal(source=source, path=path, eval_path=f"{path}.array_record").message


def tokenizer_keys(folder: Path, content: str | bytes) -> dict[str, Any]:
    (folder / "tokenizer.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    return {"tokenizer": "huggingface", "tokenizer_path": str(folder / "tokenizer.json")}


WORDS = (
    '{"version": "1.0", "added_tokens": [], "model":'
    ' {"type": "WordLevel", "vocab": {"good": 0, "?": 300}, "unk_token": "?"}}'
)


@pytest.mark.parametrize("content", ["", "{", "{}", "[1, 2]", b"\xff\xfe\x00", WORDS[:-20]])
def test_a_damaged_tokenizer_is_named(content: str | bytes, tmp_path: Path) -> None:
    path = good("text_files", tmp_path)
    keys = tokenizer_keys(tmp_path, content)
    assert keys["tokenizer_path"] in refusal(source="text_files", path=path, **keys).message


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    path = good("text_files", tmp_path)
    keys: dict[str, Any] = {"source": "text_files", "path": path, "tokenizer": "huggingface"}
    assert "data.tokenizer_path" in refusal(**keys).message
    assert "none.json" in refusal(**keys, tokenizer_path=str(tmp_path / "none.json")).message


def test_a_tokenizer_larger_than_the_vocabulary_names_both_numbers(tmp_path: Path) -> None:
    keys = tokenizer_keys(tmp_path, WORDS)
    message = refusal(source="text_files", path=good("text_files", tmp_path), **keys).message
    assert "token 300 " in message
    assert "model.vocab_size=256" in message


def test_text_that_is_not_utf8_is_named_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 " * 100)
    keys = tokenizer_keys(tmp_path, WORDS)
    path = str(tmp_path / "latin.txt")
    message = refusal(source="text_files", path=path, vocab_size=301, **keys).message
    assert path in message
    assert "0xe9 at offset 3" in message
    assert open_data(make_recipe(source="text_files", path=path), cache_dir=None).train_tokens


def test_a_token_file_of_another_type_is_refused(tmp_path: Path) -> None:
    (tmp_path / "odd.bin").write_bytes(b"\1\0" * 101)
    message = refusal(source="token_file", path=str(tmp_path / "odd.bin"), token_dtype="uint32").message
    assert "202 bytes" in message
    assert "uint32" in message


@pytest.mark.parametrize(
    "damage",
    [
        lambda whole: whole[: len(whole) // 2],
        lambda whole: b"no records " * 10_000,
        lambda whole: whole[:1000] + bytes([whole[1000] ^ 1]) + whole[1001:],
        lambda whole: whole[:-65536] + bytes(65536),
    ],
    ids=["cut", "junk", "flip", "no-footer"],
)
def test_a_damaged_array_record_is_named(damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    path = Path(good("array_record", tmp_path))
    path.write_bytes(damage(path.read_bytes()))
    message = refusal(source="array_record", path=str(path)).message
    assert str(path) in message
    assert "damaged" in message


def test_an_array_record_damaged_after_it_was_checked_is_named(tmp_path: Path) -> None:
    path = Path(good("array_record", tmp_path))
    data = open_data(make_recipe(source="array_record", path=str(path)), cache_dir=None)
    content = bytearray(path.read_bytes())
    for offset in range(500, 2000):
        content[offset] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match="record"), data.train_batches(0, range(8)) as stream:
        for _ in range(4):
            next(stream)


def test_a_short_record_is_named(tmp_path: Path) -> None:
    path = tmp_path / "short.array_record"
    write_records(path, [*records(3), *records(1, length=16), *records(1)])
    message = refusal(source="array_record", path=str(path)).message
    assert f"{path}: record 3 has 16 tokens" in message
    assert "= 17" in message


def test_a_record_of_another_type_is_named(tmp_path: Path) -> None:
    path = tmp_path / "odd.array_record"
    write_records(path, [*records(2, dtype="<u4"), b"\1\0" * 41])
    message = refusal(source="array_record", path=str(path), token_dtype="uint32").message
    assert f"{path}: record 2 has 82 bytes" in message


def test_records_that_are_all_equal_cannot_be_split(tmp_path: Path) -> None:
    path = tmp_path / "same.array_record"
    write_records(path, records(1) * 5)
    assert "nothing is left to train on" in refusal(source="array_record", path=str(path)).message


def test_an_array_record_without_records_is_refused(tmp_path: Path) -> None:
    write_records(tmp_path / "none.array_record", [])
    refusal(source="array_record", path=str(tmp_path))


def test_a_full_disk_under_the_cache_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = good("text_files", tmp_path)
    monkeypatch.setattr(trainer.data.text, "IN_MEMORY_LIMIT_BYTES", 10)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        error = refusal(source="text_files", path=path, cache_dir=tmp_path / "cache")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert "token cache" in error.message
    assert not list((tmp_path / "cache").glob("*.bin*"))


def test_a_cache_that_cannot_be_written_only_costs_time(tmp_path: Path) -> None:
    (tmp_path / "cache").touch()
    recipe = make_recipe(source="token_file", path=good("token_file", tmp_path))
    assert open_data(recipe, cache_dir=tmp_path / "cache").train_tokens
