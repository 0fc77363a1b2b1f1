"""A code bundle: same files, same digest; carried exactly; refused when too large; uploaded once."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import stat
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher import bundle as bundle_module
from launcher.bundle import Bundle, fetch, is_uploaded, make_bundle, upload
from launcher.bundle_files import find_tree, looks_secret
from launcher.storage import Storage, open_storage
from recipes.errors import UserError
from tests.unit.bundle_support import (
    GIT_ENV,
    content_of,
    repository,
    round_trip,
    small_tree,
    write,
    write_raw,
)

HOSTILE_NAMES = (
    b"-rf", b"--exec=sh", b"a b", b" ", b"end ", b"new\nline", b"tab\tand\rreturn", b"\x1b[31mred", b"\x7f",
    b"'\"`$(id);&|", b"*?[a]", b"back\\slash", b"%s{0}", b"#", b"~", b"...", b"..a", b"a..", b":colon",
    b"@file", "gr\u00fc\u00dfe".encode(), "e\u0301".encode(), "\u202eexe.txt".encode(), "\u200b".encode(),
    "\U0001f600".encode(), b"\xff\xfe", b"caf\xe9", b"\xed\xa0\x80", b"x" * 255, "\u00e9".encode() * 127,
    b"/".join([b"deep" * 60] * 12) + b"/file", b"100 path=x\n", b"@PaxHeader", b"GNU.sparse.name",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in GIT_ENV.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return open_storage(str(tmp_path / "root"))


@pytest.fixture
def code(tmp_path: Path) -> Path:
    return small_tree(tmp_path / "code")


def test_what_arrives_is_what_was_there(code: Path, storage: Storage, tmp_path: Path) -> None:
    fetched = round_trip(code, storage, tmp_path / "into")
    assert content_of(fetched) == content_of(code)
    assert content_of(fetched)[b"link"] == ("link", b"sub/run.sh")
    assert content_of(fetched)[b"sub/run.sh"][0] == "program"
    assert stat.S_IMODE(fetched.stat().st_mode) == 0o755


@pytest.mark.parametrize("with_git", [True, False])
def test_hostile_names_are_carried_exactly(with_git: bool, storage: Storage, tmp_path: Path) -> None:
    folder = tmp_path / "code"
    folder.mkdir()
    for name in HOSTILE_NAMES:
        write_raw(folder, name, b"content of " + name)
    if with_git:
        repository(folder, {})
        write_raw(folder, b"sub/untracked\n\xff", b"")
    for number, target in enumerate((b"new\nline", b"\xff\xfe", b"x" * 255, b"-rf", b"not there", b"loop")):
        os.symlink(target, os.path.join(os.fsencode(folder), b"link-%d" % number))
    assert content_of(round_trip(folder, storage, tmp_path / "into")) == content_of(folder)


NAME_PARTS = st.binary(min_size=1, max_size=80).filter(
    lambda part: not {*b"/\0"} & {*part} and part not in (b".", b"..", b".git")
)
FILES = st.dictionaries(
    NAME_PARTS, st.tuples(st.binary(max_size=2000), st.booleans()), min_size=1, max_size=8
)


def _make(folder: Path, files: dict[bytes, tuple[bytes, bool]], mtime_s: int) -> Bundle:
    folder.mkdir()
    for name, (content, executable) in files.items():
        write_raw(folder, name, content)
        path = os.path.join(os.fsencode(folder), name)
        os.chmod(path, 0o700 if executable else 0o664)
        os.utime(path, (mtime_s, mtime_s))
    return make_bundle(folder)


@given(files=FILES)
@settings(max_examples=60, deadline=None)
def test_same_files_same_digest_and_any_name_arrives(files: dict[bytes, tuple[bytes, bool]]) -> None:
    files = {name: facts for name, facts in files.items() if not looks_secret(os.fsdecode(name))} or {
        b"a": (b"", False)
    }
    top = Path(tempfile.mkdtemp(prefix="muster-bundle-"))
    try:
        bundle = _make(top / "one", files, 10**9)
        again = _make(top / "two", dict(reversed(files.items())), 1_700_000_000)
        assert bundle.archive == again.archive
        assert bundle.sha256 == hashlib.sha256(bundle.archive).hexdigest()
        storage = open_storage(str(top / "root"))
        upload(storage, bundle)
        arrived = content_of(fetch(storage, bundle.digest, top / "into"))
        assert arrived == {name: ("program" if x else "file", data) for name, (data, x) in files.items()}
    finally:
        shutil.rmtree(top)


@pytest.mark.parametrize(
    "change",
    [
        lambda code: (code / "a.py").write_text("print(2)\n"),
        lambda code: (code / "a.py").rename(code / "b.py"),
        lambda code: (code / "a.py").chmod(0o755),
        lambda code: (code / "empty").unlink(),
        lambda code: (code / "new").touch(),
        lambda code: ((code / "link").unlink(), (code / "link").symlink_to("a.py")),
    ],
)
def test_any_change_is_another_digest(code: Path, change: Callable[[Path], object]) -> None:
    before = make_bundle(code)
    change(code)
    assert make_bundle(code).sha256 != before.sha256


def test_the_digest_is_of_this_format_for_good(tmp_path: Path) -> None:
    """Manifests hold it: another archive format would make every running JobSet look changed."""
    write(tmp_path, {"a.py": "print(1)\n", "gr\u00fc\u00dfe/" + "x" * 120: "long", "run": "#!/bin/sh\n"})
    write_raw(tmp_path, b"\xff", b"")
    (tmp_path / "run").chmod(0o755)
    (tmp_path / "link").symlink_to("a.py")
    assert (
        make_bundle(tmp_path).digest
        == "sha256:2ec9f92721df51b3e5bf220b7b4417f4d040793adeabd10dbf9b4b4c590f2cc6"
    )


def test_neither_time_nor_owner_is_in_it(code: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(make_bundle(code).archive)) as tar:
        members = tar.getmembers()
    assert {(member.mtime, member.uid, member.gid, member.uname, member.gname) for member in members} == {
        (315532800, 0, 0, "", "")
    }
    assert {member.mode for member in members} == {0o644, 0o755, 0o777}


def test_the_largest_files_are_named(tmp_path: Path) -> None:
    repo = repository(tmp_path, {"a.py": "", **{f"data/{n}\n.bin": b"x" * n * 1000 for n in range(1, 8)}})
    with pytest.raises(UserError) as caught:
        make_bundle(repo, limit_bytes=20_000)
    lines = caught.value.message.splitlines()
    assert "the 8 files of" in lines[0]
    assert [line.split()[-1] for line in lines[1:]] == [f"data/{n}\\n.bin" for n in (7, 6, 5, 4, 3)]
    assert ".gitignore" in caught.value.hint
    assert make_bundle(repo, limit_bytes=28_000).size_bytes == 28_000


def test_outside_git_the_fix_begins_with_git(code: Path) -> None:
    with pytest.raises(UserError, match="more than the") as caught:
        make_bundle(code, limit_bytes=1)
    assert caught.value.hint.startswith("run `git init`")


def test_an_empty_folder_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no files"):
        make_bundle(tmp_path)


def test_a_file_that_goes_away_while_it_is_read(code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = find_tree(code)
    (code / "a.py").unlink()
    monkeypatch.setattr(bundle_module, "find_tree", lambda folder: tree)
    with pytest.raises(UserError, match=r"a\.py vanished"):
        make_bundle(code)


def test_a_file_that_became_a_link_is_not_followed(code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = find_tree(code)
    (code / "a.py").unlink()
    (code / "a.py").symlink_to("/etc/passwd")
    monkeypatch.setattr(bundle_module, "find_tree", lambda folder: tree)
    with pytest.raises(UserError, match=r"cannot read .*a\.py"):
        make_bundle(code)


# Uploading


def test_code_that_is_there_is_known(code: Path, storage: Storage) -> None:
    bundle = make_bundle(code)
    assert not is_uploaded(storage, bundle.digest)
    assert upload(storage, bundle) is True
    assert is_uploaded(storage, bundle.digest)
    assert storage.children(".bundles") == [f"{bundle.sha256}.tar.gz"]


def test_who_loses_the_race_has_uploaded_nothing(code: Path, storage: Storage) -> None:
    upload(storage, make_bundle(code))
    assert upload(storage, make_bundle(code)) is False
