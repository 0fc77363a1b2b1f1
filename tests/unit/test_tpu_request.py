"""What is asked of the Cloud TPU API: golden files, the real types of both versions, names and limits."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from google.cloud import tpu_v2, tpu_v2alpha1

from launcher.tpu import names
from launcher.tpu.request import V2, V2ALPHA1
from tests.golden.tpu_requests import (
    ORDER,
    REQUESTS,
    SCRIPTS,
    TPU_DIR,
    tpu_files,
    tpu_recipe,
    tpu_request,
)

REPO = Path(__file__).resolve().parents[2]
TYPES = {V2: tpu_v2, V2ALPHA1: tpu_v2alpha1}
MAX_VALUE_BYTES = 256 * 1024
"""Of one metadata value: cloud.google.com/compute/docs/metadata/setting-custom-metadata."""


def test_golden_requests() -> None:
    found = tpu_files()
    assert {path.name: path.read_bytes() for path in TPU_DIR.glob("*.json")} == found


@pytest.mark.parametrize("name", REQUESTS)
def test_the_real_types_take_it(name: str) -> None:
    """Field names, enums and durations of the version that it is for; nothing is dropped."""
    asked = tpu_request(name)
    message = TYPES[asked.version].QueuedResource(asked.body)
    (spec,) = message.tpu.node_spec
    (plain,) = asked.body["tpu"]["node_spec"]
    assert dict(spec.node.labels) == plain["node"]["labels"]
    assert dict(spec.node.metadata) == plain["node"].get("metadata", {})
    pb = TYPES[asked.version].QueuedResource.pb(message)
    assert {field.name for field, _ in pb.ListFields()} == set(asked.body)
    assert {field.name for field, _ in pb.tpu.node_spec[0].node.ListFields()} == set(plain["node"])
    assert {field.name for field, _ in pb.tpu.node_spec[0].ListFields()} == set(plain)


@pytest.mark.parametrize("name", REQUESTS)
def test_labels_and_ids_are_such_as_the_service_takes(name: str) -> None:
    asked = tpu_request(name)
    (spec,) = asked.body["tpu"]["node_spec"]
    for key, value in spec["node"]["labels"].items():
        assert re.fullmatch(r"[a-z][a-z0-9_-]{0,62}", key)
        assert re.fullmatch(r"[a-z0-9_-]{0,63}", value)
    assert re.fullmatch(r"[A-Za-z0-9_.~+%-]+", asked.resource_id)
    assert len(asked.resource_id) <= 63


@pytest.mark.parametrize("name", sorted(REQUESTS.keys() - {"probe"}))
def test_scripts_are_constant_texts(name: str) -> None:
    metadata = tpu_request(name).body["tpu"]["node_spec"][0]["node"]["metadata"]
    files = {"startup-script": "bootstrap.py", "shutdown-script": "shutdown.sh"}
    assert {key: metadata[key] for key in SCRIPTS} == {
        key: (REPO / "launcher" / "tpu" / file).read_text() for key, file in files.items()
    }
    assert all(len(value.encode()) < MAX_VALUE_BYTES for value in metadata.values())


def test_a_probe_runs_nothing() -> None:
    assert "metadata" not in tpu_request("probe").body["tpu"]["node_spec"][0]["node"]


def test_labels_of_the_user_never_win() -> None:
    recipe = tpu_recipe("every-option")
    theirs = {"team": "nlp", names.MANAGED_BY: "me", names.HOME: "0"}
    changed = dataclasses.replace(recipe, target=dataclasses.replace(recipe.target, labels=theirs))
    found = names.labels(changed, recipe.run_dir, ORDER, 1, is_probe=False)
    assert (found[names.MANAGED_BY], found[names.HOME]) == (names.OWNER, names.home(recipe.run_dir))
    assert found["team"] == "nlp"


def test_runs_of_one_name_in_two_buckets_do_not_meet() -> None:
    one, other = names.resource_id("gs://a/runs/x"), names.resource_id("gs://b/runs/x")
    assert one != other
    assert {one[:2], other[:2]} == {"x-"}
    assert names.resource_id("gs://a/runs/x", is_probe=True) == f"{one}-probe"
