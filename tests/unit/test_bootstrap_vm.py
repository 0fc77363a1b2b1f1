"""The startup script of TPU VMs, part by part: what it refuses, tries again, and leaves behind."""

from __future__ import annotations

import ast
import email.message
import fcntl
import os
import re
import sys
import urllib.error
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher import bundle
from launcher.bundle import make_bundle
from launcher.tpu import bootstrap, vm
from launcher.tpu.bootstrap import Failure
from tests.unit.bundle_support import content_of, small_tree
from tests.unit.test_bundle_fetch import HOSTILE_ARCHIVES, SAFE_AFTER_ALL

SCRIPT = Path(bootstrap.__file__)
REPO = SCRIPT.parents[2]


def test_it_is_one_file_for_an_old_python() -> None:
    tree = ast.parse(SCRIPT.read_text(), feature_version=(3, 10))
    imported = {
        name.partition(".")[0]
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names] if isinstance(node, ast.Import)
            else [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        )
    }  # fmt: skip
    assert imported <= sys.stdlib_module_names
    assert SCRIPT.read_text().startswith("#!/usr/bin/env python3\n")


def test_what_it_repeats_of_the_launcher_is_the_same() -> None:
    assert bootstrap.SPEC == vm.SPEC
    assert bootstrap.GUEST_STATE.endswith(f"/{vm.NAMESPACE}/{vm.STATE}")
    assert bootstrap.ARCHIVE_LIMIT_BYTES >= bundle.ARCHIVE_LIMIT_BYTES
    pinned = re.search(r"^uv==(\S+) ((?:.*\\\n)*.*)", (REPO / "requirements-dev.lock").read_text(), re.M)
    assert pinned is not None
    name, _, digest = bootstrap.UV_WHEEL.strip().partition(" --hash=")
    assert name == f"uv=={pinned[1]}"
    assert digest in pinned[2]


def test_it_unpacks_what_a_launch_packs(tmp_path: Path) -> None:
    packed = make_bundle(small_tree(tmp_path / "code"))
    (tmp_path / "out").mkdir()
    bootstrap.unpack(packed.archive, tmp_path / "out")
    assert content_of(tmp_path / "out") == content_of(tmp_path / "code")


@pytest.mark.parametrize("name", HOSTILE_ARCHIVES)
def test_hostile_archives(name: str, tmp_path: Path) -> None:
    target = tmp_path / "deep" / "code" / "x"

    def unpack() -> None:
        with bootstrap.beside(target) as folder:
            bootstrap.unpack(HOSTILE_ARCHIVES[name], folder)

    if name in SAFE_AFTER_ALL:
        unpack()
        return
    with pytest.raises(Failure, match="the launched code is damaged"):
        unpack()
    assert not list((tmp_path / "deep" / "code").iterdir())
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["code"]


@pytest.mark.parametrize("packed", [b"", b"no gzip", zlib.compress(b"x"), b"\x1f\x8b\x08"])
def test_what_is_no_gzip(packed: bytes) -> None:
    with pytest.raises(Failure, match=r"gs://b/x is damaged"):
        bootstrap.unzip(packed, "gs://b/x")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"bundle": "sha256:12"}, "'sha256:12' is not the digest of a bundle"),
        ({"bundle": ""}, "'' is not the digest"),
        ({"bundle": "sha256:../../../etc/passwd"}, "is not the digest"),
        ({"run_dir": "/data/runs/a"}, "/data/runs/a is not in a bucket"),
        ({"run_dir": "gs://bucket"}, "not in a bucket"),
    ],
)
def test_what_it_cannot_fetch(changes: dict[str, str], why: str, tmp_path: Path) -> None:
    spec = {"run_dir": "gs://b/runs/a", "bundle": f"sha256:{'a' * 64}", **changes}
    with pytest.raises(Failure, match=re.escape(why)):
        bootstrap.code_of(spec, tmp_path)


def test_code_that_lacks_the_launcher_is_explained(tmp_path: Path) -> None:
    (tmp_path / "code" / ("a" * 64) / "trainer").mkdir(parents=True)
    with pytest.raises(
        Failure, match="has no launcher/, recipes/: TPU VMs run Muster from the launched tree"
    ):
        bootstrap.code_of({"run_dir": "gs://b/runs/a", "bundle": f"sha256:{'a' * 64}"}, tmp_path)


@pytest.mark.parametrize("name", ["no.lock", "../outside.lock", "/etc/passwd", "link.lock", ""])
def test_lock_files_are_within_the_code(name: str, tmp_path: Path) -> None:
    code = tmp_path / "code"
    code.mkdir()
    (tmp_path / "outside.lock").touch()
    (code / "link.lock").symlink_to("../outside.lock")
    with pytest.raises(Failure, match=r"target\.requirements names"):
        bootstrap.lock_file(code, name)


@pytest.mark.parametrize(
    ("python", "why"),
    [
        ("/no/such/python", "does not run on this VM"),
        ("/bin/false", "does not run on this VM"),
        ("SCRIPT", "is Python 3.9; Muster needs 3.12 or later"),
    ],
)
def test_an_interpreter_that_does_not_do(python: str, why: str, tmp_path: Path) -> None:
    old = tmp_path / "python3.9"
    old.write_text("#!/bin/sh\necho 3.9\n")
    old.chmod(0o755)
    given = str(old) if python == "SCRIPT" else python
    with pytest.raises(Failure, match=why):
        bootstrap.interpreter({"python": given}, tmp_path, tmp_path)


def test_the_given_interpreter_is_taken(tmp_path: Path) -> None:
    assert bootstrap.interpreter({"python": sys.executable}, tmp_path, tmp_path) == Path(sys.executable)


def http_error(code: int) -> urllib.error.HTTPError:
    return urllib.error.HTTPError("http://x", code, "", email.message.Message(), None)


def failing(*errors: Exception) -> tuple[Callable[[], str], Iterator[Exception]]:
    left = iter(errors)

    def do() -> str:
        for error in left:
            raise error
        return "done"

    return do, left


@pytest.mark.parametrize(
    ("errors", "waits", "why"),
    [
        ([], 0, ""),
        ([OSError("no route"), TimeoutError(), http_error(503), http_error(429)], 4, ""),
        ([http_error(404)], 0, "fetching: HTTP 404 (it is not there: launch again)"),
        ([http_error(403)], 0, "fetching: HTTP 403 (the VM's service account may not read it"),
        ([OSError("no route"), http_error(404)], 1, "fetching: HTTP 404"),
        ([OSError("no route")] * 9, 8, "fetching: no route, after 9 tries"),
        ([OSError("no route")] * 8, 8, ""),
    ],
)
def test_what_is_tried_again(errors: list[Exception], waits: int, why: str) -> None:
    slept: list[float] = []
    do, _ = failing(*errors)
    if why:
        with pytest.raises(Failure, match=re.escape(why)):
            bootstrap.patiently("fetching", do, sleep=slept.append)
    else:
        assert bootstrap.patiently("fetching", do, sleep=slept.append) == "done"
    assert slept == list(bootstrap.WAITS_S[:waits])
    assert sum(bootstrap.WAITS_S) <= 120


def test_the_lock_is_held_by_one(tmp_path: Path) -> None:
    first = bootstrap.take_lock(tmp_path / "lock")
    assert first is not None
    assert (tmp_path / "lock").read_text() == f"{os.getpid()}\n"
    assert bootstrap.take_lock(tmp_path / "lock") is None
    assert not os.get_inheritable(first)
    fcntl.flock(first, fcntl.LOCK_UN)
    os.close(first)
    second = bootstrap.take_lock(tmp_path / "lock")
    assert second is not None
    os.close(second)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"run_dir": 1}', '{"run_dir": "a", "bundle": "b", "env": [], "requirements": []}'],
)
def test_metadata_that_a_launch_does_not_write(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "spec_text", lambda: text)
    with pytest.raises(Failure, match="the metadata muster-vm is"):
        bootstrap.read_spec()


def test_a_folder_that_was_begun_is_not_taken_for_whole(tmp_path: Path) -> None:
    """Whatever a killed run left beside is removed by the next one."""
    target = tmp_path / "code" / "x"
    with pytest.raises(KeyboardInterrupt), bootstrap.beside(target) as folder:
        (folder / "half").touch()
        raise KeyboardInterrupt
    assert not list(target.parent.iterdir())
    (target.parent / ".new-killed").mkdir()
    with bootstrap.beside(target) as folder:
        (folder / "whole").touch()
    assert [path.name for path in target.parent.iterdir()] == ["x"]


def keeper(tmp_path: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> bootstrap.Keeper:
    """Keeps a worker that is a shell script."""
    made = tmp_path / "python"
    made.write_text(f"#!/bin/sh\n{script}\n")
    made.chmod(0o755)
    monkeypatch.setattr(bootstrap, "tell", lambda _: None)
    lock = bootstrap.take_lock(tmp_path / "lock")
    assert lock is not None
    return bootstrap.Keeper(made, tmp_path, lock)


@pytest.fixture
def _signals() -> Iterator[None]:
    import signal

    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("_signals")
def test_a_worker_that_dies_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = 'echo x >>tries; [ "$(wc -l <tries)" -ge 3 ] || kill -9 $$; exit 42'
    slept: list[float] = []
    assert keeper(tmp_path, script, monkeypatch).keep(slept.append) == 42
    assert slept == [1.0, 2.0]


@pytest.mark.usefixtures("_signals")
def test_a_worker_that_keeps_dying_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[Any] = []
    with pytest.raises(Failure, match="the worker died of signal 11, 6 times in a row"):
        keeper(tmp_path, "kill -11 $$", monkeypatch).keep(slept.append)
    assert slept == [1.0, 2.0, 4.0, 8.0, 16.0]
