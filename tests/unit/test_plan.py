"""The plan: arithmetic, golden files of every shipped recipe, and the same bytes everywhere."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from launcher.plan import Plan, make_plan, render_plan
from recipes.load import flatten, nest, recipe_from_dict, recipe_to_dict
from recipes.schema import Recipe
from tests.golden.update import PLAN_DIR, plan_files, shipped_recipes

LLAMA3_8B: Mapping[str, Any] = flatten(
    {
        "name": "llama3-8b",
        "run": {"root": "gs://some-bucket/runs"},
        "hardware": {"generation": "v5p", "topology": "4x4x4"},
        "model": {
            "vocab_size": 128256,
            "num_layers": 32,
            "embed_dim": 4096,
            "mlp_dim": 14336,
            "num_heads": 32,
            "num_kv_heads": 8,
            "head_dim": 128,
        },
        "mesh": {"tensor": 4},
        "multislice": {"num_slices": 2},
        "data": {"source": "synthetic"},
        "optimizer": {"learning_rate": 3e-4},
        "target": {"kind": "gke"},
        "train": {
            "num_steps": 10,
            "global_batch_size": 128,
            "sequence_length": 8192,
            "grad_accum_steps": 2,
        },
    }
)


def _recipe(**changes: Any) -> Recipe:
    dotted = {key.replace("__", "."): value for key, value in changes.items()}
    return recipe_from_dict(nest({**LLAMA3_8B, **dotted}))


def _plan(**changes: Any) -> Plan:
    return make_plan(_recipe(**changes))


def test_machines_mesh_and_batch() -> None:
    plan = _plan()
    hardware, batch = plan.hardware, plan.batch
    assert (hardware.num_slices, hardware.hosts_per_slice, hardware.num_chips) == (2, 16, 128)
    assert plan.mesh.ici["fsdp"] == 16
    assert plan.mesh.dcn["data"] == 2
    # 32 shards of the batch: 4 sequences each, in 2 parts; a host's 4 chips are one shard.
    assert (batch.sequences_per_device, batch.sequences_per_host) == (2, 4)
    assert batch.tokens_per_step == 128 * 8192
    assert batch.total_tokens == 10 * 128 * 8192


def test_state_is_weights_and_two_moments_over_the_shards() -> None:
    model, norms = _plan().model, 65 * 4096
    assert model.num_parameters == 8_030_261_248
    assert model.state_bytes == 12 * model.num_parameters
    assert model.state_bytes_per_device == 12 * ((model.num_parameters - norms) // 64 + norms)


@pytest.mark.parametrize(
    ("changes", "usd_per_chip_hour"),
    [
        ({}, 4.2),
        ({"target__capacity": "spot"}, 0.8357),
        ({"target__capacity": "reserved"}, None),
        ({"target__capacity": "reserved", "hardware__price_per_chip_hour": 1.5}, 1.5),
        ({"hardware__price_per_chip_hour": 0.0}, 0.0),
        ({"hardware__generation": "tpu7x"}, None),
    ],
)
def test_price_is_yours_or_the_lists_or_unknown(
    changes: Mapping[str, Any], usd_per_chip_hour: float | None
) -> None:
    plan = _plan(**changes)
    if usd_per_chip_hour is None:
        assert plan.price is None
        assert any("hardware.price_per_chip_hour" in note for note in plan.notes)
        assert "unknown" in render_plan(plan)
    else:
        assert plan.price is not None
        assert plan.price.usd_per_chip_hour == usd_per_chip_hour
        assert plan.price.usd_per_hour == pytest.approx(128 * usd_per_chip_hour, abs=0.005)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"run__root": "runs"}, "gs://BUCKET/PREFIX"),
        ({"target__capacity": "spot"}, "15 s"),
        ({"hardware__generation": "tpu7x"}, "workload policy"),
        ({"hardware__generation": "tpu7x"}, "2 JAX devices on each chip"),
        ({"hardware__topology": "16x20x28", "mesh__fsdp": 1, "mesh__data": -1}, "6144"),
        ({"hardware__topology": "2x4x4"}, "no wrap-around links"),
    ],
)
def test_what_is_worth_a_note(changes: Mapping[str, Any], said: str) -> None:
    assert any(said in note for note in _plan(**changes).notes)
    assert not any(said in note for note in _plan().notes)


def test_node_labels_select_the_slice_on_gke_only() -> None:
    labels = _plan(target__capacity="spot").hardware.node_labels
    assert labels == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v5p-slice",
        "cloud.google.com/gke-tpu-topology": "4x4x4",
        "cloud.google.com/gke-spot": "true",
    }
    assert _plan(target__kind="tpu").hardware.node_labels == {}


@pytest.mark.parametrize("recipe", shipped_recipes())
def test_golden_plan(recipe: str) -> None:
    for name, text in plan_files(recipe).items():
        golden = PLAN_DIR / name
        assert text == golden.read_text(encoding="ascii"), "python -m tests.golden.update"


def test_no_golden_plan_is_stale() -> None:
    names = {path.name for path in PLAN_DIR.iterdir()}
    assert names == {f"{recipe}.{kind}" for recipe in shipped_recipes() for kind in ("json", "txt")}


_MANY_PLANS = """
import hashlib, json, sys
from launcher.plan import make_plan, render_plan
from recipes.load import recipe_from_dict
data = json.load(sys.stdin)
for _ in range(25):
    plan = make_plan(recipe_from_dict(data))
    text = plan.to_json() + render_plan(plan)
    print(hashlib.sha256(text.encode()).hexdigest())
assert not {"jax", "hydra", "yaml", "google"} & set(sys.modules)
"""


def test_a_hundred_plans_anywhere_are_the_same_bytes(repo: Path, tmp_path: Path) -> None:
    recipe = _recipe()
    plan = make_plan(recipe)
    expected = hashlib.sha256((plan.to_json() + render_plan(plan)).encode()).hexdigest()
    settings = [
        ("0", "C", "UTC"),
        ("1", "de_DE.UTF-8", "Asia/Tokyo"),
        ("77", "tr_TR", ""),
        ("random", "", "x"),
    ]
    digests: list[str] = []
    for number, (hash_seed, locale, zone) in enumerate(settings):
        folder = tmp_path / str(number)
        folder.mkdir()
        environment = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(repo),
            "PYTHONHASHSEED": hash_seed,
            "LANG": locale,
            "LC_ALL": locale,
            "TZ": zone,
        }
        done = subprocess.run(
            [sys.executable, "-c", _MANY_PLANS],
            cwd=folder,
            env=environment,
            input=json.dumps(recipe_to_dict(recipe)),
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        digests += done.stdout.split()
        assert not any(folder.iterdir())
    assert len(digests) == 100
    assert set(digests) == {expected}


def test_json_is_canonical() -> None:
    text = _plan().to_json()
    data = json.loads(text)
    assert text == json.dumps(data, sort_keys=True, indent=2) + "\n"
    assert text.isascii()
    assert data["mesh"]["total"] == {
        "context": 1,
        "data": 2,
        "expert": 1,
        "fsdp": 16,
        "stage": 1,
        "tensor": 4,
    }
