"""``muster gc --project``: what is proven to be of no use goes, everything else stays."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from launcher import lease
from launcher.cli import gc
from launcher.ledger import AttemptEnd
from launcher.rundir import RunDir
from launcher.tpu import names
from launcher.tpu.gc import Owner, leftovers, why_left
from launcher.tpu.listing import Zone
from launcher.tpu.machines import Node, Queued
from launcher.tpu.vm import lease_owner
from recipes.contract import ExitCode, RunPath
from tests.tpu.cloud import TpuCloud
from tests.tpu.test_stop import cloud, get_machines, launched, server  # noqa: F401 - fixtures
from tests.unit.rundir_support import make_recipe
from tests.unit.test_cost import LOST, NOW, ZONE, provision

THERE = Owner(exists=True)
COMPLETE = Owner(exists=True, over="its run is complete")
OVER_2 = {2: dataclasses.replace(LOST, number=2)}


@pytest.mark.parametrize(
    ("owner", "why"),
    [
        (None, ""),
        (Owner(exists=False), "its run directory is gone"),
        (THERE, ""),
        (COMPLETE, "its run is complete"),
        (dataclasses.replace(COMPLETE, is_supervised=True), ""),
        (dataclasses.replace(COMPLETE, hosts=lease_owner("o1", 2)), ""),
        (dataclasses.replace(COMPLETE, hosts=lease_owner("o1", 3)), "its run is complete"),
        (dataclasses.replace(THERE, provisions=OVER_2), "it is of provision 2, which is over"),
        (dataclasses.replace(THERE, provisions={2: provision(2, ready=1)}), ""),
        (dataclasses.replace(THERE, provisions={3: OVER_2[2]}), ""),
        (dataclasses.replace(THERE, provisions={2: dataclasses.replace(OVER_2[2], order="o9")}), ""),
        (dataclasses.replace(THERE, provisions=OVER_2, is_supervised=True), ""),
        (dataclasses.replace(THERE, provisions=OVER_2, hosts=lease_owner("o1", 2)), ""),
    ],
)
def test_why_machines_can_go(owner: Owner | None, why: str) -> None:
    assert why_left(owner, "o1", 2) == why


def labels(run: str) -> dict[str, str]:
    return {names.RUN: run, names.HOME: "h", names.ORDER: "o1", names.PROVISION: "1"}


def test_the_old_ones_of_a_zone_with_age_and_price() -> None:
    queued = Queued(
        name=f"{ZONE}/queuedResources/run-1",
        state="ACTIVE",
        num_slices=2,
        capacity="spot",
        labels=labels("run"),
        created_s=NOW - 3600,
    )
    node = Node(
        name=f"{ZONE}/nodes/lost-0",
        state="READY",
        health="HEALTHY",
        owner="",
        labels=labels("lost"),
        created_s=NOW - 3600,
    )
    young = dataclasses.replace(queued, name=f"{ZONE}/queuedResources/young", created_s=NOW - 5)
    leaving = dataclasses.replace(queued, name=f"{ZONE}/queuedResources/leaving", state="DELETING")
    zone = Zone(queued={"h": [queued, young, leaving]}, orphans={"h": [node]}, names=frozenset())
    priced = dataclasses.replace(COMPLETE, provisions={1: provision(ready=1)})
    found = leftovers(
        zone,
        lambda run, _: priced if run == "run" else Owner(exists=False),
        now=NOW,
        older_than_s=600.0,
    )
    assert [(each.name.rpartition("/")[2], each.usd_per_hour, each.is_node) for each in found] == [
        ("lost-0", None, True),
        ("run-1", 8.0, False),
    ]
    assert not leftovers(zone, lambda *_: None, now=NOW, older_than_s=600.0)


def run_gc(*words: str, root: str) -> Result:
    command: click.Command = gc.command
    asked = ["--project", "muster-test", "--root", root, "--older-than", "0s", *words]
    return CliRunner().invoke(command, asked, catch_exceptions=False)


def document(result: Result) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def complete(run: RunDir) -> None:
    attempt = run.next_attempt(time.time(), recipe=make_recipe(), hosts=["s0-h0"])
    end = AttemptEnd(
        end_s=time.time(),
        exit_code=0,
        first_failing_host=None,
        message="",
        hint="",
        from_step=-1,
        to_step=20,
    )
    run.write_attempt_end(attempt, end)


def test_only_what_no_run_needs_goes(cloud: TpuCloud, tmp_path: Path) -> None:  # noqa: F811
    run = launched(tmp_path.name)
    root = run.url.rpartition("/")[0]
    get_machines(run)
    there = cloud.queued_ids()
    # It is not over: it stays, whoever is sure.
    assert document(run_gc("--json", "--yes", root=root))["machines"] == []
    complete(run)
    # Of a run below another root nothing is known.
    other = root + "/elsewhere"
    assert document(run_gc("--zone", "us-east5-a", "--json", "--yes", root=other))["machines"] == []
    listed = document(run_gc("--dry-run", "--json", root=root))["machines"]
    assert [(each["run"], each["usd_per_hour"], each["deleted"]) for each in listed] == [("tiny", 8.0, False)]
    # While somebody supervises it, it is not gc's.
    held = run.acquire(lease.this_process("muster supervise"), time.time(), RunPath.SUPERVISOR)
    assert document(run_gc("--json", "--yes", root=root))["machines"] == []
    run.release(held)
    assert cloud.queued_ids() == there
    done = run_gc("--yes", root=root)
    assert (done.exit_code, "its run is complete" in done.stdout) == (ExitCode.COMPLETE, True)
    assert (cloud.queued_ids(), cloud.node_ids()) == ([], [])
    assert [each.ended_s is not None for each in run.provisions()] == [True]


def test_without_a_terminal_nothing_goes(cloud: TpuCloud, tmp_path: Path) -> None:  # noqa: F811
    run = launched(tmp_path.name)
    get_machines(run)
    complete(run)
    there = cloud.queued_ids()
    command: click.Command = gc.command
    root = run.url.rpartition("/")[0]
    words = ["--project", "muster-test", "--root", root, "--older-than", "0s"]
    done = CliRunner().invoke(command, words)
    assert "no terminal to ask on" in str(done.exception)
    assert cloud.queued_ids() == there


@pytest.mark.parametrize(
    "words",
    [
        ["--zone", "us-east5-a"],
        ["--project", "p", "-A"],
        ["--project", "p", "--bundles", "--root", "runs"],
        ["--project", "p", "--namespace", "n"],
    ],
)
def test_options_that_do_not_go_together(words: list[str]) -> None:
    assert CliRunner().invoke(gc.command, words).exit_code == 2
