"""Offline rules: every golden JobSet passes, every broken one is found, at the key that can mend it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.gke import syntax
from launcher.gke.validate import immutable_changes, problems
from tests.golden.update import MANIFESTS, OLD_JOBSET
from tests.unit.manifest_rows import ROWS
from tests.unit.manifest_support import Broken, broken, container, golden, job, pod, replicated, secret

GOLDENS = [*MANIFESTS, OLD_JOBSET]


@pytest.mark.parametrize("name", GOLDENS)
def test_golden_passes(name: str) -> None:
    assert problems(golden(name)) == []


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_broken_is_found(row: Broken) -> None:
    found = problems(broken(row))
    assert row.key in [problem.key for problem in found], found
    assert all(problem.reason and problem.fix for problem in found)


def test_rows_have_one_name_each() -> None:
    names = [row.name for row in ROWS]
    assert len(names) == len(set(names))


def test_a_secret_is_not_shown() -> None:
    jobset = golden("cpu")
    secret(jobset, "canary/secret", "canary secret")
    container(jobset)["env"].append({"name": "A", "value": "canary $(B)"})
    found = problems(jobset)
    assert len(found) == 3
    assert "canary" not in repr(found)


@pytest.mark.parametrize(
    "change",
    [
        lambda js: js.pop("spec"),
        lambda js: js.pop("metadata"),
        lambda js: js.update(spec=[1, 2]),
        lambda js: js["spec"].update(replicatedJobs="slice"),
        lambda js: js["spec"].update(replicatedJobs=[None, 1, {}]),
        lambda js: replicated(js).update(replicas="2"),
        lambda js: job(js).update(template=None, podFailurePolicy=[None]),
        lambda js: pod(js).update(containers=[None], volumes=3, tolerations=[[]]),
        lambda js: container(js).update(env=[None, 3], ports=[None], resources="all"),
    ],
)
def test_no_traceback_for_anything(change: Any) -> None:
    jobset = golden("spot-two-slices")
    change(jobset)
    assert problems(jobset)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", []),
        ("$", []),
        ("a$", []),
        ("$(A)", ["A"]),
        ("$$(A)", []),
        ("$$$(A)", ["A"]),
        ("$x$(A)$(B)", ["A", "B"]),
        ("$(A", []),
        ("$()", [""]),
        ("$($(A)", ["$(A"]),
    ],
)
def test_references(text: str, wanted: list[str]) -> None:
    assert syntax.references(text) == wanted


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="$()aB", max_size=12))
def test_escaped_text_has_no_references(text: str) -> None:
    assert syntax.references(text.replace("$", "$$")) == []


@pytest.mark.parametrize("text", [r"a\1", "(?=a)", "(?P=x)", "a++", "(?>a)", "(", "a{2}+"])
def test_not_a_pattern_of_go(text: str) -> None:
    assert syntax.pattern(text)


@pytest.mark.parametrize("text", ["exit code (1|2) matching", r"\(a\)+", "a+?", "[^a]*", r"\d\.\w"])
def test_a_pattern_of_go(text: str) -> None:
    assert syntax.pattern(text) == ""


def _live() -> dict[str, Any]:
    """As the API server has it: with defaults."""
    jobset = golden("spot-two-slices")
    jobset["spec"] |= {"suspend": False, "successPolicy": {"operator": "All"}}
    replicated(jobset)["groupName"] = "default"
    return jobset


def _change(jobset: dict[str, Any], change: Any) -> dict[str, Any]:
    found = copy.deepcopy(jobset)
    change(found)
    return found


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        (lambda js: None, []),
        (lambda js: js["spec"].update(ttlSecondsAfterFinished=1), []),
        (lambda js: js["metadata"]["labels"].update(a="b"), []),
        (
            lambda js: js["spec"]["failurePolicy"].update(maxRestarts=9),
            ["spec.failurePolicy.maxRestarts"],
        ),
        (lambda js: js["spec"]["network"].update(subdomain="other"), ["spec.network.subdomain"]),
        (lambda js: replicated(js).update(replicas=3), ["spec.replicatedJobs[0].replicas"]),
        (
            lambda js: container(js).update(image="other"),
            ["spec.replicatedJobs[0].template.spec.template.spec.containers[0].image"],
        ),
        (
            lambda js: container(js)["env"].pop(),
            ["spec.replicatedJobs[0].template.spec.template.spec.containers[0].env"],
        ),
        (
            lambda js: pod(js)["nodeSelector"].update(a="b"),
            ["spec.replicatedJobs[0].template.spec.template.spec.nodeSelector.a"],
        ),
    ],
)
def test_immutable_changes(change: Any, wanted: list[str]) -> None:
    assert immutable_changes(_live(), _change(golden("spot-two-slices"), change)) == wanted


def test_what_kueue_may_change_while_suspended() -> None:
    live = _live()
    live["spec"]["suspend"] = True
    pod(live)["nodeSelector"]["a"] = "b"
    changed = golden("spot-two-slices")
    pod(changed)["nodeSelector"]["a"] = "c"
    job(changed)["template"]["metadata"]["labels"]["a"] = "c"
    assert immutable_changes(live, changed) == []
    container(changed)["image"] = "other"
    assert len(immutable_changes(live, changed)) == 1
