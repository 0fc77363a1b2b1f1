"""Golden JobSets as objects, ways to change one, and texts that others take for something else."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import yaml

from launcher.gke.jobs import PODSET
from tests.golden.update import MANIFEST_DIR

type Object = dict[str, Any]
type Change = Callable[[Object], object]
INT32 = 2**31
_ODD_WORDS = """
on Off y N yes NO true False null Null ~ = << - ? : 1 -1 +1 01 0o17 0x1f 0b1 1e3 1E3 1. .5 1_000 1:30 1.5e+3
0x .inf -.INF .nan NaN Infinity 2026-11-30 2026-11-30T10:00:00Z 12e4567890123456 {a:b} [a] #c &a *a !a | > %a
@a `a` ' " '' "a" \\n \\ --- ... `id` ../../etc ${a} $ $$ $a $(HOME) $$(HOME) $( $() a$
"""
ODD_TEXTS = (
    *_ODD_WORDS.split(),
    *(
        "",
        " ",
        " a",
        "a ",
        "- a",
        "a: b",
        "a #c",
        "!!str a",
        "; rm -rf /",
        "$(whoami) && {{ a }}",
        "x" * 5000,
    ),
    *("\ta", "\n", "a\n", "a\nb", "a\rb", "\x01", "\x7f", "\x85", "\xa0", "\u2028", "\ufeff"),
    *("\xe9", "e\u0301", "\u0430dmin", "\U0001f600", "$\xe9"),
)
"""What YAML readers, shells and templates take for something else."""


class Fate(enum.StrEnum):
    """What becomes of a broken manifest that is sent all the same."""

    REFUSED = "the API server or JobSet's webhook refuses the JobSet"
    CHILD = "the JobSet is accepted, and its Jobs are refused"
    KUEUE = "Kueue's webhook refuses the JobSet; without Kueue nobody looks"
    LATE = "all is accepted, and it does not run as it should"


@dataclass(frozen=True, kw_only=True, slots=True)
class Broken:
    """One way to break a JobSet."""

    name: str
    key: str
    """Of the problem that says so."""
    fate: Fate
    change: Change
    golden: str = "spot-two-slices"


def golden(name: str) -> Object:
    """A golden JobSet as an object."""
    found: Object = yaml.safe_load((MANIFEST_DIR / f"{name}.yaml").read_bytes())
    return found


def broken(row: Broken) -> Object:
    found = golden(row.golden)
    row.change(found)
    return found


def replicated(jobset: Object, index: int = 0) -> Object:
    found: Object = jobset["spec"]["replicatedJobs"][index]
    return found


def job(jobset: Object) -> Object:
    found: Object = replicated(jobset)["template"]["spec"]
    return found


def pod(jobset: Object) -> Object:
    found: Object = job(jobset)["template"]["spec"]
    return found


def container(jobset: Object) -> Object:
    found: Object = pod(jobset)["containers"][0]
    return found


def rules(jobset: Object) -> list[Object]:
    found: list[Object] = jobset["spec"]["failurePolicy"]["rules"]
    return found


def pod_rules(jobset: Object) -> list[Object]:
    found: list[Object] = job(jobset)["podFailurePolicy"]["rules"]
    return found


def env(jobset: Object, **entries: Any) -> Object:
    container(jobset)["env"] += [{"name": name, "value": value} for name, value in entries.items()]
    return jobset


def without_env(jobset: Object, prefix: str) -> None:
    entries = container(jobset)["env"]
    container(jobset)["env"] = [entry for entry in entries if not entry["name"].startswith(prefix)]


def chips(jobset: Object, requested: str, limit: str) -> None:
    container(jobset)["resources"] = {
        "requests": {"google.com/tpu": requested},
        "limits": {"google.com/tpu": limit},
    }


def pods(jobset: Object, number: int) -> None:
    job(jobset).update(parallelism=number, completions=number)


def secret(jobset: Object, name: str, key: str) -> None:
    entry = {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": name, "key": key}}}
    container(jobset)["env"].append(entry)


def in_order(jobset: Object) -> Object:
    jobset["spec"]["startupPolicy"] = {"startupPolicyOrder": "InOrder"}
    return jobset


def depends(jobset: Object, *names: str, status: str = "Ready", index: int = 1) -> None:
    replicated(jobset, index)["dependsOn"] = [{"name": name, "status": status} for name in names]


def copies(jobset: Object, *names: str) -> Object:
    """Further replicated Jobs like the first."""
    first = replicated(jobset)
    jobset["spec"]["replicatedJobs"] += [{**first, "name": name} for name in names]
    return jobset


def replace_name(jobset: Object, name: str) -> None:
    """Of the first replicated Job, which is the coordinator's."""
    replicated(jobset)["name"] = jobset["spec"]["coordinator"]["replicatedJob"] = name


def annotate(jobset: Object, **values: str) -> Object:
    annotations: Object = job(jobset)["template"]["metadata"].setdefault("annotations", {})
    annotations |= {f"{PODSET}-{name.replace('_', '-')}": text for name, text in values.items()}
    return annotations


def refused(name: str, key: str, change: Change, golden: str = "spot-two-slices") -> Broken:
    return Broken(name=name, key=key, fate=Fate.REFUSED, change=change, golden=golden)


def child(name: str, key: str, change: Change, golden: str = "spot-two-slices") -> Broken:
    return Broken(name=name, key=key, fate=Fate.CHILD, change=change, golden=golden)


def late(name: str, key: str, change: Change, golden: str = "spot-two-slices") -> Broken:
    return Broken(name=name, key=key, fate=Fate.LATE, change=change, golden=golden)


def kueue(name: str, key: str, change: Change) -> Broken:
    return Broken(name=name, key=key, fate=Fate.KUEUE, change=change, golden="kueue-topology")
