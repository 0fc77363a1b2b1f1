"""The order of training data: a function of seed, step and row, and of nothing else."""

from __future__ import annotations

import ast
import hashlib
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import trainer.data
from recipes.errors import UserError
from tests.unit.data_support import make_recipe
from trainer.data import Data, open_data
from trainer.data.batches import eval_order, train_order
from trainer.data.corpus import Tokens

SEQUENCE_LENGTH = 4


@dataclass
class NumberedSequences:
    """Sequence i holds the number i; counts the reads, and fails at one of them if told to."""

    count: int
    fail_at: int = -1
    reads: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int, /) -> Tokens:
        with self.lock:
            self.reads += 1
        if index == self.fail_at:
            raise KeyError(index)
        return np.full(SEQUENCE_LENGTH + 1, index, dtype=np.int32)


def numbered(
    count: int, *, batch: int = 4, seed: int = 0, shuffle: bool = True, prefetch: int = 2, fail_at: int = -1
) -> tuple[Data, NumberedSequences]:
    sequences = NumberedSequences(count, fail_at=fail_at)
    data = Data(
        fingerprint="",
        train_tokens=0,
        eval_tokens=0,
        eval_unigram_entropy_nats=None,
        global_batch_size=batch,
        eval_num_batches=3,
        prefetch_batches=prefetch,
        _train=train_order(sequences, seed=seed, shuffle=shuffle),
        _held_out=eval_order(sequences),
    )
    return data, sequences


def take(data: Data, *, start: int, count: int, rows: list[int] | range) -> np.ndarray:
    """The first tokens of ``count`` batches, [count, rows]."""
    with data.train_batches(start, rows) as stream:
        return np.stack([next(stream)[:, 0] for _ in range(count)])


orders = st.fixed_dictionaries(
    {
        "count": st.integers(1, 40),
        "batch": st.integers(1, 16),
        "seed": st.integers(0, 2**70),
        "shuffle": st.booleans(),
    }
)


@settings(deadline=None, max_examples=20)
@given(order=orders, start=st.integers(0, 8), draw=st.data())
def test_a_batch_depends_on_neither_rows_nor_start(
    order: dict[str, int], start: int, draw: st.DataObject
) -> None:
    rows = draw.draw(st.lists(st.integers(0, order["batch"] - 1), min_size=1, max_size=8), label="rows")
    data, _ = numbered(**order)  # type: ignore[arg-type]
    whole = take(data, start=0, count=start + 2, rows=range(order["batch"]))
    part = take(data, start=start, count=2, rows=rows)
    np.testing.assert_array_equal(part, whole[start:, rows])


@settings(deadline=None, max_examples=20)
@given(order=orders)
def test_every_epoch_holds_every_record_once(order: dict[str, int]) -> None:
    data, _ = numbered(**order)  # type: ignore[arg-type]
    num_steps = -(-3 * order["count"] // order["batch"])
    records = take(data, start=0, count=num_steps, rows=range(order["batch"])).ravel()
    epochs = records[: 3 * order["count"]].reshape(3, order["count"])
    for epoch in epochs:
        assert sorted(epoch) == list(range(order["count"]))
    if not order["shuffle"]:
        assert (epochs == np.arange(order["count"])).all()
    elif order["count"] >= 12:
        assert len({tuple(epoch) for epoch in epochs}) == 3


@pytest.mark.parametrize("num_hosts", [1, 2, 4, 8])
def test_any_number_of_hosts_sees_one_order(num_hosts: int) -> None:
    data, _ = numbered(37, batch=16)
    share = 16 // num_hosts
    hosts = [
        take(data, start=3, count=9, rows=range(host * share, (host + 1) * share))
        for host in range(num_hosts)
    ]
    order = np.concatenate(hosts, axis=1).astype("<i4").tobytes()
    # A golden value: another one means that resumed runs would see other data than before.
    expected = "e83f1bc008411f7e"
    assert hashlib.sha256(order).hexdigest()[:16] == expected


def test_neighbouring_seeds_share_no_epoch() -> None:
    first, _ = numbered(100, batch=100, seed=0)
    second, _ = numbered(100, batch=100, seed=1)
    rows = range(100)
    epochs = [*take(first, start=0, count=4, rows=rows), *take(second, start=0, count=4, rows=rows)]
    assert len({tuple(epoch) for epoch in epochs}) == 8


def test_more_sequences_than_can_be_shuffled_are_refused() -> None:
    numbered(2**32)
    with pytest.raises(UserError, match="more than 4294967296"):
        numbered(2**32 + 1)


def test_a_far_step_is_reached_at_once() -> None:
    data, sequences = numbered(1000, prefetch=1)
    take(data, start=10**9, count=1, rows=[0])
    assert sequences.reads <= 3


@pytest.mark.parametrize("prefetch", [1, 2, 7])
def test_reading_ahead_is_bounded(prefetch: int) -> None:
    data, sequences = numbered(1000, prefetch=prefetch)
    before = set(threading.enumerate())
    stream = data.train_batches(0, [0, 1])
    for _ in range(5):
        next(stream)
    stream.close()
    join_threads(before)
    assert sequences.reads <= 2 * (5 + prefetch)


def join_threads(before: set[threading.Thread]) -> None:
    """Wait for the threads that came after ``before``; fail when one stays."""
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=10.0)
        assert not thread.is_alive(), thread


@pytest.mark.parametrize("how", ["close", "exhaust", "error", "with"])
def test_no_thread_outlives_its_stream(how: str) -> None:
    before = set(threading.enumerate())
    data, _ = numbered(50, fail_at=7 if how == "error" else -1)
    if how == "close":
        stream = data.train_batches(0, [0])
        next(stream)
        stream.close()
        assert next(stream, None) is None
    elif how == "exhaust":
        assert len(list(data.eval_batches([0, 1]))) == 3
    elif how == "error":
        with pytest.raises(KeyError):
            list(data.train_batches(0, [0]))
    else:
        with data.train_batches(0, [0]) as stream:
            next(stream)
    join_threads(before)


@pytest.mark.parametrize("rows", [[], [-1], [4], [0, 99]])
def test_rows_outside_the_batch_are_refused(rows: list[int]) -> None:
    data, _ = numbered(10, batch=4)
    with pytest.raises(ValueError, match="global batch of 4"):
        data.train_batches(0, rows)


def test_held_out_batches_are_the_same_each_time_and_for_each_seed() -> None:
    batches = [
        np.stack(list(numbered(50, seed=seed)[0].eval_batches(range(4)))).tolist() for seed in (0, 0, 5)
    ]
    assert batches[0] == batches[1] == batches[2]
    assert len({row[0] for batch in batches[0] for row in batch}) == 12


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@settings(deadline=None, max_examples=12)
@given(
    num_tokens=st.integers(60, 300),
    sequence_length=st.integers(2, 9),
    fraction=st.floats(0.2, 0.8),
    batch=st.integers(2, 8),
)
def test_training_and_held_out_tokens_never_overlap(
    folder: Path, num_tokens: int, sequence_length: int, fraction: float, batch: int
) -> None:
    np.arange(num_tokens, dtype="<u2").tofile(folder / "tokens.bin")
    recipe = make_recipe(
        source="token_file",
        path=str(folder / "tokens.bin"),
        vocab_size=1000,
        sequence_length=sequence_length,
        global_batch_size=batch,
        eval_fraction=fraction,
        eval_num_batches=-(-num_tokens // batch),
    )
    data = open_data(recipe, cache_dir=None)
    num_steps = -(-data.train_tokens // (batch * sequence_length))
    with data.train_batches(0, range(batch)) as stream:
        trained = {int(token) for _ in range(num_steps) for token in next(stream).ravel()}
    held_out = {int(token) for rows in data.eval_batches(range(batch)) for token in rows.ravel()}
    assert not trained & held_out
    assert len(trained) == data.train_tokens + 1
    assert len(held_out) == data.eval_tokens + 1


def test_the_data_code_imports_no_jax() -> None:
    for path in Path(str(trainer.data.__file__)).parent.glob("*.py"):
        tree = ast.parse(path.read_text())
        names = [
            alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names
        ]
        names += [str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        assert not [name for name in names if name.split(".")[0] == "jax"], path
