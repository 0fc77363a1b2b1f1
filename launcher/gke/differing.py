"""What keeps a live JobSet from being the one that is wanted, in the words of recipes where they can tell."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence

from launcher.gke import names
from launcher.gke.objects import Object, items, mapping, text
from launcher.gke.submit import Wanted
from launcher.rundir import RunDir, read_recipe, safe_changes
from launcher.storage_types import NotFound, StorageError
from recipes.contract import PodEnv, RunPath
from recipes.fingerprint import changes
from recipes.schema import Recipe

MAX_LINES = 8
SHOWN_CHARS = 60
COMMON_CHARS = 16
"""Of what two long values have in common, shown before the first difference."""
DIGEST_CHARS = len("sha256:") + 12
_LAUNCHED = re.compile(rf"{RunPath.LAUNCHES}/[0-9a-f]{{16}}\.yaml")


def what_differs(run: RunDir, recipe: Recipe, wanted: Wanted, found: Object) -> Sequence[str]:
    """Keys of the recipe and the code; fields of the manifest only when it is neither.

    Args:
      run: the run directory of both.
      recipe: what is to be launched.
      wanted: its manifest.
      found: what is there.

    Raises:
      UserError: it is another experiment than the run's.
    """
    with contextlib.suppress(NotFound):
        safe_changes(run, recipe)
    lines = [*_keys(run, recipe, found), *_code(wanted.manifest, found)]
    if not lines:
        candidates = [list(differences(each, found)) for each in (wanted.manifest, wanted.fallback)]
        lines = min(candidates, key=len)
    more = len(lines) - MAX_LINES
    return [*lines[:MAX_LINES], f"and {more} more"] if more > 0 else lines


def differences(wanted: object, found: object, path: str = "") -> Iterator[str]:
    """Where what is there is not what is wanted; what the API server added does not count."""
    if isinstance(wanted, Mapping) and isinstance(found, Mapping):
        for key, value in wanted.items():
            if key != names.SPEC:
                yield from differences(value, found.get(key), f"{path}.{key}".lstrip("."))
    elif isinstance(wanted, list) and isinstance(found, list) and len(wanted) == len(found):
        for index, value in enumerate(wanted):
            where = text(value, "name") or str(index)
            yield from differences(value, found[index], f"{path}[{where}]")
    elif wanted != found:
        yield f"{path}: {from_to(repr(found), repr(wanted))}"


def from_to(old: str, new: str) -> str:
    """Two texts, cut where they are long, but not to what they have in common."""
    pairs = enumerate(zip(old, new, strict=False))
    common = next((index for index, (a, b) in pairs if a != b), min(len(old), len(new)))
    begin = max(0, common - COMMON_CHARS) if max(len(old), len(new)) > SHOWN_CHARS else 0
    return f"{_cut(old, begin)} -> {_cut(new, begin)}"


def _cut(value: str, begin: int) -> str:
    end = begin + SHOWN_CHARS
    return f"{'...' if begin else ''}{value[begin:end]}{'...' if end < len(value) else ''}"


def _keys(run: RunDir, recipe: Recipe, found: Object) -> Iterator[str]:
    """Of the recipe that the JobSet was launched with."""
    path = _env(found, PodEnv.RECIPE)
    with contextlib.suppress(StorageError):
        launched = read_recipe(run.storage, path) if _LAUNCHED.fullmatch(path) else recipe
        for change in changes(launched, recipe):
            yield f"{change.key}: {from_to(str(change.old), str(change.new))}"


def _code(wanted: Object, found: Object) -> Iterator[str]:
    ours, theirs = _env(wanted, PodEnv.BUNDLE), _env(found, PodEnv.BUNDLE)
    if ours != theirs:
        old, new = (digest[:DIGEST_CHARS] or "that of the image" for digest in (theirs, ours))
        yield f"the code changed: {old} -> {new}"


def _env(jobset: Object, variable: str) -> str:
    """Value of a variable that all hosts have; empty when there is none."""
    for job in items(jobset, "spec", "replicatedJobs"):
        pod = mapping(job, "template", "spec", "template", "spec")
        for container in items(pod, "containers"):
            for entry in items(container, "env"):
                if entry.get("name") == variable:
                    return text(entry, "value")
    return ""
