"""Kubernetes objects as plain data, read without trust: whatever is missing or of another type is empty.

The API server checks what it stores, but custom resources and webhooks change with their versions.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.gke import names

type Object = Mapping[str, Any]
"""One object as the API gives it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Resource:
    """One kind of object, as the API's paths name it."""

    group: str
    """Empty for the core group."""
    version: str
    plural: str
    namespaced: bool = True

    def path(self, namespace: str) -> str:
        """Of the collection."""
        start = f"/apis/{self.group}" if self.group else "/api"
        where = f"/namespaces/{namespace}" if self.namespaced else ""
        return f"{start}/{self.version}{where}/{self.plural}"


JOBSETS = Resource(group=names.GROUP, version=names.VERSION, plural=names.PLURAL)
JOBS = Resource(group="batch", version="v1", plural="jobs")
PODS = Resource(group="", version="v1", plural="pods")
EVENTS = Resource(group="", version="v1", plural="events")
NAMESPACES = Resource(group="", version="v1", plural="namespaces", namespaced=False)
WORKLOADS = tuple(
    Resource(group="kueue.x-k8s.io", version=version, plural="workloads")
    for version in ("v1beta2", "v1beta1")
)
"""Newest first: which one is served depends on Kueue's version."""


def dig(value: object, *keys: str) -> object:
    """What is at a path of keys, or None."""
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def mapping(value: object, *keys: str) -> Object:
    found = dig(value, *keys)
    return found if isinstance(found, Mapping) else {}


def items(value: object, *keys: str) -> Sequence[Object]:
    """The objects of a list; other things in it are passed over."""
    found = dig(value, *keys)
    return [item for item in found if isinstance(item, Mapping)] if isinstance(found, list) else []


def text(value: object, *keys: str) -> str:
    found = dig(value, *keys)
    return found if isinstance(found, str) else ""


def number(value: object, *keys: str) -> int:
    found = dig(value, *keys)
    return found if isinstance(found, int) and not isinstance(found, bool) else 0


def name(value: object) -> str:
    return text(value, "metadata", "name")


def uid(value: object) -> str:
    return text(value, "metadata", "uid")


def label(value: object, key: str) -> str:
    return text(value, "metadata", "labels", key)


def annotation(value: object, key: str) -> str:
    return text(value, "metadata", "annotations", key)


def is_deleting(value: object) -> bool:
    return bool(text(value, "metadata", "deletionTimestamp"))


def condition(value: object, kind: str) -> Object:
    """The status condition of this type; empty when there is none. Look at its ``status``."""
    return next((each for each in items(value, "status", "conditions") if each.get("type") == kind), {})


def is_true(value: object, kind: str) -> bool:
    """Whether the condition's status is "True": a condition with "False" says the opposite of its type."""
    return condition(value, kind).get("status") == "True"


def created_s(value: object) -> float:
    """Unix time, in whole seconds; 0 when nothing says."""
    try:
        return datetime.datetime.fromisoformat(text(value, "metadata", "creationTimestamp")).timestamp()
    except ValueError:
        return 0.0
