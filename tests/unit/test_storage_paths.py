"""Which paths and addresses are accepted, and that nothing leaves the root."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.storage import StorageError, checked_path, open_storage


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/etc/passwd",
        "//a",
        "a//b",
        "a/",
        ".",
        "..",
        "../a",
        "a/../b",
        "a/..",
        "./a",
        "a\0b",
        "a\nb",
        "a\x1b[31m",
        "a\u202eb",
        "a\u2028b",
        "a\\..\\b",
        "x" * 901,
    ],
)
def test_bad_paths_are_refused_by_every_operation(path: str, tmp_path: Path) -> None:
    store = open_storage(str(tmp_path / "root"))
    with pytest.raises(StorageError):
        store.read(path)
    with pytest.raises(StorageError):
        store.create(path, b"")
    with pytest.raises(StorageError):
        store.replace(path, b"")
    with pytest.raises(StorageError):
        store.delete(path)
    with pytest.raises(StorageError):
        store.write_log(path, 0, b"x")
    with pytest.raises(StorageError):
        store.child(path)
    assert not list(tmp_path.iterdir())


@settings(deadline=None, max_examples=200)
@given(st.text(alphabet=st.one_of(st.characters(), st.sampled_from("/.\\")), max_size=30))
def test_what_is_accepted_stays_below_the_root(path: str) -> None:
    try:
        checked_path(path)
    except StorageError:
        return
    parts = (Path("/root") / path).parts
    assert parts[:2] == ("/", "root")
    assert ".." not in parts
    assert len(parts) > 2


def test_symbolic_links_do_not_lead_out(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "key").write_bytes(b"secret")
    root = tmp_path / "root"
    root.mkdir()
    (root / "out").symlink_to(secret)
    (root / "file").symlink_to(secret / "key")
    store = open_storage(str(root))
    with pytest.raises(StorageError, match="leads out of"):
        store.read("out/key")
    with pytest.raises(StorageError, match="leads out of"):
        store.read("file")
    with pytest.raises(StorageError, match="leads out of"):
        store.replace("out/new", b"x")
    with pytest.raises(StorageError, match="leads out of"):
        store.list("out")
    assert [entry.name for entry in secret.iterdir()] == ["key"]


def test_the_root_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "runs").symlink_to(tmp_path / "disk")
    open_storage(str(tmp_path / "runs")).create("a", b"1")
    assert (tmp_path / "disk" / "a").read_bytes() == b"1"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("", "is empty"),
        ("s3://bucket/x", "s3:// addresses are not supported"),
        ("file:///tmp/x", "file:// addresses are not supported"),
        ("gs://", "is not a bucket name"),
        ("gs://UPPER/x", "is not a bucket name"),
        ("gs://bucket/../x", r"holds \. or \.\."),
        ("gs://bucket//x", "is absolute"),
        ("a\0b", "NUL"),
    ],
)
def test_bad_addresses_are_refused(url: str, message: str) -> None:
    with pytest.raises(StorageError, match=message):
        open_storage(url)


@pytest.mark.parametrize(
    ("url", "same"),
    [("gs://bucket", "gs://bucket"), ("gs://bucket/", "gs://bucket"), ("gs://b-1/p/q/", "gs://b-1/p/q")],
)
def test_bucket_addresses_are_normal(url: str, same: str) -> None:
    assert open_storage(url).url == same


def test_local_addresses_are_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert open_storage("runs/x").url == str(tmp_path / "runs" / "x")
