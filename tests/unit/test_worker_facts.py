"""Which host a TPU VM is, by its metadata; what the trainer gets; which host stays: tables."""

from __future__ import annotations

import dataclasses
import email.message
import urllib.error
from collections.abc import Mapping
from pathlib import Path

import pytest

from launcher.exits import HostEnd
from launcher.member import Notice
from launcher.tpu.metadata import (
    MAINTENANCE,
    PREEMPTED,
    HostFacts,
    host_facts,
    is_notice,
    parse_endpoints,
    parse_tpu_env,
)
from launcher.tpu.vm import VmSpec
from launcher.tpu.worker import environment, leaves, member_of
from recipes.errors import UserError

SPEC = VmSpec(
    run_dir="gs://b/runs/tiny",
    recipe="launches/x.yaml",
    order="order-1",
    provision=3,
    bundle=f"sha256:{'a' * 64}",
    num_slices=2,
    hosts_per_slice=2,
    devices_per_host=4,
    is_cpu=False,
    grace_period_s=30.0,
    max_restarts=3,
    python=None,
    requirements=(),
    env={},
)
TPU_ENV = "ACCELERATOR_TYPE: 'v5p-16'\nNODE_ID: 'tiny-1a2b3c-1'\nWORKER_ID: '1'\n"
MEGASCALE = "MEGASCALE_COORDINATOR_ADDRESS: '10.0.0.2:8080'\nMEGASCALE_SLICE_ID: '1'\n"
VALUES = {
    "tpu-env": TPU_ENV + MEGASCALE,
    "agent-worker-number": "1",
    "worker-network-endpoints": "unknown:unknown:10.0.1.2,unknown:unknown:10.0.1.3",
}


def facts(spec: VmSpec, values: Mapping[str, str]) -> HostFacts:
    def ask(path: str) -> str:
        name = path.removeprefix("instance/attributes/")
        if name not in values:
            raise urllib.error.HTTPError(path, 404, "", email.message.Message(), None)
        return values[name]

    return host_facts(spec, ask, sleep=lambda _: None)


@pytest.mark.parametrize(
    ("changes", "values", "slice_id", "leader", "name"),
    [
        ({}, {}, 1, "10.0.0.2", "tiny-1a2b3c-1-w1"),
        ({}, {"tpu-env": TPU_ENV + MEGASCALE.replace(":8080", "")}, 1, "10.0.0.2", "tiny-1a2b3c-1-w1"),
        ({}, {"tpu-env": TPU_ENV + "MEGASCALE_COORDINATOR_ADDRESS: 'a'"}, 1, "a", "tiny-1a2b3c-1-w1"),
        ({}, {"tpu-env": "NODE_ID: 'x-0'"}, 0, "10.0.1.2", "x-0-w1"),
        ({}, {"agent-worker-number": ""}, 1, "10.0.0.2", "tiny-1a2b3c-1-w1"),
        ({"num_slices": 1}, {"tpu-env": TPU_ENV}, 0, "10.0.1.2", "tiny-1a2b3c-1-w1"),
        ({"num_slices": 1}, {"tpu-env": ""}, 0, "10.0.1.2", "slice-0-w1"),
    ],
)
def test_who_a_vm_is(
    changes: Mapping[str, int], values: Mapping[str, str], slice_id: int, leader: str, name: str
) -> None:
    found = facts(dataclasses.replace(SPEC, **changes), {**VALUES, **values})  # type: ignore[arg-type]
    assert (found.slice_id, found.leader, found.name) == (slice_id, leader, name)
    assert (found.host_id, found.address) == (1, "10.0.1.3")


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"agent-worker-number": "two"}, "agent-worker-number is 'two'"),
        ({"agent-worker-number": "2"}, "worker 2 of 2; launched were slices of 2 hosts"),
        ({"worker-network-endpoints": "a:b:10.0.0.2"}, "worker 1 of 1"),
        ({"worker-network-endpoints": ""}, "worker 1 of 0"),
        ({"tpu-env": TPU_ENV}, "no MEGASCALE_COORDINATOR_ADDRESS"),
        ({"tpu-env": "NODE_ID: 'tiny'"}, "MEGASCALE_SLICE_ID of tpu-env is 'tiny'"),
        ({"tpu-env": "MEGASCALE_SLICE_ID: '2'"}, "slice 2, and 2 were launched"),
    ],
)
def test_who_cannot_tell(values: Mapping[str, str], why: str) -> None:
    with pytest.raises(UserError, match=why):
        facts(SPEC, {**VALUES, **values})


def test_attributes_may_come_late() -> None:
    tries: list[str] = []

    def ask(path: str) -> str:
        tries.append(path)
        if len(tries) < 5:
            raise OSError("no route")
        return VALUES[path.removeprefix("instance/attributes/")]

    assert host_facts(SPEC, ask, sleep=lambda _: None).slice_id == 1


def test_parsing() -> None:
    assert parse_tpu_env("A: 'x'\n\nB: \"y:z\"\nC: ''\nnoise\nD : 1\n") == {
        "A": "x",
        "B": "y:z",
        "C": "",
        "D": "1",
    }
    assert parse_tpu_env(None) == {}
    assert parse_endpoints("a:b:10.0.0.2,,x,a:b:fd00::1,a:b:") == ["10.0.0.2", "fd00::1"]


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        (PREEMPTED, "TRUE", True),
        (PREEMPTED, "true\n", True),
        (PREEMPTED, "FALSE", False),
        (PREEMPTED, "", False),
        (MAINTENANCE, "NONE", False),
        (MAINTENANCE, "MIGRATE_ON_HOST_MAINTENANCE", False),
        (MAINTENANCE, "TERMINATE_ON_HOST_MAINTENANCE", True),
    ],
)
def test_notices(path: str, value: str, expected: bool) -> None:
    assert is_notice(path, value) is expected


OWN = HostFacts(slice_id=1, host_id=1, address="10.0.1.3", leader="10.0.0.2", name="tiny-1-w1")


def test_environment_of_real_slices() -> None:
    found = environment(SPEC, OWN, Path("/var/lib/muster"))
    assert found["JAX_PLATFORMS"] == "tpu,cpu"
    assert found["JAX_COORDINATOR_BIND_ADDRESS"] == "10.0.1.3:8482"
    assert {name: value for name, value in found.items() if name.startswith("MEGASCALE")} == {
        "MEGASCALE_NUM_SLICES": "2",
        "MEGASCALE_SLICE_ID": "1",
        "MEGASCALE_COORDINATOR_ADDRESS": "10.0.0.2",
        "MEGASCALE_PORT": "8081",
    }
    assert "JAX_NUM_CPU_DEVICES" not in found


@pytest.mark.parametrize("changes", [{"num_slices": 1}, {"is_cpu": True}])
def test_megascale_is_for_several_real_slices_only(changes: Mapping[str, int]) -> None:
    found = environment(dataclasses.replace(SPEC, **changes), OWN, Path("/x"))  # type: ignore[arg-type]
    assert not [name for name in found if name.startswith("MEGASCALE")]


def test_a_rehearsal_and_the_recipes_own_variables() -> None:
    own = {"XDG_CACHE_HOME": "/data", "MINE": "$HOME"}
    found = environment(dataclasses.replace(SPEC, is_cpu=True, env=own), OWN, Path("/x"))
    assert (found["JAX_PLATFORMS"], found["JAX_NUM_CPU_DEVICES"]) == ("cpu", "4")
    assert (found["XDG_CACHE_HOME"], found["MINE"]) == ("/data", "$HOME")


def test_who_it_is_among_the_others() -> None:
    host = member_of(SPEC, OWN, Path("/x"))
    assert (host.context.process_id, host.leads, list(host.hosts)) == (
        3,
        False,
        ["s0-h0", "s0-h1", "s1-h0", "s1-h1"],
    )
    assert host.owner.id == host.incarnation == "tpu-order-1-3"
    assert host.during(7).coordinator == "10.0.0.2:8482"
    assert host.during(7).scratch_dir == "/x/scratch/0007"
    assert host.uid != member_of(SPEC, OWN, Path("/x")).uid


@pytest.mark.parametrize(
    ("code", "collateral", "noticed", "expected"),
    [
        (0, False, False, False),
        (75, False, False, False),
        (75, True, False, False),
        (1, False, False, False),
        (42, True, False, False),
        (42, False, False, True),
        (75, True, True, True),
        (0, False, True, True),
    ],
)
def test_who_leaves(code: int, collateral: bool, noticed: bool, expected: bool) -> None:
    notice = Notice()
    notice.came = noticed
    own = HostEnd(host="s0-h0", exit_code=code, reason="", time_s=1.0, collateral=collateral)
    assert leaves(own, notice) is expected
