"""A code bundle on a host: verified, extracted whole and once; hostile archives leave nothing behind."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import stat
import tarfile
import zlib
from pathlib import Path

import pytest

from launcher import bundle as bundle_module
from launcher.bundle import bundle_path, fetch, make_bundle, upload
from launcher.storage import Storage, StorageError, open_storage
from recipes.errors import UserError
from tests.unit.bundle_support import content_of, round_trip, small_tree, write


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return open_storage(str(tmp_path / "root"))


@pytest.fixture
def code(tmp_path: Path) -> Path:
    return small_tree(tmp_path / "code")


def put(storage: Storage, archive: bytes, packed: bytes | None = None) -> str:
    """An archive under its own digest, as only somebody could who also wrote the manifest."""
    digest = f"sha256:{hashlib.sha256(archive).hexdigest()}"
    storage.create(bundle_path(digest), gzip.compress(archive) if packed is None else packed)
    return digest


def entry(name: str, **facts: object) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    for key, value in facts.items():
        setattr(info, key, value)
    return info


def tar_of(*members: tarfile.TarInfo) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for member in members:
            tar.addfile(member, io.BytesIO(b"x" * member.size))
    return buffer.getvalue()


def link(name: str, target: str) -> tarfile.TarInfo:
    return entry(name, type=tarfile.SYMTYPE, linkname=target)


def sparse(name: str, size_bytes: int) -> bytes:
    """A file that says how long it is and brings none of it."""
    facts = {"major": "1", "minor": "0", "name": name, "realsize": str(size_bytes)}
    info = entry(name, pax_headers={f"GNU.sparse.{key}": value for key, value in facts.items()}, size=512)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        tar.addfile(info, io.BytesIO(b"0\n".ljust(512, b"\0")))
    return buffer.getvalue()


HOSTILE_ARCHIVES = {
    "absolute": tar_of(entry("/tmp/x")),
    "up": tar_of(entry("../x")),
    "up inside": tar_of(entry("a/../../x")),
    "dot": tar_of(entry("./x")),
    "empty part": tar_of(entry("a//x")),
    "the folder itself": tar_of(entry(".")),
    "no name": tar_of(entry("")),
    "link out": tar_of(link("a", "../../x")),
    "link to root": tar_of(link("a", "/etc")),
    "through a link": tar_of(link("a", "b"), entry("a/x")),
    "link over a folder": tar_of(entry("a/x"), link("a", "b")),
    "links that meet": tar_of(link("b/l", "../z/.."), link("z", ".")),
    "links that meet, longer": tar_of(link("b/c/l", "../../z/../x"), link("z", "b")),
    "file behind a file": tar_of(entry("a"), entry("a/x")),
    "twice": tar_of(entry("a"), entry("a")),
    "file over a link": tar_of(link("a", "b"), entry("a", size=1)),
    "hard link": tar_of(entry("a"), entry("b", type=tarfile.LNKTYPE, linkname="a")),
    "hard link out": tar_of(entry("b", type=tarfile.LNKTYPE, linkname="../../etc/passwd")),
    "folder": tar_of(entry("a", type=tarfile.DIRTYPE, mode=0o000)),
    "character device": tar_of(entry("a", type=tarfile.CHRTYPE)),
    "block device": tar_of(entry("a", type=tarfile.BLKTYPE)),
    "pipe": tar_of(entry("a", type=tarfile.FIFOTYPE)),
    "sparse": sparse("a", 1024),
    "sparse and long": sparse("a", 2**50),
    "unknown kind": tar_of(entry("a", type=b"Z")),
    "no tar": b"x" * 2048,
}
SAFE_AFTER_ALL = {"links that meet, longer"}
"""Ends inside the folder."""


@pytest.mark.parametrize("name", HOSTILE_ARCHIVES)
def test_hostile_archives_are_refused_whole(name: str, storage: Storage, tmp_path: Path) -> None:
    digest = put(storage, HOSTILE_ARCHIVES[name])
    into = tmp_path / "deep" / "into"
    if name in SAFE_AFTER_ALL:
        assert fetch(storage, digest, into).is_dir()
        return
    with pytest.raises(
        UserError, match=r"\.bundles/[0-9a-f]{64}\.tar\.gz is damaged or was replaced"
    ) as caught:
        fetch(storage, digest, into)
    assert "launch again" in caught.value.hint
    assert not list(into.iterdir())
    assert sorted(path.name for path in (tmp_path / "deep").iterdir()) == ["into"]


def test_modes_and_owners_of_a_strange_archive_do_not_matter(storage: Storage, tmp_path: Path) -> None:
    archive = tar_of(entry("a", mode=0o6777, uid=0, uname="root"), entry("b", mode=0))
    fetched = fetch(storage, put(storage, archive), tmp_path / "into")
    assert stat.S_IMODE((fetched / "a").stat().st_mode) == 0o755
    assert stat.S_IMODE((fetched / "b").stat().st_mode) == 0o600
    assert (fetched / "a").stat().st_uid == os.getuid()


GOOD = gzip.compress(tar_of(entry("a", size=3)))


@pytest.mark.parametrize(
    ("packed", "reason"),
    [
        (b"", "cut off"),
        (b"not gzip at all", "not gzip"),
        (GOOD[:-1], "cut off"),
        (GOOD[: len(GOOD) // 2], "cut off"),
        (GOOD + b"more", "something behind it"),
        (GOOD + GOOD, "something behind it"),
        (GOOD[:-5] + bytes([GOOD[-5] ^ 1]) + GOOD[-4:], "not gzip"),
        (gzip.compress(tar_of(entry("b", size=3))), "another digest"),
        (zlib.compress(tar_of(entry("a", size=3))), "not gzip"),
    ],
)
def test_damage_is_seen_before_anything_is_written(
    packed: bytes, reason: str, storage: Storage, tmp_path: Path
) -> None:
    digest = put(storage, tar_of(entry("a", size=3)), packed)
    with pytest.raises(UserError, match=reason) as caught:
        fetch(storage, digest, tmp_path / "into")
    assert f"{storage.url}/.bundles/{digest[7:]}.tar.gz" in caught.value.message
    assert not (tmp_path / "into").exists()


def test_a_bomb_is_not_unpacked(storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle_module, "ARCHIVE_LIMIT_BYTES", 100_000)
    digest = put(storage, b"", gzip.compress(bytes(50 * 2**20)))
    with pytest.raises(UserError, match="holds more than"):
        fetch(storage, digest, tmp_path / "into")


def test_an_object_that_is_too_large_is_not_read(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = put(storage, b"", bytes(2000))
    monkeypatch.setattr(bundle_module, "ARCHIVE_LIMIT_BYTES", 1999)
    with pytest.raises(StorageError, match="larger than 1999 bytes"):
        fetch(storage, digest, tmp_path / "into")


def test_bundles_may_be_larger_than_other_objects(storage: Storage, tmp_path: Path) -> None:
    write(tmp_path / "code", {"noise": os.urandom(17 * 2**20)})
    assert (round_trip(tmp_path / "code", storage, tmp_path / "into") / "noise").stat().st_size == 17 * 2**20


def test_code_that_is_gone(storage: Storage, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the code of this run is gone") as caught:
        fetch(storage, f"sha256:{'0' * 64}", tmp_path / "into")
    assert "launch again" in caught.value.hint


@pytest.mark.parametrize(
    "digest",
    ["", "0" * 64, "sha256:", "sha256:" + "A" * 64, "sha256:../x", f"sha256:{'0' * 64}\n", "md5:" + "0" * 64],
)
def test_what_is_no_digest(digest: str, storage: Storage, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not the digest of a bundle"):
        fetch(storage, digest, tmp_path)


def test_fetched_once(code: Path, storage: Storage, tmp_path: Path) -> None:
    fetched = round_trip(code, storage, tmp_path / "into")
    (fetched / "mine").touch()
    storage.delete(bundle_path(make_bundle(code).digest))
    assert round_trip(code, open_storage(str(tmp_path / "other")), tmp_path / "into") == fetched
    assert (fetched / "mine").exists()


def test_one_that_another_process_made_meanwhile_is_taken(
    code: Path, storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = make_bundle(code)
    upload(storage, bundle)
    extract = bundle_module._extract_into

    def slow(archive: bytes, folder: Path) -> None:
        extract(archive, folder)
        monkeypatch.setattr(bundle_module, "_extract_into", extract)
        fetch(storage, bundle.digest, tmp_path / "into")

    monkeypatch.setattr(bundle_module, "_extract_into", slow)
    fetched = fetch(storage, bundle.digest, tmp_path / "into")
    assert content_of(fetched) == content_of(code)
    assert list((tmp_path / "into").iterdir()) == [fetched]


def test_a_kill_while_extracting_leaves_no_folder_that_counts(
    code: Path, storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = make_bundle(code)
    upload(storage, bundle)

    def killed(archive: bytes, folder: Path) -> None:
        (folder / "half").touch()
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(bundle_module, "_extract_into", killed)
        fetch(storage, bundle.digest, tmp_path / "into")
    assert content_of(fetch(storage, bundle.digest, tmp_path / "into")) == content_of(code)


def test_a_folder_that_cannot_be_written(code: Path, storage: Storage, tmp_path: Path) -> None:
    bundle = make_bundle(code)
    upload(storage, bundle)
    (tmp_path / "into").write_text("a file")
    with pytest.raises(UserError, match="cannot write the code to"):
        fetch(storage, bundle.digest, tmp_path / "into")
