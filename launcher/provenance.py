"""What a run is started from: versions, code and plan; the content of ``lock.json``.

Versions come from package metadata, so nothing heavy is imported. A machine without git or a folder
outside a repository just records less. Nothing of the environment is ever recorded.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
from pathlib import Path
from typing import Any

from launcher.bundle import Bundle
from launcher.git import GitError, git, head, patch

DISTRIBUTIONS = (
    "muster-tpu",
    "jax",
    "jaxlib",
    "libtpu",
    "flax",
    "optax",
    "orbax-checkpoint",
    "tensorstore",
    "grain",
    "numpy",
)
"""Distributions that can change what a run computes."""

PATCH_LIMIT_BYTES = 256 * 2**10
"""A longer patch is recorded by digest and size only; the bundle has the files anyway."""


def lock_info(
    *,
    plan_sha256: str,
    folder: Path,
    bundle: Bundle | None = None,
    image: str | None = None,
    manifest_sha256: str | None = None,
) -> dict[str, Any]:
    """Everything that should be the same when a run is to be repeated.

    Args:
      plan_sha256: digest of the plan's canonical bytes.
      folder: where to look for a git repository, normally the working directory.
      bundle: the code that is sent to the hosts; None when they run this machine's or the image's own.
      image: container image by digest.
      manifest_sha256: digest of the bytes that are submitted.
    """
    return {
        "plan_sha256": plan_sha256,
        "manifest_sha256": manifest_sha256,
        "image": image,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: version for name in DISTRIBUTIONS if (version := _version(name))},
        "code": code_facts(bundle) if bundle else None,
        "git": None if bundle else git_state(folder),
    }


def code_facts(bundle: Bundle) -> dict[str, Any]:
    """A bundle as ``lock.json`` has it; the commit with the patch gives its tracked files again."""
    text = _patch(bundle.root) if bundle.commit else b""
    return {
        "bundle": bundle.digest,
        "size_bytes": bundle.size_bytes,
        "num_files": bundle.num_files,
        "commit": bundle.commit,
        "dirty": bundle.dirty,
        "patch": _patch_facts(text) if text else None,
    }


def git_state(folder: Path) -> dict[str, Any] | None:
    """Commit and uncommitted changes of the repository around ``folder``; None when there is none."""
    commit = head(folder)
    if commit is None:
        return None
    try:
        # Untracked files count as changes, by name only: they may be large.
        status = git(folder, "status", "--porcelain=v1", "-z")
    except GitError:
        return None
    diff = _patch(folder) if status else b""
    return {
        "commit": commit,
        "dirty": bool(status),
        "diff_sha256": hashlib.sha256(diff).hexdigest() if diff else None,
    }


def _patch(folder: Path) -> bytes:
    try:
        return patch(folder)
    except GitError:
        return b""


def _patch_facts(text: bytes) -> dict[str, Any]:
    short = len(text) <= PATCH_LIMIT_BYTES
    return {
        "sha256": hashlib.sha256(text).hexdigest(),
        "size_bytes": len(text),
        # Files need not be UTF-8; JSON carries the other bytes as escapes that decode to the same ones.
        "text": text.decode("utf-8", "surrogateescape") if short else None,
    }


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
