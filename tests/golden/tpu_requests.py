"""Writes the golden files of what is asked of the Cloud TPU API anew.

    python -m tests.golden.tpu_requests

The constant scripts stand there by name. Review the difference like code before committing it.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from launcher.compose import compose
from launcher.supervise.records import Order
from launcher.tpu.request import Request, Wish, request, request_bytes
from recipes.schema import Recipe

TPU_DIR = Path(__file__).parent / "tpu"
RECIPES_DIR = Path(__file__).resolve().parents[2] / "recipes"
ORDER = Order(
    id="0123456789abcdef",
    recipe="launches/0.json",
    bundle=f"sha256:{'b' * 64}",
    launched_s=1_800_000_000.0,
    by="me",
)
SCRIPTS = ("startup-script", "shutdown-script")
_TWO = "llama3-8b-v6e-16x16-x2"
_ONE = "llama3-8b-v5e-16x16"
REQUESTS: Mapping[str, tuple[str, Sequence[str], Mapping[str, object]]] = {
    "spot-two-slices": (_TWO, [], {}),
    "probe": (_TWO, [], {"num_slices": 1, "is_probe": True, "valid_for_s": 600.5}),
    "one-of-two-slices": (_TWO, ["multislice.min_slices=1"], {"num_slices": 1, "valid_for_s": 900.0}),
    "workload-type": (
        _TWO,
        [
            "target.workload_type=throughput_optimized",
            "target.capacity=reserved",
            "target.reservation=training",
        ],
        {},
    ),
    "on-demand": (
        _ONE,
        ["target.capacity=on_demand", "target.min_duration_s=3600", "target.valid_until_s=7200"],
        {"valid_for_s": 9000.0},
    ),
    "reserved": (
        "llama3-70b-v5p-4x4x8",
        ["target.capacity=reserved", "target.reservation=training"],
        {},
    ),
    "rehearsal": ("quickstart", [], {}),
    "every-option": (
        _ONE,
        [
            f"run.name={'a' * 40}",
            "run.max_restarts=7",
            "target.network=research",
            "target.subnetwork=projects/p/regions/us-east5/subnetworks/tpu",
            "target.external_ips=false",
            "target.network_tags=[ssh,tpu]",
            "target.service_account=trainer@example-project.iam.gserviceaccount.com",
            "target.disks=[data,projects/p/zones/us-east5-b/disks/more]",
            "target.runtime_version=v2-alpha-tpuv5-lite-next",
            "target.labels.team=nlp",
            "target.env.ODD=\"$(HOME) $$ on: 'y' #1\"",
            "target.grace_period_s=12.5",
        ],
        {},
    ),
}
"""By file name: what a request is golden of: a recipe, its overrides, and what differs in the wish."""


@functools.cache
def tpu_recipe(name: str) -> Recipe:
    """The recipe of one golden request."""
    recipe, overrides, _ = REQUESTS[name]
    common = [
        "run.root=gs://example-bucket/runs",
        "target=tpu",
        "target.project=example-project",
        "target.zone=us-east5-b",
        "target.python=/opt/venv/bin/python",
    ]
    if not any(each.startswith("target.capacity=") for each in overrides):
        common.append("target.capacity=spot")
    return compose(recipe, [*common, *overrides], search=[RECIPES_DIR]).recipe


def tpu_request(name: str) -> Request:
    """One golden request."""
    recipe = tpu_recipe(name)
    wish = Wish(
        order=ORDER,
        number=3,
        zone="us-east5-b",
        capacity=recipe.target.capacity,
        num_slices=recipe.multislice.num_slices,
    )
    return request(recipe, recipe.run_dir, dataclasses.replace(wish, **REQUESTS[name][2]))  # type: ignore[arg-type]


def tpu_files() -> Mapping[str, bytes]:
    """File name -> contents of the golden requests, scripts by name."""
    return {f"{name}.json": _without_scripts(tpu_request(name)) for name in REQUESTS}


def _without_scripts(asked: Request) -> bytes:
    plain = json.loads(request_bytes(asked))
    metadata = plain["body"]["tpu"]["node_spec"][0]["node"].get("metadata", {})
    metadata |= {name: f"({name})" for name in SCRIPTS if name in metadata}
    return (json.dumps(plain, sort_keys=True, indent=2) + "\n").encode()


def main() -> None:
    TPU_DIR.mkdir(exist_ok=True)
    for stale in TPU_DIR.glob("*.json"):
        stale.unlink()
    for name, content in tpu_files().items():
        (TPU_DIR / name).write_bytes(content)


if __name__ == "__main__":
    main()
