"""What an error from storage means: the user's to mend, the weather, or a damaged checkpoint.

Storage libraries report through many exception types and often only in the text, so the text decides.
Errors are also passed between processes, so that all of them end the same way.
"""

from __future__ import annotations

import json
import re
import traceback
from collections.abc import Callable

from recipes.contract import ExitCode
from recipes.errors import UserError
from trainer.coordination import Peers
from trainer.integrity import Damaged

_FULL = re.compile("no space left|enospc|disk quota exceeded|edquot|file too large|efbig")
_FORBIDDEN = re.compile(
    "permission.denied|read-only file system|erofs|forbidden|unauthenticated|anonymous caller"
    "|http (response )?(code:? )?40[13]|bucket (does not exist|not found)"
)
_WRONG_PLACE = re.compile("not a directory|is a directory|file name too long|no such bucket")
_UNREACHABLE = re.compile(
    "unavailable|deadline.exceeded|timed? ?out|connection|resource_exhausted|too many open files"
    "|cannot allocate memory|input/output error|stale file"
)


class SaveFailed(UserError):
    """A checkpoint did not reach storage. The run cannot go on as if it had."""


def user_error(error: BaseException, doing: str, *, kind: type[UserError] = UserError) -> UserError | None:
    """What to tell the user about ``error``; None when the text fits nothing known."""
    text = "".join(traceback.format_exception(error)).lower()
    detail = _first_line(error)
    if isinstance(error, MemoryError):
        return kind(f"{doing}: out of memory", exit_code=ExitCode.INFRASTRUCTURE)
    if _FULL.search(text):
        return kind(f"{doing}: disk full ({detail})", hint="free some space, or lower checkpoint.keep")
    if _FORBIDDEN.search(text):
        return kind(f"{doing}: permission denied ({detail})", hint="give this run write access to run.root")
    if _WRONG_PLACE.search(text):
        return kind(f"{doing} ({detail})", hint="set run.root to a folder or bucket that can be written to")
    if _UNREACHABLE.search(text):
        return kind(
            f"{doing}: storage did not answer ({detail})",
            hint="the run resumes by itself when storage is back",
            exit_code=ExitCode.INFRASTRUCTURE,
        )
    return None


def certain_user_error(error: BaseException, doing: str, *, kind: type[UserError] = UserError) -> UserError:
    """As :func:`user_error`; an unknown error counts as the infrastructure's."""
    return user_error(error, doing, kind=kind) or kind(
        f"{doing}: {_first_line(error)}", exit_code=ExitCode.INFRASTRUCTURE
    )


def encode(error: Exception) -> str:
    """``error`` for another process."""
    if isinstance(error, UserError):
        return json.dumps([error.message, error.hint, int(error.exit_code)])
    return json.dumps([str(error)])


def decode(text: str) -> UserError | Damaged:
    """What :func:`encode` gave."""
    parts = json.loads(text)
    if len(parts) == 1:
        return Damaged(parts[0])
    message, hint, exit_code = parts
    return UserError(message, hint=hint, exit_code=exit_code)


def reading_fault(error: Exception, doing: str) -> UserError | Damaged:
    """Damage, unless the error says that it is something else."""
    if isinstance(error, (UserError, Damaged)):
        return error
    return user_error(error, doing) or Damaged(f"{doing}: {_first_line(error)}")


def on_first(peers: Peers, label: str, do: Callable[[], str], *, doing: str) -> str:
    """What ``do`` gives on process 0, on all of them; its error is an error on all of them."""
    answer = None
    if peers.rank == 0:
        try:
            answer = json.dumps([do(), ""])
        except Exception as error:  # the others wait for an answer, whatever happened
            answer = json.dumps(["", encode(certain_user_error(error, doing))])
    text, problem = json.loads(peers.share(label, answer))
    if problem:
        raise decode(problem)
    return str(text)


def agree(peers: Peers, label: str, problem: str) -> None:
    """Raise on every process what any process reports, as :func:`encode` gave it; empty for nothing."""
    for report in peers.gather(label, problem):
        if report:
            raise decode(report)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"
