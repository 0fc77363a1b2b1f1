"""What Kubernetes takes for a name, a label, a variable, a quantity or a pattern.

Each function returns why it does not, as a clause, or an empty string. The rules are those of
k8s.io/apimachinery v0.34.3 pkg/util/validation; where a newer API server is laxer, the older one's hold.
"""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation

MAX_INT32 = 2**31 - 1
_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_DNS1123_LABEL = re.compile(_LABEL, re.ASCII)
_DNS1123_SUBDOMAIN = re.compile(rf"{_LABEL}(\.{_LABEL})*", re.ASCII)
_DNS1035_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?", re.ASCII)
_QUALIFIED = re.compile(r"([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]", re.ASCII)
_ENV_NAME = re.compile(r"[-._a-zA-Z][-._a-zA-Z0-9]*", re.ASCII)
_SECRET_KEY = re.compile(r"[-._a-zA-Z0-9]+", re.ASCII)
_PORT_NAME = re.compile(r"(?=.*[a-z])[a-z0-9]+(-[a-z0-9]+)*", re.ASCII)
_QUANTITY = re.compile(r"([+-]?[0-9.]+)([eE][+-]?[0-9]+|[EPTGMk]i?|Ki|m|u|n)?", re.ASCII)
_IMAGE = re.compile(r"[^\s@]+@sha256:[0-9a-f]{64}", re.ASCII)
_NOT_RE2 = re.compile(r"\\[1-9]|\(\?(=|!|<=|<!|>|\(|P=|#)|[*+?}]\+")
_MAX_ENV_BYTES = 128 * 1024
"""Of one NAME=VALUE with its NUL: MAX_ARG_STRLEN of Linux, beyond which no program starts."""


def dns1035_label(text: str, most: int = 63) -> str:
    """Of JobSets, Jobs, services: a host name that begins with a letter."""
    if len(text) > most:
        return f"has {len(text)} characters, more than {most}"
    return "" if _DNS1035_LABEL.fullmatch(text) else "is not of a-z, 0-9 and hyphens, from a letter on"


def dns1123_label(text: str) -> str:
    """Of namespaces, containers, volumes."""
    if len(text) > 63:
        return f"has {len(text)} characters, more than 63"
    return "" if _DNS1123_LABEL.fullmatch(text) else "is not of a-z, 0-9 and hyphens"


def dns1123_subdomain(text: str) -> str:
    """Of secrets, service accounts, queues."""
    if len(text) > 253:
        return f"has {len(text)} characters, more than 253"
    return "" if _DNS1123_SUBDOMAIN.fullmatch(text) else "is not of a-z, 0-9, hyphens and dots"


def qualified_name(text: str) -> str:
    """Of keys of labels, taints and conditions: ``name`` or ``domain/name``."""
    prefix, slash, name = text.rpartition("/")
    if slash and (reason := dns1123_subdomain(prefix)):
        return f"has a prefix that {reason}"
    if len(name) > 63:
        return f"has a name of {len(name)} characters, more than 63"
    return "" if _QUALIFIED.fullmatch(name) else "is not of letters, digits, '-', '_' and '.'"


def annotation_key(text: str) -> str:
    return qualified_name(text.lower())


def label_value(text: str) -> str:
    if len(text) > 63:
        return f"has {len(text)} characters, more than 63"
    return "" if not text or _QUALIFIED.fullmatch(text) else "is not of letters, digits, '-', '_' and '.'"


def env_name(text: str) -> str:
    if text in (".", "..") or text.startswith(".."):
        return "begins with '..' or is '.'"
    return "" if _ENV_NAME.fullmatch(text) else "is not of letters, '-', '_', '.' and, later on, digits"


def env_value(name: str, value: str) -> str:
    """What the API server takes, but no process can be given."""
    if "\0" in value:
        return "has a NUL character"
    try:
        size_bytes = len(f"{name}={value}".encode()) + 1
    except UnicodeEncodeError:
        return "is not Unicode text"
    return f"has {size_bytes} bytes, more than {_MAX_ENV_BYTES}" if size_bytes > _MAX_ENV_BYTES else ""


def secret_key(text: str) -> str:
    if len(text) > 253:
        return f"has {len(text)} characters, more than 253"
    if text in (".", "..") or text.startswith(".."):
        return "begins with '..' or is '.'"
    return "" if _SECRET_KEY.fullmatch(text) else "is not of letters, digits, '-', '_' and '.'"


def port_name(text: str) -> str:
    if len(text) > 15:
        return f"has {len(text)} characters, more than 15"
    return "" if _PORT_NAME.fullmatch(text) else "is not of a-z, 0-9 and single hyphens with a letter"


def image(text: str) -> str:
    """By digest: a tag may mean another image at each restart."""
    if not text:
        return "is missing"
    return "" if _IMAGE.fullmatch(text) else "is not REPOSITORY@sha256: and 64 hexadecimal digits"


def quantity(value: object) -> Decimal | None:
    """The number before the suffix; None when it is no quantity."""
    match = _QUANTITY.fullmatch(str(value))
    try:
        return None if match is None or isinstance(value, bool) else Decimal(match[1])
    except InvalidOperation:
        return None


def pattern(text: str) -> str:
    """JobSet only logs a pattern that Go cannot compile, and the rule then never fits."""
    if _NOT_RE2.search(text):
        return "uses what Go's regular expressions lack (look-around, back references, possessive repeats)"
    try:
        re.compile(text)
    except re.error as error:
        return f"is no regular expression ({error})"
    return ""


def references(text: str) -> list[str]:
    """Names that Kubernetes would replace in ``text``: ``$(NAME)``, but not ``$$(NAME)``."""
    found, position = [], 0
    while (position := text.find("$", position)) >= 0 and position + 1 < len(text):
        end = text.find(")", position)
        if text[position + 1] == "(" and end >= 0:
            found.append(text[position + 2 : end])
            position = end + 1
        else:
            position += 2
    return found
