"""JobSets: golden files, exact texts, one digest for one meaning, and what each key of the target does."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.gke import names
from launcher.gke.canonical import canonical_yaml
from launcher.gke.env import literal
from launcher.gke.manifest import manifest, manifest_bytes, spec_digest
from launcher.gke.pathways import instance_type
from launcher.gke.validate import problems
from launcher.plan import make_plan
from recipes.contract import RUN_NAME_PATTERN, Env, PodEnv
from recipes.errors import UserError
from recipes.schema import Recipe
from tests.cluster.kubelet_env import expand
from tests.golden.update import BUNDLE, MANIFEST_DIR, MANIFESTS, manifest_files, manifest_recipe
from tests.unit.manifest_support import ODD_TEXTS, Object, container, job, pod, pod_rules, replicated, rules

SUBPROCESS_S = 60
YAML_WORDS = ("y", "n", "yes", "no", "on", "off", "true", "false", "null")


@pytest.fixture(scope="module")
def recipes() -> Mapping[str, Recipe]:
    """Of the golden JobSets; composing takes longer than all else here."""
    return {name: manifest_recipe(name) for name in MANIFESTS}


def build(recipe: Recipe, **target: Any) -> Object:
    """The JobSet of a recipe with other settings of its target."""
    changed = dataclasses.replace(recipe, target=dataclasses.replace(recipe.target, **target))
    return manifest(changed, make_plan(changed), bundle=BUNDLE)


def with_slices(recipe: Recipe, num_slices: int) -> Recipe:
    multislice = dataclasses.replace(recipe.multislice, num_slices=num_slices, data=-1)
    train = dataclasses.replace(recipe.train, global_batch_size=num_slices * 256)
    return dataclasses.replace(recipe, multislice=multislice, train=train)


def environment(jobset: Object) -> dict[str, Any]:
    return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in container(jobset)["env"]}


def test_golden_jobsets() -> None:
    found = manifest_files()
    assert sorted(found) == sorted(path.name for path in MANIFEST_DIR.iterdir())
    for name, content in found.items():
        assert content == (MANIFEST_DIR / name).read_bytes(), f"{name}: python -m tests.golden.update"


@pytest.mark.parametrize("name", sorted(MANIFESTS))
def test_golden_reads_back(name: str, recipes: Mapping[str, Recipe]) -> None:
    jobset = build(recipes[name])
    assert yaml.safe_load(manifest_bytes(jobset)) == jobset
    assert json.loads(json.dumps(jobset)) == jobset


@pytest.mark.parametrize("text", ODD_TEXTS)
def test_odd_text_reads_back(text: str) -> None:
    value = {"key": text, "list": [text, {"key": text}]}
    assert yaml.safe_load(canonical_yaml(value)) == value


@pytest.mark.parametrize(
    "text", [text for text in ODD_TEXTS if not text.isalpha() or text.lower() in YAML_WORDS]
)
def test_only_plain_words_are_bare(text: str) -> None:
    """Whatever a reader of YAML 1.1 or 1.2 takes for a number, truth value, date or null is in quotes."""
    written = canonical_yaml({"key": text})
    assert written.startswith(b'key: "') and written.endswith(b'"\n')


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.text(max_size=20), st.one_of(st.text(), st.integers(), st.booleans()), max_size=5))
def test_any_value_reads_back(value: dict[str, Any]) -> None:
    text = canonical_yaml(value)
    assert yaml.safe_load(text) == value
    assert text.isascii()


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="$()A b\xe9", max_size=15) | st.sampled_from(ODD_TEXTS))
def test_values_of_the_recipe_are_carried_exactly(text: str) -> None:
    assert expand(literal("NAME", text)["value"], {"A": "replaced", "HOME": "/root", "": "empty"}) == text


def test_five_hundred_hostile_texts(recipes: Mapping[str, Recipe]) -> None:
    """In variables they arrive as they are; nothing else of the JobSet changes."""
    texts = [f"{prefix}{text}" for prefix in ("", "a", "$", "'", "\n", "- ") for text in ODD_TEXTS]
    hostile = {f"V{number}": text for number, text in enumerate(texts)}
    jobset = build(recipes["cpu"], env=hostile)
    assert len(hostile) > 500
    assert problems(jobset) == []
    read = yaml.safe_load(manifest_bytes(jobset))
    arrived = {name: expand(value, {}) for name, value in environment(read).items() if name in hostile}
    assert arrived == hostile
    container(read)["env"] = [entry for entry in container(read)["env"] if entry["name"] not in hostile]
    plain = build(recipes["cpu"])
    for each in (read, plain):
        del each["metadata"]["labels"][names.SPEC]
        container(each)["env"] = [entry for entry in container(each)["env"] if entry["name"] != PodEnv.RECIPE]
    assert read == plain


def test_contract(recipes: Mapping[str, Recipe]) -> None:
    """All of the contract but the attempt, which pods find out; every reference is to an earlier entry."""
    for name in ("spot-two-slices", "cpu", "one-host"):
        found = environment(build(recipes[name]))
        assert {*Env} - {Env.ATTEMPT} | {*PodEnv} <= found.keys()
        assert Env.ATTEMPT not in found
    assert found[Env.COORDINATOR] == "$(MUSTER_COORDINATOR_HOST):8482"


def test_code_in_the_image_has_no_bundle(recipes: Mapping[str, Recipe]) -> None:
    recipe = recipes["cpu"]
    assert PodEnv.BUNDLE not in environment(manifest(recipe, make_plan(recipe), bundle=None))


def test_digest_is_of_the_meaning(recipes: Mapping[str, Recipe]) -> None:
    recipe = recipes["cpu"]
    one, same = build(recipe, env={"A": "1", "B": "2"}), build(recipe, env={"B": "2", "A": "1"})
    digest = one["metadata"]["labels"][names.SPEC]
    assert digest == spec_digest(one)
    for entries in (one, same):
        container(entries)["env"] = [e for e in container(entries)["env"] if e["name"] != PodEnv.RECIPE]
    assert spec_digest(one) == spec_digest(same)
    other = build(recipe, env={"A": "1", "B": "3"})
    assert other["metadata"]["labels"][names.SPEC] != digest


def test_labels_of_the_user_never_replace_ours(recipes: Mapping[str, Recipe]) -> None:
    jobset = build(recipes["cpu"], labels={names.MANAGED_BY: "other", names.RUN: "x", "team": "nlp"})
    for labels in (
        jobset["metadata"]["labels"],
        replicated(jobset)["template"]["metadata"]["labels"],
        job(jobset)["template"]["metadata"]["labels"],
    ):
        assert labels[names.MANAGED_BY] == names.OWNER
        assert labels[names.RUN] == "quickstart"
        assert labels["team"] == "nlp"


def test_a_variable_that_is_ours_is_a_problem(recipes: Mapping[str, Recipe]) -> None:
    jobset = build(recipes["cpu"], env={"JAX_PLATFORMS": "tpu"})
    assert [problem.key for problem in problems(jobset)] == ["target.env.JAX_PLATFORMS"]
    assert environment(build(recipes["cpu"], env={"PYTHONUNBUFFERED": ""}))["PYTHONUNBUFFERED"] == ""


@pytest.mark.parametrize("name", ["spot-two-slices", "pathways", "pathways-elastic"])
def test_the_longest_run_name_fits(name: str, recipes: Mapping[str, Recipe]) -> None:
    """With 99 slices: a name of 40 characters and every suffix that JobSet and Kubernetes add."""
    longest = "a" * 40
    assert RUN_NAME_PATTERN.fullmatch(longest) and not RUN_NAME_PATTERN.fullmatch(longest + "a")
    recipe = with_slices(recipes[name], 999)
    run = dataclasses.replace(recipe.run, name=longest)
    assert problems(build(dataclasses.replace(recipe, run=run))) == []


@pytest.mark.parametrize(
    ("capacity", "selected", "tolerated"),
    [
        ("on_demand", {}, []),
        ("spot", {"gke-spot": "true"}, ["gke-spot"]),
        ("reserved", {"reservation-name": "training"}, []),
        ("flex_start", {"gke-flex-start": "true"}, ["gke-flex-start", "gke-queued"]),
    ],
)
def test_capacity(
    capacity: str, selected: Mapping[str, str], tolerated: list[str], recipes: Mapping[str, Recipe]
) -> None:
    jobset = build(recipes["reserved"], capacity=capacity)
    hardware = {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v5p-slice",
        "cloud.google.com/gke-tpu-topology": "4x4x8",
    }
    wanted = {f"cloud.google.com/{label}": value for label, value in selected.items()}
    assert pod(jobset)["nodeSelector"] == hardware | wanted
    taints = [entry["key"] for entry in pod(jobset)["tolerations"]]
    assert taints == ["google.com/tpu", *(f"cloud.google.com/{taint}" for taint in tolerated)]


@pytest.mark.parametrize(
    ("golden", "placement", "exclusive", "annotations"),
    [
        ("spot-two-slices", "exclusive", True, {}),
        ("spot-one-slice", "exclusive", True, {}),
        ("one-host", "exclusive", False, {}),
        ("cpu", "exclusive", False, {}),
        ("spot-two-slices", "any", False, {}),
        (
            "spot-two-slices",
            "topology",
            False,
            {"slice-required-topology": "cloud.google.com/gke-nodepool", "slice-size": "64"},
        ),
        ("spot-one-slice", "topology", False, {"required-topology": "cloud.google.com/gke-nodepool"}),
        ("one-host", "topology", False, {"unconstrained-topology": "true"}),
        ("cpu", "topology", False, {"unconstrained-topology": "true"}),
    ],
)
def test_placement(
    golden: str,
    placement: str,
    exclusive: bool,
    annotations: Mapping[str, str],
    recipes: Mapping[str, Recipe],
) -> None:
    jobset = build(recipes[golden], placement=placement)
    found = jobset["metadata"]["annotations"].get("alpha.jobset.sigs.k8s.io/exclusive-topology")
    assert found == ("cloud.google.com/gke-nodepool" if exclusive else None)
    wanted = {f"kueue.x-k8s.io/podset-{name}": value for name, value in annotations.items()}
    assert job(jobset)["template"]["metadata"].get("annotations", {}) == wanted


def test_megascale_only_between_slices_of_tpus(recipes: Mapping[str, Recipe]) -> None:
    has = {
        name: any(key.startswith("MEGASCALE_") for key in environment(build(recipes[name])))
        for name in ("spot-two-slices", "spot-one-slice", "one-host", "cpu")
    }
    assert has == {"spot-two-slices": True, "spot-one-slice": False, "one-host": False, "cpu": False}


def test_privilege_and_the_nodes_network_are_asked_for(recipes: Mapping[str, Recipe]) -> None:
    plain = build(recipes["spot-two-slices"])
    assert container(plain)["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
    assert "hostNetwork" not in pod(plain) and pod(plain)["automountServiceAccountToken"] is False
    asked = build(recipes["spot-two-slices"], privileged=True, host_network=True)
    assert container(asked)["securityContext"] == {"privileged": True}
    assert (pod(asked)["hostNetwork"], pod(asked)["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")


def test_rules_in_their_order(recipes: Mapping[str, Recipe]) -> None:
    recipe = recipes["spot-two-slices"]
    jobset = build(recipe)
    assert [rule["name"] for rule in rules(jobset)] == ["preempted", "userError", "infra"]
    assert "onPodConditions" in pod_rules(jobset)[0]
    old = manifest(recipe, make_plan(recipe), bundle=None, message_patterns=False)
    assert [rule["name"] for rule in rules(old)] == ["userError", "infra"]
    assert "onJobFailureMessagePatterns" not in json.dumps(old)
    # Only what is the user's fault may carry the reason that fails the JobSet.
    assert [rule["onExitCodes"]["values"] for rule in pod_rules(old)] == [[1, 2]]


def test_no_disruption_is_the_users_fault_on_an_old_jobset(recipes: Mapping[str, Recipe]) -> None:
    for name in ("pathways", "pathways-elastic"):
        recipe = recipes[name]
        old = manifest(recipe, make_plan(recipe), bundle=None, message_patterns=False)
        assert '"FailJob", "onPodConditions"' not in json.dumps(old)
        assert problems(old) == []


@pytest.mark.parametrize(
    ("fewest", "missing", "backoff", "action"),
    [(None, None, 0, "FailJob"), (2, None, 0, "FailJob"), (1, 1, 256, "Ignore")],
)
def test_elastic_slices(
    fewest: int | None, missing: int | None, backoff: int, action: str, recipes: Mapping[str, Recipe]
) -> None:
    recipe = recipes["pathways"]
    multislice = dataclasses.replace(recipe.multislice, min_slices=fewest)
    jobset = build(dataclasses.replace(recipe, multislice=multislice))
    proxy = pod(jobset)["initContainers"][1]
    flags = [flag for flag in proxy["args"] if flag.startswith("--num_elastic_slices")]
    assert flags == ([] if missing is None else [f"--num_elastic_slices={missing}"])
    worker = replicated(jobset, 1)["template"]["spec"]
    assert worker["backoffLimit"] == backoff
    assert worker["podFailurePolicy"]["rules"][0]["action"] == action


@pytest.mark.parametrize(
    ("golden", "name"),
    [
        ("spot-two-slices", "tpuv6e:16x16"),
        ("reserved", "tpuv5:4x4x8"),
        ("flex-start-queued", "tpuv5e:16x16"),
        ("one-host", "tpuv5e1t:2x4"),
    ],
)
def test_instance_types_of_pathways(golden: str, name: str, recipes: Mapping[str, Recipe]) -> None:
    assert instance_type(make_plan(recipes[golden])) == name


def test_no_pathways_on_cpu(recipes: Mapping[str, Recipe]) -> None:
    with pytest.raises(UserError, match="there is no Pathways"):
        build(recipes["cpu"], controller="pathways")


def test_199_slices_take_no_time(recipes: Mapping[str, Recipe]) -> None:
    recipe = with_slices(recipes["flex-start-queued"], 199)
    begin = time.process_time()
    plan = make_plan(recipe)
    jobset = manifest(recipe, plan, bundle=BUNDLE)
    found = problems(jobset)
    size_bytes = len(manifest_bytes(jobset))
    assert time.process_time() - begin < 0.5
    assert (plan.hardware.num_hosts, plan.hardware.num_chips, found) == (12_736, 50_944, [])
    assert size_bytes < 20_000


def muster(*words: str, folder: Path) -> subprocess.CompletedProcess[bytes]:
    argv = [str(Path(sys.executable).with_name("muster")), "plan", *words]
    return subprocess.run(argv, capture_output=True, cwd=folder, timeout=SUBPROCESS_S, check=False)


def test_plan_prints_the_very_bytes(tmp_path: Path, recipes: Mapping[str, Recipe]) -> None:
    recipe, overrides = MANIFESTS["spot-two-slices"]
    image = recipes["spot-two-slices"].target.image
    common = ["run.root=gs://example-bucket/runs", f"target.image={image}", "target.ship_code=false"]
    done = muster(recipe, *common, *overrides, "--manifest", folder=tmp_path)
    resolved = dataclasses.replace(
        recipes["spot-two-slices"],
        target=dataclasses.replace(recipes["spot-two-slices"].target, ship_code=False),
    )
    wanted = manifest_bytes(manifest(resolved, make_plan(resolved), bundle=None))
    assert (done.returncode, done.stdout, done.stderr) == (0, wanted, b"")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["quickstart", "--manifest"], b"target.kind=local: only runs elsewhere have a manifest"),
        (["quickstart", "--manifest", "--json"], b"exclude each other"),
        (["quickstart", "target=gke", "--manifest", "target.ship_code=false"], b"target.image"),
    ],
)
def test_plan_refuses(words: list[str], message: bytes, tmp_path: Path) -> None:
    done = muster(*words, folder=tmp_path)
    assert (done.returncode, done.stdout) == (2, b"")
    assert message in done.stderr and b"Traceback" not in done.stderr
