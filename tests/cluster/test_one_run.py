"""One run, one JobSet: other places, other holders, damaged objects, and what stop says of them.

pytest tests/cluster/test_one_run.py
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from launcher import lease, ledger
from launcher.rundir import RunDir
from launcher.storage import open_storage
from tests.cluster.api import Json
from tests.cluster.launcher import Launcher
from tests.cluster.waiting import wait_until


def second_namespace(launcher: Launcher) -> str:
    """Beside the test's own."""
    name = f"{launcher.cluster.namespace}-b"
    launcher.cluster.api.create("/api/v1/namespaces", {"metadata": {"name": name}})
    return name


def jobsets(launcher: Launcher, namespace: str) -> list[Json]:
    path = launcher.cluster.path("jobsets").replace(launcher.cluster.namespace, namespace)
    found: list[Json] = launcher.cluster.api.get(path)["items"]
    return found


def held_by(launcher: Launcher, owner_id: str) -> RunDir:
    """The run's lease, as another machine's process has it."""
    run = RunDir(open_storage(launcher.url()))
    owner = lease.this_process("JobSet quickstart", owner_id=owner_id)
    far = ledger.from_plain({**_plain(owner), "hostname": "elsewhere"}, lease.Owner, "")
    run.acquire(far, time.time())
    return run


def _plain(owner: lease.Owner) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(ledger.encode(owner))
    return data


def test_a_second_namespace_is_refused_until_the_first_is_stopped(launcher: Launcher) -> None:
    other = second_namespace(launcher)
    assert launcher.launch()[0] == 0
    code, said = launcher.launch(f"target.namespace={other}")
    assert (code, f"namespace {launcher.cluster.namespace} of" in said) == (2, True), said
    assert f"muster stop {launcher.url()}" in said
    assert jobsets(launcher, other) == []
    assert launcher.muster("stop", launcher.url())[0] == 0
    code, said = launcher.launch(f"target.namespace={other}")
    assert (code, len(jobsets(launcher, other))) == (0, 1), said


def test_stop_finds_every_place_that_was_recorded(launcher: Launcher) -> None:
    other = second_namespace(launcher)
    assert launcher.launch()[0] == 0
    storage = open_storage(launcher.url())
    [first] = storage.children("launches")
    body = storage.read(f"launches/{first}")
    # As of a launcher that looked before the other had recorded anything.
    storage.delete(f"launches/{first}")
    assert launcher.launch(f"target.namespace={other}")[0] == 0
    storage.create(f"launches/{first}", body)
    code, said = launcher.muster("stop", launcher.url())
    assert (code, launcher.uid(), jobsets(launcher, other)) == (0, "", []), said
    for namespace in (launcher.cluster.namespace, other):
        assert f"gone, with its Jobs and pods: JobSet quickstart in namespace {namespace} of" in said, said
    assert "quickstart is stopped: no checkpoint" in said


def test_nothing_is_submitted_beside_another_holder(launcher: Launcher) -> None:
    assert launcher.launch()[0] == 0
    assert launcher.muster("stop", launcher.url())[0] == 0
    held_by(launcher, "jobset-another")
    code, said = launcher.launch()
    assert (code, "is in use by JobSet quickstart" in said, launcher.uid()) == (2, True, ""), said
    code, said = launcher.muster("stop", launcher.url(), "--timeout-s", "0")
    assert (code, "still runs" in said, "launch it again" in said) == (75, True, False), said


def test_stop_lets_go_of_the_lease_of_pods_that_are_gone(launcher: Launcher) -> None:
    assert launcher.launch()[0] == 0
    run = held_by(launcher, f"jobset-{launcher.uid()}")
    code, said = launcher.launch()
    assert (code, "there already" in said) == (0, True), said
    code, said = launcher.muster("stop", launcher.url())
    assert (code, "quickstart is stopped" in said) == (0, True), said
    assert not lease.is_held(lease.read(run.storage), time.time())
    assert launcher.launch()[0] == 0


def test_stop_waits_for_a_grace_period_and_says_so(launcher: Launcher) -> None:
    assert launcher.launch("target.grace_period_s=600")[0] == 0
    pods = wait_until(lambda: launcher.cluster.pods_of("quickstart"), 20, "pods")
    # On a node that nobody looks after, so that the pod's end is waited for.
    pod = pods[0]["metadata"]["name"]
    binding = {"metadata": {"name": pod}, "target": {"kind": "Node", "name": "silent"}}
    launcher.cluster.api.create(launcher.cluster.path("pods", f"{pod}/binding"), binding)
    code, said = launcher.muster("stop", launcher.url(), "--timeout-s", "0")
    assert (code, "still saving: its hosts have up to" in said, "node" in said) == (75, True, False), said
    path = launcher.cluster.path("pods", pod)
    launcher.cluster.api.request("DELETE", path, {"gracePeriodSeconds": 0})
    code, said = launcher.muster("stop", launcher.url())
    assert (code, "quickstart is stopped" in said) == (0, True), said


def test_a_damaged_recipe_is_named_and_the_rest_is_shown(launcher: Launcher) -> None:
    assert launcher.launch()[0] == 0
    storage = open_storage(launcher.url())
    storage.replace("recipe.yaml", b"{")
    code, said = launcher.muster("status", launcher.url())
    assert (code, "jobset      " in said, "recipe.yaml is damaged" in said) == (0, True, True), said
    [copy] = storage.children("launches")
    restore = f"copy {launcher.url()}/launches/{copy} over it"
    assert restore in said
    code, said = launcher.muster("stop", launcher.url())
    assert (code, "gone, with its Jobs" in said, restore in said, launcher.uid()) == (2, True, True, ""), said
    storage.replace("recipe.yaml", storage.read(f"launches/{copy}"))
    code, said = launcher.muster("stop", launcher.url())
    assert (code, "is not running: it is stopped" in said) == (0, True), said


def test_a_damaged_lease_is_named_before_anything_is_submitted(launcher: Launcher) -> None:
    assert launcher.launch()[0] == 0
    storage = open_storage(launcher.url())
    storage.replace("lease.json", b"{")
    code, said = launcher.muster("status", launcher.url())
    assert (code, "jobset      " in said, "lease.json is damaged" in said) == (0, True, True), said
    code, said = launcher.muster("stop", launcher.url())
    assert (code, "gone, with its Jobs" in said, "lease.json is damaged" in said) == (2, True, True), said
    code, said = launcher.launch()
    assert (code, "lease.json is damaged" in said, launcher.uid()) == (2, True, ""), said


def test_what_is_not_sent_is_said(launcher: Launcher, tree: Path) -> None:
    for number in range(6):
        (tree / f"{number}.pem").write_text("x")
    code, said = launcher.launch("--json")
    assert (code, "not sent to the hosts: 0.pem: looks like a secret" in said) == (0, True), said
    assert "not sent to the hosts: 1 more" in said and "hosts: 5.pem" not in said
    assert '"5.pem: looks like a secret"' in said
    code, said = launcher.muster(*("plan", *launcher.words()[1:], "--manifest"))
    assert (code, "note: not sent to the hosts: 0.pem" in said) == (0, True), said


def test_a_replay_goes_to_another_place(launcher: Launcher) -> None:
    other = second_namespace(launcher)
    assert launcher.launch()[0] == 0
    words = ("replay", launcher.url(), "--name", "again")
    for override, message in {
        "train.seed=1": "train.seed: a replay has the recipe",
        "target.image=x": "target.image: a replay has the recipe",
        "target.namespac=x": "did you mean target.namespace?",
    }.items():
        code, said = launcher.muster(*words, override)
        assert (code, message in said) == (2, True), said
    code, said = launcher.muster(*words, f"target.namespace={other}", "target.labels.team=a")
    assert code == 0, said
    [found] = jobsets(launcher, other)
    assert (found["metadata"]["name"], found["metadata"]["labels"]["team"]) == ("again", "a")
