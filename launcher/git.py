"""Git, asked by argv: no hooks, no file-system monitor, a timeout, no variables of a calling hook.

What git says is bytes; paths in it are decoded with :func:`os.fsdecode` by who asks.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from launcher.text import one_line
from recipes.errors import UserError

TIMEOUT_S = 20.0
_OPTIONS = (
    *("--no-optional-locks", "--no-pager", "--literal-pathspecs"),
    *("-c", "core.fsmonitor=false", "-c", f"core.hooksPath={os.devnull}"),
)


class GitError(UserError):
    """Git is not there, or refused."""


def git(folder: Path, *arguments: str) -> bytes:
    """What one git command prints.

    Raises:
      GitError: it failed or did not end in time.
    """
    argv = ["git", *_OPTIONS, "-C", str(folder), *arguments]
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=TIMEOUT_S,
            check=False,
            env=_environ(),
        )
    except OSError as error:
        raise GitError(f"cannot run git in {folder}: {error.strerror}", hint="install git") from error
    except subprocess.TimeoutExpired as error:
        raise GitError(
            f"git {arguments[0]} in {folder} took longer than {TIMEOUT_S:g} s",
            hint="look at the disk, then try again",
        ) from error
    if done.returncode:
        said = one_line(done.stderr.decode("utf-8", "replace"))
        raise GitError(
            f"git {arguments[0]} failed in {folder}: {said}", hint="mend the repository, then try again"
        )
    return done.stdout


def head(folder: Path) -> str | None:
    """The commit that is checked out; None without git, outside a repository, and before the first commit."""
    try:
        return git(folder, "rev-parse", "--verify", "--quiet", "HEAD").decode("ascii", "replace").strip()
    except GitError:
        return None


def patch(folder: Path) -> bytes:
    """Every uncommitted change of tracked files; ``git apply`` takes it.

    The one command here that may refresh git's index: --no-optional-locks does not keep ``git diff`` from it.
    """
    plain = ("--no-color", "--no-ext-diff", "--no-textconv", "--no-renames", "--submodule=short")
    return git(
        folder, "diff", *plain, "--binary", "--full-index", "--src-prefix=a/", "--dst-prefix=b/", "HEAD", "--"
    )


def _environ() -> dict[str, str]:
    """Without what a git hook sets (GIT_DIR, GIT_INDEX_FILE ...), which would point at another repository."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("GIT_") or name.startswith("GIT_CONFIG_")
    }
    return kept | {"LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0"}
