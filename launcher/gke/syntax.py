"""Why Kubernetes would not take a name, a label, a variable or a pattern: a clause, or an empty string.

What a name is, is in `recipes/kubernetes_names.py`; here are the reasons, and what a manifest has beyond
names (k8s.io/apimachinery v0.34.3 pkg/util/validation). Where an API server is laxer, the older one's rule
holds.
"""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation

from recipes import kubernetes_names as names

MAX_INT32 = 2**31 - 1
_DNS1035_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?", re.ASCII)
_PORT_NAME = re.compile(r"(?=.*[a-z])[a-z0-9]+(-[a-z0-9]+)*", re.ASCII)
_QUANTITY = re.compile(r"([+-]?[0-9.]+)([eE][+-]?[0-9]{1,3}|[EPTGM]i?|k|Ki|m|u|n)?", re.ASCII)
_BINARY = {f"{letter}i": Decimal(1024) ** power for power, letter in enumerate("KMGTPE", 1)}
_DECIMAL = {letter: Decimal(10) ** (3 * power) for power, letter in enumerate("kMGTPE", 1)} | {
    "": Decimal(1),
    "m": Decimal("1e-3"),
    "u": Decimal("1e-6"),
    "n": Decimal("1e-9"),
}
_NOT_RE2 = re.compile(r"\\[1-9]|\(\?(=|!|<=|<!|>|\(|P=|#)|[*+?}]\+")
_QUALIFIED = "is not of letters, digits, '-', '_' and '.', from a letter or digit to one"
_MAX_ENV_BYTES = 128 * 1024
"""Of one NAME=VALUE with its NUL: MAX_ARG_STRLEN of Linux, beyond which no program starts."""


def dns1035_label(text: str) -> str:
    """Of JobSets, Jobs, services: a host name that begins with a letter."""
    fits = _DNS1035_LABEL.fullmatch(text) is not None
    return _reason(text, names.MAX_LABEL, fits, "is not of a-z, 0-9 and hyphens, from a letter on")


def dns1123_label(text: str) -> str:
    """Of namespaces, containers, volumes."""
    return _reason(text, names.MAX_LABEL, names.is_dns_label(text), "is not of a-z, 0-9 and hyphens")


def dns1123_subdomain(text: str) -> str:
    """Of secrets and service accounts."""
    fits = names.is_dns_subdomain(text)
    return _reason(text, names.MAX_SUBDOMAIN, fits, "is not of a-z, 0-9, hyphens and dots")


def qualified_name(text: str) -> str:
    """Of keys of labels, taints and conditions: ``name`` or ``domain/name``."""
    return _reason(text.rpartition("/")[2], names.MAX_LABEL, names.is_label_key(text), _QUALIFIED)


def annotation_key(text: str) -> str:
    return qualified_name(text.lower())


def label_value(text: str) -> str:
    return _reason(text, names.MAX_LABEL, names.is_label_value(text), _QUALIFIED)


def env_name(text: str) -> str:
    fits = names.is_env_name(text)
    return _reason(text, names.MAX_SUBDOMAIN, fits, "is not of letters, '_' and, later on, digits")


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
    fits = names.is_secret_key(text)
    return _reason(text, names.MAX_SUBDOMAIN, fits, "is not of letters, digits, '-', '_' and '.'")


def port_name(text: str) -> str:
    fits = _PORT_NAME.fullmatch(text) is not None
    return _reason(text, 15, fits, "is not of a-z, 0-9 and single hyphens with a letter")


def image(text: str) -> str:
    """By digest: a tag may mean another image at each restart."""
    if not text:
        return "is missing"
    return "" if names.is_image_by_digest(text) else "is not REPOSITORY@sha256: and 64 hexadecimal digits"


def quantity(value: object) -> Decimal | None:
    """An amount with its suffix, as in 4, 500m, 32G or 2Ti; None when it is none."""
    match = None if isinstance(value, bool) else _QUANTITY.fullmatch(str(value))
    if match is None:
        return None
    number, suffix = match[1], match[2] or ""
    try:
        if suffix[:1] in ("e", "E") and len(suffix) > 1 and suffix != "Ei":
            return Decimal(number + suffix)
        return Decimal(number) * {**_BINARY, **_DECIMAL}.get(suffix, Decimal(0))
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


def _reason(text: str, most: int, fits: bool, otherwise: str) -> str:
    if len(text) > most:
        return f"has {len(text)} characters, more than {most}"
    return "" if fits else otherwise
