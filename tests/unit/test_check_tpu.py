"""What ``recipes.check_tpu`` refuses: key and reason, row by row."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.compose import compose
from recipes.check import check
from recipes.check_target import launch_problems
from recipes.errors import RecipeError
from recipes.options import choices, parse_fallback

BASE = (
    "target=tpu-spot",
    "target.project=my-project",
    "target.zone=us-east5-b",
    "run.root=gs://my-bucket/runs",
)
BAD: tuple[tuple[str, str, str], ...] = (
    ("target.zone=NOPE", "target.zone", "is not a zone"),
    ("target.zone='us-east5-b;rm'", "target.zone", "is not a zone"),
    ("target.project=UPPER", "target.project", "is not the id of a project"),
    ("target.project=../x", "target.project", "is not the id of a project"),
    ("target.network=a/b", "target.network", "is not a network"),
    ("target.subnetwork=A", "target.subnetwork", "is not a subnetwork"),
    ("target.runtime_version='v2 alpha'", "target.runtime_version", "is not a runtime version"),
    ("target.service_account=me", "target.service_account", "is not a service account"),
    ("target.network_tags=[UP]", "target.network_tags", "is not a network tag"),
    ("target.disks=[a/b]", "target.disks", "is not a disk"),
    ("target.fallbacks=[us-east5-b/flex_start]", "target.fallbacks", "is not a place and a capacity"),
    ("target.fallbacks=['']", "target.fallbacks", "is not a place and a capacity"),
    ("target.fallbacks=[a/spot/2]", "target.fallbacks", "is not a place and a capacity"),
    ("target.fallbacks=[moon/spot]", "target.fallbacks", "is not a zone"),
    ("target.fallbacks=[/reserved]", "target.reservation", "must be given for a reserved fallback"),
    ("target.capacity=flex_start", "target.capacity", "is nothing that queued resources have"),
    ("target.capacity=reserved", "target.reservation", "must be given"),
    ("target.labels.muster-run=x", "target.labels.muster-run", "is Muster's own"),
    ("target.labels.Team=x", "target.labels.Team", "is not a label of Google Cloud"),
    ("target.labels.team=A", "target.labels.team", "is not a label of Google Cloud"),
    ("target.ship_code=false", "target.ship_code", "leaves TPU VMs without code"),
    ("target.requirements=[/etc/passwd]", "target.requirements", "is not a path within the code"),
    ("target.requirements=[../x.lock]", "target.requirements", "is not a path within the code"),
    ("target.requirements=[]", "target.requirements", "leaves nothing to install"),
    ("target.python=python3", "target.python", "is not an absolute path"),
    ("target.min_duration_s=60", "target.min_duration_s", "is promised by nobody for spot"),
    ("target.workload_type=throughput_optimized", "target.workload_type", "is for several slices"),
    ("target.secrets.HF_TOKEN=hf/token", "target.secrets", "which TPU VMs do not have"),
    ("target.queue=q", "target.queue", "which has no TPU VMs"),
    ("run.deadline=tomorrow", "run.deadline", "is not a date and time"),
    ("run.deadline=2027-01-31T18:00", "run.deadline", "has no time zone"),
    ("hardware.generation=tpu7x hardware.topology=4x4x4", "target.kind", "does not offer tpu7x"),
    ("target.controller=pathways", "target.controller", "does not go with target.kind=tpu"),
    ("multislice=two-slices multislice.min_slices=3", "multislice.min_slices", "is above"),
    ("multislice=two-slices multislice.data=2 multislice.min_slices=1", "multislice.min_slices", "allows no"),
)


def given(overrides: str) -> list[str]:
    """With the rest of what a launch needs."""
    words = [overrides] if "'" in overrides or ", " in overrides else overrides.split()
    names = {word.partition("=")[0] for word in words}
    return [*(word for word in BASE if word.partition("=")[0] not in names), *words]


@pytest.mark.parametrize(("overrides", "key", "reason"), BAD, ids=[row[0] for row in BAD])
def test_refused(overrides: str, key: str, reason: str) -> None:
    with pytest.raises(RecipeError) as caught:
        compose("llama3-8b-v5e-16x16", given(overrides))
    found = {problem.key: problem.reason for problem in caught.value.problems}
    assert reason in found.get(key, ""), found


GOOD = (
    "target.fallbacks=[us-east1-c, us-east5-b/on_demand, /on_demand]",
    "target.network=projects/p-host/global/networks/shared",
    "target.disks=[data, projects/p/zones/us-east5-b/disks/data]",
    "target.service_account=muster@my-project.iam.gserviceaccount.com",
    "run.deadline=2027-01-31T18:00Z",
    "target.capacity=on_demand target.min_duration_s=3600",
    "target.labels.team=research",
    "multislice=two-slices multislice.min_slices=1 train.global_batch_size=512",
    "target.python=/usr/bin/python3.12 target.requirements=[]",
)


@pytest.mark.parametrize("overrides", GOOD)
def test_accepted(overrides: str) -> None:
    recipe = compose("llama3-8b-v5e-16x16", given(overrides)).recipe
    assert not list(check(recipe))
    assert not launch_problems(recipe)


def test_a_launch_needs_project_zone_and_bucket() -> None:
    recipe = compose("llama3-8b-v5e-16x16", ["target=tpu"]).recipe
    assert [problem.key for problem in launch_problems(recipe)] == [
        "run.root",
        "target.project",
        "target.zone",
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("b/spot", ("b", "spot")),
        ("b", ("b", "on_demand")),
        ("/reserved", ("a", "reserved")),
    ],
)
def test_fallbacks(text: str, expected: tuple[str, str]) -> None:
    assert parse_fallback(text, zone="a", capacity="on_demand") == expected


def test_options_come_best_first_and_once() -> None:
    overrides: list[Any] = [
        *BASE,
        "multislice=two-slices",
        "multislice.min_slices=1",
        "train.global_batch_size=512",
        "target.fallbacks=[us-east1-c, us-east5-b/spot, /on_demand]",
    ]
    found = choices(compose("llama3-8b-v5e-16x16", overrides).recipe)
    assert [(each.zone, each.capacity, each.num_slices) for each in found] == [
        (zone, capacity, number)
        for number in (2, 1)
        for zone, capacity in (("us-east5-b", "spot"), ("us-east1-c", "spot"), ("us-east5-b", "on_demand"))
    ]
