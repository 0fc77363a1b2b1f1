"""What the Cloud TPU API's errors mean: a gRPC code, a reason and a text -> a Fault. Pure.

The service has one code, RESOURCE_EXHAUSTED, for what it has no chips for and for what a quota forbids;
the text tells them apart.
"""

from __future__ import annotations

import re

from launcher.supervise.observation import Fault
from launcher.supervise.records import Trouble
from launcher.text import one_line

_QUOTA = re.compile(r"quota", re.IGNORECASE)
_CAPACITY = re.compile(
    r"capacity|stock ?out|not enough resources|insufficient|does not have enough|try again later|unavailable"
    r"|no more|not fulfilled|could not be fulfilled|valid_until|expired",
    re.IGNORECASE,
)
_RESERVATION = re.compile(r"reservation", re.IGNORECASE)
_PERMISSION = re.compile(
    r"permission|not authorized|unauthorized|forbidden|billing|has not been used|is disabled"
    r"|SERVICE_DISABLED",
    re.IGNORECASE,
)
_TOO_LARGE = "message larger than max"
"""gRPC's own RESOURCE_EXHAUSTED, which says nothing of chips."""
_BY_CODE = {
    "PERMISSION_DENIED": Trouble.PERMISSION,
    "UNAUTHENTICATED": Trouble.PERMISSION,
    "INVALID_ARGUMENT": Trouble.BAD_REQUEST,
    "OUT_OF_RANGE": Trouble.BAD_REQUEST,
    "UNIMPLEMENTED": Trouble.BAD_REQUEST,
    "ALREADY_EXISTS": Trouble.BAD_REQUEST,
    "NOT_FOUND": Trouble.BAD_REQUEST,
    "FAILED_PRECONDITION": Trouble.BAD_REQUEST,
    "RESOURCE_EXHAUSTED": Trouble.NO_CAPACITY,
    "DEADLINE_EXCEEDED": Trouble.UNAVAILABLE,
}
"""Where the text says nothing else; all other codes are the service's own trouble."""
_BY_TEXT = (
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
    "NOT_FOUND",
    "INVALID_ARGUMENT",
    "INTERNAL",
    "UNKNOWN",
)
"""Codes that say little."""


def classify(code: str, reason: str, message: str) -> Fault:
    """What an error of a call means.

    Args:
      code: gRPC status, for example RESOURCE_EXHAUSTED.
      reason: of the ErrorInfo, if there is one.
      message: the service's own text.
    """
    text = f"{reason} {message}"
    return Fault(
        trouble=_trouble(code, text), code=f"{code}/{reason}" if reason else code, message=one_line(message)
    )


def classify_end(code: str, reason: str, message: str) -> Fault:
    """What the error of a FAILED queued resource means: there an expired wait is no fault of the service."""
    if code in ("DEADLINE_EXCEEDED", "CANCELLED", "ABORTED", "UNAVAILABLE", "OK"):
        return Fault(
            trouble=Trouble.NO_CAPACITY, code=code, message=one_line(message) or "the request was given up"
        )
    return classify(code, reason, message)


def _trouble(code: str, text: str) -> Trouble:
    if code in ("UNAVAILABLE", "DEADLINE_EXCEEDED", "ABORTED", "CANCELLED") or _TOO_LARGE in text:
        return Trouble.UNAVAILABLE
    if code in _BY_TEXT:
        if _RESERVATION.search(text):
            return Trouble.RESERVATION
        if _QUOTA.search(text):
            return Trouble.QUOTA
        if _CAPACITY.search(text):
            return Trouble.NO_CAPACITY
        if _PERMISSION.search(text):
            return Trouble.PERMISSION
    return _BY_CODE.get(code, Trouble.UNAVAILABLE)
