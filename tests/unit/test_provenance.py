"""``lock.json``: what code, image and manifest a run is started from, and nothing of the environment."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from launcher import ledger
from launcher.bundle import make_bundle
from launcher.provenance import PATCH_LIMIT_BYTES, lock_info
from tests.unit.bundle_support import GIT_ENV, git, repository, write


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in GIT_ENV.items():
        monkeypatch.setenv(name, value)


def lock_of(folder: Path, **facts: str) -> dict[str, Any]:
    """As it comes back from a run directory."""
    lock = lock_info(plan_sha256="0" * 64, folder=folder, bundle=make_bundle(folder), **facts)
    read: dict[str, Any] = json.loads(ledger.encode(lock))
    return read


def test_the_code_of_a_clean_tree(tmp_path: Path) -> None:
    repo = repository(tmp_path, {"a.py": "12345"})
    bundle = make_bundle(repo)
    lock = lock_of(repo, image="image@sha256:0", manifest_sha256="1" * 64)
    assert lock["code"] == {
        "bundle": f"sha256:{bundle.sha256}",
        "size_bytes": 5,
        "num_files": 1,
        "commit": git(repo, "rev-parse", "HEAD"),
        "dirty": False,
        "patch": None,
    }
    assert (lock["image"], lock["manifest_sha256"], lock["git"]) == ("image@sha256:0", "1" * 64, None)


def test_commit_and_patch_give_the_tracked_files_again(tmp_path: Path) -> None:
    latin = "x = 'caf\xe9'\n".encode("latin-1")
    repo = repository(
        tmp_path / "repo", {"a.py": "old\n", "gone": "", "bytes": b"\0\1", "latin.py": "x = 'cafe'\n"}
    )
    git(tmp_path, "clone", "--quiet", str(repo), "copy")
    write(repo, {"a.py": "new\n", "bytes": bytes(range(256)), "latin.py": latin, "added": "n\n"})
    (repo / "gone").unlink()
    (repo / "a.py").chmod(0o755)
    git(repo, "add", "added")
    git(repo, "config", "diff.noprefix", "true")
    git(repo, "config", "color.ui", "always")
    patch = lock_of(repo)["code"]["patch"]
    text = patch["text"].encode("utf-8", "surrogateescape")
    assert (patch["sha256"], patch["size_bytes"]) == (hashlib.sha256(text).hexdigest(), len(text))
    (tmp_path / "patch").write_bytes(text)
    git(tmp_path / "copy", "apply", "--index", str(tmp_path / "patch"))
    assert make_bundle(tmp_path / "copy").sha256 == make_bundle(repo).sha256


@pytest.mark.parametrize(("size_bytes", "kept"), [(PATCH_LIMIT_BYTES // 2, True), (PATCH_LIMIT_BYTES, False)])
def test_a_long_patch_is_named_not_kept(tmp_path: Path, size_bytes: int, kept: bool) -> None:
    repo = repository(tmp_path, {"a.py": ""})
    write(repo, {"a.py": "x" * size_bytes})
    patch = lock_of(repo)["code"]["patch"]
    assert patch["size_bytes"] > size_bytes
    assert (patch["text"] is not None) == kept
    assert len(patch["sha256"]) == 64


@pytest.mark.parametrize("with_git", [True, False])
def test_code_without_a_commit(tmp_path: Path, with_git: bool) -> None:
    write(tmp_path, {"a.py": ""})
    if with_git:
        git(tmp_path, "init", "--quiet")
    code = lock_of(tmp_path)["code"]
    assert (code["commit"], code["dirty"], code["patch"]) == (None, with_git or None, None)


def test_a_local_run_records_where_its_code_is_from(tmp_path: Path) -> None:
    repo = repository(tmp_path, {"a.py": "a"})
    commit = git(repo, "rev-parse", "HEAD")
    lock = lock_info(plan_sha256="0" * 64, folder=repo)
    assert (lock["code"], lock["image"], lock["manifest_sha256"]) == (None, None, None)
    assert lock["git"] == {"commit": commit, "dirty": False, "diff_sha256": None}
    write(repo, {"a.py": "b"})
    changed = lock_info(plan_sha256="0" * 64, folder=repo)["git"]
    assert changed["dirty"]
    assert len(changed["diff_sha256"]) == 64


def test_no_repository_and_no_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert lock_info(plan_sha256="0" * 64, folder=tmp_path)["git"] is None
    repository(tmp_path, {"a.py": "a"})
    monkeypatch.setenv("PATH", "")
    assert lock_info(plan_sha256="0" * 64, folder=tmp_path)["git"] is None


def test_a_secret_in_the_environment_or_an_ignored_file_is_in_neither_lock_nor_bundle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "canary-0451")
    monkeypatch.setenv("GIT_AUTHOR_NAME", "canary-0451")
    repo = repository(tmp_path, {"a.py": "", ".gitignore": "private\n"})
    write(repo, {"a.py": "changed", ".env": "canary-0451", "private": "canary-0451"})
    assert b"canary" not in make_bundle(repo).archive
    assert "canary" not in json.dumps(lock_of(repo))
    assert os.environ["HF_TOKEN"] == "canary-0451"
