"""What a run is started from: versions, code and plan; the content of ``lock.json``.

Versions come from package metadata, so nothing heavy is imported. Git is asked by argv, with a
timeout, and a machine without git or outside a repository just records less.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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

GIT_TIMEOUT_S = 5.0


def lock_info(*, plan_sha256: str, folder: Path) -> dict[str, Any]:
    """Everything that should be the same when a run is to be repeated.

    Args:
      plan_sha256: digest of the plan's canonical bytes.
      folder: where to look for a git repository, normally the working directory.
    """
    return {
        "plan_sha256": plan_sha256,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: version for name in DISTRIBUTIONS if (version := _version(name))},
        "git": git_state(folder),
    }


def git_state(folder: Path) -> dict[str, Any] | None:
    """Commit and uncommitted changes of the repository around ``folder``; None when there is none."""
    commit = _git(folder, "rev-parse", "--verify", "HEAD")
    # Untracked files count as changes, by name only: they may be large.
    status = _git(folder, "status", "--porcelain=v1", "-z")
    if commit is None or status is None:
        return None
    diff = _git(folder, "diff", "--no-ext-diff", "--no-textconv", "--binary", "HEAD") if status else b""
    return {
        "commit": commit.decode("ascii", "replace").strip(),
        "dirty": bool(status),
        "diff_sha256": hashlib.sha256(diff).hexdigest() if diff else None,
    }


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git(folder: Path, *arguments: str) -> bytes | None:
    """Output of one git command, or None when it fails. It runs no hooks and takes no locks."""
    argv: Sequence[str] = (
        *("git", "--no-optional-locks", "-c", "core.fsmonitor=false", "-C", str(folder)),
        *arguments,
    )
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=GIT_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
