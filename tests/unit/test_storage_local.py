"""Local files when the system refuses: no permission, no space, something in the way, a held lock."""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher import storage_local
from launcher.storage import StorageError, Unavailable, open_storage

FULL_DISK = """
import resource, sys
from launcher.storage import StorageError, open_storage
store = open_storage(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
try:
    store.replace("a", b"x" * 1000)
except StorageError as error:
    print(error.exit_code, error, error.hint, sep="|")
"""


@contextlib.contextmanager
def _without_root(folder: Path) -> Iterator[None]:
    """Root may write everywhere, so it becomes nobody for a moment."""
    if os.geteuid() != 0:
        yield
        return
    for parent in (folder, *folder.parents):
        if parent.owner() == "root" and str(parent).startswith("/tmp/pytest"):
            parent.chmod(parent.stat().st_mode | 0o055)
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_read_only_folder_is_one_error_with_a_hint(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    folder.mkdir()
    (folder / "a").write_bytes(b"1")
    folder.chmod(0o555)
    store = open_storage(str(folder))
    with _without_root(tmp_path):
        for path in ("a", "b", "c/d"):
            with pytest.raises(StorageError, match="no permission to write") as caught:
                store.replace(path, b"2")
            assert caught.value.exit_code == 2
            assert "run.root" in caught.value.hint
    assert sorted(entry.name for entry in folder.iterdir()) == ["a"]


def test_a_full_disk_leaves_the_old_object_and_no_half(tmp_path: Path) -> None:
    store = open_storage(str(tmp_path))
    store.create("a", b"old")
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    code, message, hint = done.stdout.strip().split("|")
    assert code == "2"
    assert "cannot write" in message
    assert "free some space" in hint
    assert store.read("a") == b"old"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [".muster.lock", "a"]


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError, match="cannot write"):
        open_storage(str(tmp_path)).create("file/a", b"")
    (tmp_path / "folder").mkdir()
    with pytest.raises(StorageError, match="cannot read"):
        open_storage(str(tmp_path)).read("folder")


def test_a_lock_that_is_never_let_go_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_storage(str(tmp_path))
    store.create("a", b"old")
    monkeypatch.setattr(storage_local, "LOCK_TIMEOUT_S", 0.05)
    with (tmp_path / ".muster.lock").open("rb+") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(Unavailable, match="locked by another process"):
            store.replace("a", b"new")
    assert store.read("a") == b"old"
    store.replace("a", b"new")
    assert store.list() == ["a"]


def test_an_object_that_is_far_too_large_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "a").open("wb") as file:
        file.truncate(17 * 2**20)
    with pytest.raises(StorageError, match="larger than"):
        open_storage(str(tmp_path)).read("a")


def test_marks_of_many_small_objects_are_cheap(tmp_path: Path) -> None:
    for number in range(2000):
        folder = tmp_path / f"run-{number // 10}" / "attempts" / str(number)
        folder.mkdir(parents=True)
        (folder / "end.json").write_bytes(b"{}")
    store = open_storage(str(tmp_path))
    began_s = time.process_time()
    assert len(store.marks("*/attempts/*/end.json")) == 2000
    assert time.process_time() - began_s < 2.0
