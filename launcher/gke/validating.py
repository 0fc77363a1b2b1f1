"""What the rules of validation share: problems, the shape of one Job, and access to untrusted objects."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.gke import names, syntax
from launcher.gke.manifest import PRIORITY_CLASS
from recipes.errors import Problem

type Found = Iterator[Problem]

_LABEL_KEYS = {names.QUEUE: "target.queue", PRIORITY_CLASS: "target.priority_class"}


@dataclass(frozen=True, kw_only=True, slots=True)
class JobShape:
    """One replicated Job of a JobSet."""

    path: str
    """Where it is in the manifest."""
    name: str
    replicas: int
    pods: int
    """Of each replica."""
    spec: Mapping[str, Any]
    """Of the Job."""

    @property
    def template(self) -> Mapping[str, Any]:
        return mapped(self.spec.get("template"))

    @property
    def pod(self) -> Mapping[str, Any]:
        return mapped(self.template.get("spec"))

    @property
    def pod_path(self) -> str:
        return f"{self.path}.template.spec.template.spec"

    @property
    def containers(self) -> Sequence[Mapping[str, Any]]:
        """All, sidecars included."""
        kinds = (self.pod.get("initContainers"), self.pod.get("containers"))
        return [mapped(container) for kind in kinds for container in listed(kind)]


def finding(key: str, value: object, reason: str, fix: str) -> Problem:
    return Problem(key=key, value=value, reason=reason, fix=fix)


def job_shapes(manifest: Mapping[str, Any]) -> list[JobShape]:
    """The replicated Jobs of a JobSet, with the server's defaults."""
    found = []
    for index, item in enumerate(listed(mapped(manifest.get("spec")).get("replicatedJobs"))):
        job = mapped(item)
        spec = mapped(mapped(job.get("template")).get("spec"))
        found.append(
            JobShape(
                path=f"spec.replicatedJobs[{index}]",
                name=str(job.get("name", "")),
                replicas=whole(job.get("replicas"), 1),
                pods=whole(spec.get("completions"), whole(spec.get("parallelism"), 1)),
                spec=spec,
            )
        )
    return found


def label_problems(labels: object, path: str) -> Found:
    """Of keys and values; the recipe's key when the label is the user's."""
    for key, value in mapped(labels).items():
        ours = key in (names.MANAGED_BY, names.RUN, names.FINGERPRINT, names.SPEC)
        where = f"{path}.{key}" if ours else _LABEL_KEYS.get(key, f"target.labels.{key}")
        if reason := syntax.qualified_name(key):
            yield finding(where, key, f"{reason}: no label", "use letters, digits, '-', '_', '.'")
        if not isinstance(value, str):
            yield finding(where, value, "is no text", "write it in quotes")
        elif reason := syntax.label_value(value):
            yield finding(where, value, reason, "use at most 63 letters, digits, '-', '_', '.'")


def mapped(value: object) -> Mapping[str, Any]:
    """The value when it is a mapping, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def listed(value: object) -> Sequence[Any]:
    """The value when it is a list, else an empty one."""
    return value if isinstance(value, list) else []


def whole(value: object, default: int) -> int:
    """The value when it is a whole number, else ``default``."""
    return value if isinstance(value, int) and not isinstance(value, bool) else default
