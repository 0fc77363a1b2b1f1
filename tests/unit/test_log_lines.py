"""Times in front of lines, lines out of chunks, and the merge of many logs."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from launcher import log_lines
from launcher.log_lines import MAX_LINE_BYTES, READERS, HostLog, LineCutter, merged, split_stamp, stamp
from launcher.storage import Storage, Unavailable, open_storage


@pytest.mark.parametrize(
    ("time_s", "expected"),
    [
        (0.0, b"1970-01-01T00:00:00.000Z "),
        (1796072400.1239, b"2026-11-30T21:00:00.123Z "),
        (1796072400.9999, b"2026-11-30T21:00:00.999Z "),
    ],
)
def test_a_stamp_is_the_start_of_the_line_rounded_down(time_s: float, expected: bytes) -> None:
    assert stamp(time_s) == expected
    assert split_stamp(expected + b"text") == (expected.decode().strip(), b"text")


@pytest.mark.parametrize(
    ("line", "time", "text"),
    [
        (b"2026-11-30T21:00:00.123Z ", "2026-11-30T21:00:00.123Z", b""),
        (b"2026-11-30T21:00:00.123456789Z x", "2026-11-30T21:00:00.123Z", b"x"),
        (
            b"2026-11-30T21:00:00.123Z 2026-11-30T21:00:00.456Z own",
            "2026-11-30T21:00:00.123Z",
            b"2026-11-30T21:00:00.456Z own",
        ),
        (b"2026-11-30T21:00:00.123Z", "", b"2026-11-30T21:00:00.123Z"),
        (b"2026-11-30T21:00:00Z x", "", b"2026-11-30T21:00:00Z x"),
        (b" 2026-11-30T21:00:00.123Z x", "", b" 2026-11-30T21:00:00.123Z x"),
        (b"\xff\xfe", "", b"\xff\xfe"),
        (b"", "", b""),
    ],
)
def test_exactly_one_stamp_is_taken_off(line: bytes, time: str, text: bytes) -> None:
    assert split_stamp(line) == (time, text)


def at(second: int, text: str) -> bytes:
    return stamp(1796072400.0 + second) + text.encode() + b"\n"


def cut(data: bytes, size: int) -> Sequence[tuple[str, str]]:
    cutter = LineCutter(1, "s0-h0")
    chunks = [data[start : start + size] for start in range(0, len(data), size)]
    lines = [line for chunk in chunks for line in cutter.feed(chunk)]
    return [(line.time, line.text) for line in [*lines, *cutter.flush()]]


@pytest.mark.parametrize("size", range(1, 40))
def test_lines_do_not_depend_on_chunks(size: int) -> None:
    data = b"before\n" + at(0, "caf\u00e9 \u4f60\u597d") + b"of the same time\n" + at(1, "") + b"10%\r20%\r"
    first, second = (stamp(1796072400.0 + seconds).decode().strip() for seconds in (0, 1))
    assert cut(data, size) == [
        ("", "before"),
        (first, "caf\u00e9 \u4f60\u597d"),
        (first, "of the same time"),
        (second, ""),
        (second, "10%\r20%\r"),
    ]


def test_an_endless_line_comes_in_pieces_that_end_between_characters() -> None:
    text = "\u4f60" * 800_000
    lines = cut(at(0, text) + at(1, "next"), 100_000)
    assert len(lines) == 4
    assert "".join(shown for _, shown in lines[:3]) == text
    assert [len({time for time, _ in lines[:3]}), lines[3][1]] == [1, "next"]
    assert all(len(shown.encode()) <= MAX_LINE_BYTES for _, shown in lines)


def test_the_merge_is_by_time_then_by_host(tmp_path: Path) -> None:
    store = open_storage(str(tmp_path))
    bodies = {
        "s0-h0": at(0, "a") + at(2, "c") + at(2, "d") + at(5, "g"),
        "s0-h1": b"without\n" + at(1, "b") + at(2, "e"),
        "s0-h2": b"",
        "s0-h3": at(3, "f") + b"f2\n",
    }
    for host, body in bodies.items():
        store.write_log(f"{host}.log", 0, body)
    logs = [HostLog(store, f"{host}.log", LineCutter(1, host), tail=None) for host in bodies]
    merged_lines = [*merged(logs, [], growing=False)]
    assert [line.text for line in merged_lines] == ["without", "a", "b", "c", "d", "e", "f", "f2", "g"]
    assert merged_lines[0].host == "s0-h1"
    # Nothing is given twice, and what comes later is merged again.
    store.write_log("s0-h3.log", len(bodies["s0-h3"]), at(9, "j") + b"half")
    store.write_log("s0-h0.log", len(bodies["s0-h0"]), at(8, "i"))
    assert [line.text for line in merged(logs, [], growing=True)] == ["i", "j"]
    assert [line.text for line in merged(logs, [], growing=False)] == ["half"]


def test_a_clock_set_back_keeps_the_order_of_its_host(tmp_path: Path) -> None:
    store = open_storage(str(tmp_path))
    store.write_log("a", 0, at(5, "1") + at(2, "2") + at(6, "3"))
    store.write_log("b", 0, at(4, "x") + at(7, "y"))
    logs = [HostLog(store, name, LineCutter(1, name), tail=None) for name in ("a", "b")]
    assert [line.text for line in merged(logs, [], growing=False)] == ["x", "1", "2", "3", "y"]


class CountingStorage:
    """Counts what is read and how many read at once; every log is the same."""

    def __init__(self, body: bytes) -> None:
        self._body, self._lock = body, threading.Lock()
        self.reads = self.bytes = self.now = self.most = 0
        self.full = threading.Event()

    def read_log(self, path: str, offset: int = 0, *, limit_bytes: int | None = None) -> bytes:
        data = self._body[offset:][:limit_bytes]
        with self._lock:
            self.reads, self.bytes, self.now = self.reads + 1, self.bytes + len(data), self.now + 1
            self.most = max(self.most, self.now)
            if self.now == READERS:
                self.full.set()
        self.full.wait(10.0)
        with self._lock:
            self.now -= 1
        return data

    def read_log_tail(self, path: str, limit_bytes: int) -> tuple[int, bytes]:
        start = max(0, len(self._body) - limit_bytes)
        return start, self.read_log(path, start)


def make_logs(storage: CountingStorage, count: int, tail: int | None) -> Sequence[HostLog]:
    return [
        HostLog(cast(Storage, storage), "log", LineCutter(1, f"s0-h{host}"), tail=tail)
        for host in range(count)
    ]


def test_reads_run_side_by_side_and_a_tail_is_one_read_a_host() -> None:
    storage = CountingStorage(b"".join(at(second, "text") for second in range(1000)))
    logs = make_logs(storage, 100, tail=5)
    assert sum(1 for _ in merged(logs, [], growing=False)) == 500
    assert (storage.reads, storage.most) == (100, READERS)
    assert storage.bytes < 100 * 2000


def test_memory_is_bounded_by_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_lines, "MEMORY_BYTES", 0)
    storage = CountingStorage(b"".join(at(second, "text") for second in range(10_000)))
    logs = make_logs(storage, READERS, tail=9_000)
    lines = merged(logs, [], growing=False)
    first = [*itertools.islice(lines, 2 * READERS)]
    lines.close()
    assert {line.time for line in first} == {
        stamp(1796072400.0 + second).decode().strip() for second in (1000, 1001)
    }
    # Of each host: the search for the tail, then the chunk in use and the one ahead.
    assert storage.bytes <= READERS * (log_lines.TAIL_BLOCK_BYTES + 2 * log_lines.MIN_CHUNK_BYTES)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("logs")]


def test_what_storage_says_reaches_the_reader() -> None:
    def fail(path: str, offset: int, *, limit_bytes: int) -> bytes:
        raise Unavailable("cannot read the log")

    storage = cast(Storage, SimpleNamespace(read_log=fail))
    logs = [HostLog(storage, "log", LineCutter(1, "s0-h0"), tail=None) for _ in range(100)]
    with pytest.raises(Unavailable, match="cannot read the log"):
        [*merged(logs, [], growing=False)]


def test_the_first_read_does_not_wait_for_the_first_line() -> None:
    read = threading.Event()

    def note(path: str, offset: int, *, limit_bytes: int) -> bytes:
        read.set()
        return b""

    storage = cast(Storage, SimpleNamespace(read_log=note))
    with ThreadPoolExecutor(1) as pool:
        lines = HostLog(storage, "log", LineCutter(1, "s0-h0"), tail=None).read_on(pool, 8, growing=False)
        assert read.wait(10.0)
        assert [*lines] == []
