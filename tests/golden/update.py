"""Writes the golden files anew: the plan of every shipped recipe, JobSets, the table of docs/hardware.md.

    python -m tests.golden.update

Review the difference like code before committing it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path

from launcher.compose import compose
from launcher.gke.manifest import manifest, manifest_bytes
from launcher.plan import make_plan, render_plan
from recipes.hardware import CPU, Generation, generations, max_chips
from recipes.schema import Recipe

REPO = Path(__file__).resolve().parents[2]
PLAN_DIR = Path(__file__).parent / "plan"
MANIFEST_DIR = Path(__file__).parent / "manifest"
RECIPES_DIR = REPO / "recipes"
HARDWARE_DOC = REPO / "docs" / "hardware.md"
IMAGE = f"us-docker.pkg.dev/example/muster/trainer@sha256:{'1' * 64}"
SERVER_IMAGE = f"us-docker.pkg.dev/cloud-tpu-v2-images/pathways/server@sha256:{'2' * 64}"
PROXY_IMAGE = f"us-docker.pkg.dev/cloud-tpu-v2-images/pathways/proxy_server@sha256:{'3' * 64}"
BUNDLE = f"sha256:{'b' * 64}"
_PATHWAYS = (
    "target.controller=pathways",
    f"target.pathways_server_image={SERVER_IMAGE}",
    f"target.pathways_proxy_image={PROXY_IMAGE}",
)
MANIFESTS: Mapping[str, tuple[str, Sequence[str]]] = {
    "cpu": ("quickstart", ["target=gke"]),
    "spot-two-slices": ("llama3-8b-v6e-16x16-x2", []),
    "spot-one-slice": ("mixtral-8x7b-v6e-16x16", []),
    "one-host": (
        "llama3-8b-v5e-16x16",
        ["hardware.topology=2x4", "hardware.chips_per_host=8", "target=gke"],
    ),
    "reserved": ("llama3-70b-v5p-4x4x8", ["target.capacity=reserved", "target.reservation=training"]),
    "flex-start-queued": (
        "llama3-8b-v5e-16x16",
        ["target.capacity=flex_start", "target.queue=flex-start"],
    ),
    "kueue-topology": (
        "llama3-405b-v5p-8x8x8-x2",
        ["target.queue=research", "target.priority_class=high", "target.placement=topology"],
    ),
    "pathways": ("llama3-8b-v6e-16x16-x2", _PATHWAYS),
    "pathways-elastic": ("llama3-8b-v6e-16x16-x2", [*_PATHWAYS, "multislice.min_slices=1"]),
    "every-option": (
        "llama3-8b-v6e-16x16-x2",
        [
            f"run.name={'a' * 40}",
            "run.max_restarts=7",
            "target.namespace=research",
            "target.service_account=trainer",
            "target.queue=research",
            "target.priority_class=low",
            "target.placement=any",
            "target.node_selector.topology.kubernetes.io/zone=us-east5-b",
            "target.labels.team=nlp",
            "target.env.ODD=\"$(HOME) $$ on: 'y' #1\"",
            "target.env.FLAG='yes'",
            "target.secrets.WANDB_API_KEY=wandb/api-key",
            "target.host_network=true",
            "target.privileged=true",
            "target.ttl_s=3600",
            "target.grace_period_s=12.5",
        ],
    ),
}
"""By file name: what a JobSet is golden of, a recipe and its overrides."""
OLD_JOBSET = "spot-two-slices-jobset-0.9"
"""The same for a JobSet without message patterns."""


@functools.cache
def manifest_recipe(name: str) -> Recipe:
    """The recipe of one golden JobSet."""
    recipe, overrides = MANIFESTS[name]
    common = ["run.root=gs://example-bucket/runs", f"target.image={IMAGE}"]
    return compose(recipe, [*common, *overrides], search=[RECIPES_DIR]).recipe


def manifest_files() -> Mapping[str, bytes]:
    """File name -> contents of the golden JobSets."""
    found = {name: _manifest(name) for name in MANIFESTS}
    found[OLD_JOBSET] = _manifest("spot-two-slices", message_patterns=False)
    return {f"{name}.yaml": content for name, content in found.items()}


def _manifest(name: str, *, message_patterns: bool = True) -> bytes:
    recipe = manifest_recipe(name)
    found = manifest(recipe, make_plan(recipe), bundle=BUNDLE, message_patterns=message_patterns)
    return manifest_bytes(found)


def plan_files(recipe: str) -> Mapping[str, str]:
    """File name -> contents of the golden files of one shipped recipe."""
    plan = make_plan(compose(recipe, [], search=[RECIPES_DIR]).recipe)
    return {f"{recipe}.json": plan.to_json(), f"{recipe}.txt": render_plan(plan)}


def shipped_recipes() -> list[str]:
    """Names of the recipes that come with the project."""
    return sorted(path.stem for path in RECIPES_DIR.glob("*.yaml"))


def hardware_doc(text: str) -> str:
    """docs/hardware.md with its table of generations made anew."""
    begin, end = "tests.golden.update -->\n", "<!-- end of generations -->"
    before, _, rest = text.partition(begin)
    return f"{before}{begin}{_generation_table()}{end}{rest.partition(end)[2]}"


def _generation_table() -> str:
    columns = (
        "",
        "largest",
        "HBM GiB",
        "HBM GB/s",
        "bf16",
        "8-bit",
        "ICI",
        "DCN",
        "USD",
        "USD spot",
        "region",
    )
    rows = [columns, tuple("---" for _ in columns)]
    rows += [_generation_row(chip) for chip in generations().values() if chip.name != CPU]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _generation_row(chip: Generation) -> tuple[str, ...]:
    peak = chip.peak_flops_per_s
    (eight_bit,) = set(peak) - {"bf16"}
    price = chip.price
    money = (str(price.on_demand), str(price.spot), price.region) if price else ("unknown", "unknown", "")
    return (
        chip.name,
        f"{max_chips(chip)} chips",
        f"{(chip.hbm_bytes or 0) / 2**30:g}",
        f"{(chip.hbm_bytes_per_s or 0) / 1e9:g}",
        f"{peak['bf16'] / 1e12:g}",
        f"{peak[eight_bit] / 1e12:g} {eight_bit}",
        f"{chip.ici_links} x {(chip.ici_link_bytes_per_s or 0) / 1e9:g} GB/s",
        f"{(chip.dcn_bytes_per_s or 0) / 1e9:g} GB/s",
        *money,
    )


def main() -> None:
    HARDWARE_DOC.write_text(hardware_doc(HARDWARE_DOC.read_text(encoding="ascii")), encoding="ascii")
    MANIFEST_DIR.mkdir(exist_ok=True)
    for stale in MANIFEST_DIR.glob("*.yaml"):
        stale.unlink()
    for name, content in manifest_files().items():
        (MANIFEST_DIR / name).write_bytes(content)
    PLAN_DIR.mkdir(exist_ok=True)
    for stale in (*PLAN_DIR.glob("*.json"), *PLAN_DIR.glob("*.txt")):
        stale.unlink()
    for recipe in shipped_recipes():
        for name, text in plan_files(recipe).items():
            (PLAN_DIR / name).write_text(text, encoding="ascii")


if __name__ == "__main__":
    main()
