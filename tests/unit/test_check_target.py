"""Rules of the target: what is refused, by which key and with which fix; what a launch needs besides."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from launcher.compose import compose
from launcher.plan import make_plan
from recipes.check import check
from recipes.check_target import MAX_ENV_BYTES, launch_problems
from recipes.errors import RecipeError
from recipes.fingerprint import changes, fingerprint
from recipes.kubernetes_names import holds_password, is_image_by_digest, is_label_key, looks_secret
from recipes.load import flatten, nest, recipe_from_dict, recipe_to_dict
from recipes.schema import Recipe

DIGEST = "@sha256:" + "0" * 64
GKE: Mapping[str, Any] = flatten(recipe_to_dict(compose("llama3-8b-v6e-16x16-x2", ["target=gke"]).recipe))
LOCAL: Mapping[str, Any] = flatten(recipe_to_dict(compose("quickstart", []).recipe))
QUEUED = {**GKE, "target.queue": "tpus"}
PATHWAYS = {**GKE, "target.controller": "pathways"}


def recipe_of(base: Mapping[str, Any], changed: Mapping[str, Any]) -> Recipe:
    return recipe_from_dict(nest({**base, **{f"target.{key}": value for key, value in changed.items()}}))


@pytest.mark.parametrize(
    ("base", "changed"),
    [
        (GKE, {}),
        (GKE, {"namespace": "team-7", "service_account": "a.b", "image": f"gcr.io:443/a/b-c__d:v1{DIGEST}"}),
        (GKE, {"capacity": "reserved", "reservation": "mine"}),
        (QUEUED, {"priority_class": "high", "placement": "topology"}),
        (GKE, {"labels": {"team": "", "example.com/cost-center": "A.b_c-1"}}),
        (GKE, {"node_selector": {"cloud.google.com/gke-nodepool": "p", "topology.kubernetes.io/zone": "z"}}),
        (GKE, {"env": {"XLA_FLAGS": "--a=1 --b=$(c)\n'\"", "_a1": "", "TPU_MIN_LOG_LEVEL": "0"}}),
        (GKE, {"env": {"TOKENIZERS_PARALLELISM": "false", "MAX_TOKENS": "1"}}),
        (GKE, {"secrets": {"HF_TOKEN": "hugging.face/to_ken.x"}}),
        (GKE, {"cluster": "arn:aws:eks/x y@z"}),
        (GKE, {"host_network": True, "privileged": True}),
        (PATHWAYS, {}),
        ({**PATHWAYS, "multislice.min_slices": 1}, {}),
        ({**GKE, "multislice.min_slices": 1}, {}),
        (LOCAL, {"kind": "gke"}),
        (LOCAL, {"priority_class": "high", "placement": "topology", "capacity": "reserved"}),
    ],
)
def test_good_targets(base: Mapping[str, Any], changed: Mapping[str, Any]) -> None:
    assert check(recipe_of(base, changed)) == []


@pytest.mark.parametrize(
    ("base", "changed", "key", "says"),
    [
        (GKE, {"kind": "local"}, "target.kind", "only cpu is local"),
        (GKE, {"namespace": "Team"}, "target.namespace", "not a namespace"),
        (GKE, {"namespace": "n" * 64}, "target.namespace", "at most 63"),
        (GKE, {"namespace": "\u0430bc"}, "target.namespace", "not a namespace"),
        (GKE, {"namespace": "a\n"}, "target.namespace", "not a namespace"),
        (GKE, {"namespace": ""}, "target.namespace", "not a namespace"),
        (GKE, {"service_account": "a..b"}, "target.service_account", "not the name of a service account"),
        (GKE, {"queue": "q" * 64}, "target.queue", "LocalQueue"),
        (QUEUED, {"priority_class": "High"}, "target.priority_class", "WorkloadPriorityClass"),
        (GKE, {"priority_class": "high"}, "target.priority_class", "set target.queue"),
        (GKE, {"placement": "topology"}, "target.placement", "set target.queue"),
        (GKE, {"capacity": "reserved"}, "target.reservation", "must be given"),
        (GKE, {"reservation": "mine"}, "target.reservation", "target.capacity=reserved"),
        (GKE, {"capacity": "reserved", "reservation": "a/b"}, "target.reservation", "reservation"),
        (GKE, {"image": "repo:latest"}, "target.image", "by digest"),
        (GKE, {"image": f"Repo/x{DIGEST}".replace("Repo/x", "Repo")}, "target.image", "by digest"),
        (GKE, {"image": f"repo{DIGEST[:-1]}"}, "target.image", "by digest"),
        (GKE, {"image": f"repo{DIGEST}\n"}, "target.image", "by digest"),
        (GKE, {"pathways_proxy_image": "x"}, "target.pathways_proxy_image", "by digest"),
        (GKE, {"cluster": "a\x1bb"}, "target.cluster", "control characters"),
        (GKE, {"cluster": " a"}, "target.cluster", "blanks"),
        (GKE, {"cluster": ""}, "target.cluster", "empty"),
        (GKE, {"cluster": "c" * 254}, "target.cluster", "longer than 253"),
        (GKE, {"labels": {"a b": "x"}}, "target.labels.a b", "name of a label"),
        (GKE, {"labels": {"a/b/c": "x"}}, "target.labels.a/b/c", "name of a label"),
        (GKE, {"labels": {"a": "-"}}, "target.labels.a", "value of a label"),
        (GKE, {"labels": {"a": "x" * 64}}, "target.labels.a", "value of a label"),
        (GKE, {"labels": {"a": "\u00e9"}}, "target.labels.a", "value of a label"),
        (GKE, {"labels": {"kubernetes.io/x": "y"}}, "target.labels.kubernetes.io/x", "domain"),
        (GKE, {"labels": {"jobset.sigs.k8s.io/x": "y"}}, "target.labels.jobset.sigs.k8s.io/x", "domain"),
        (
            GKE,
            {"labels": {"kueue.x-k8s.io/queue-name": "y"}},
            "target.labels.kueue.x-k8s.io/queue-name",
            "domain",
        ),
        (GKE, {"labels": {"muster.tpu/run": "y"}}, "target.labels.muster.tpu/run", "domain of your own"),
        (
            GKE,
            {"node_selector": {"cloud.google.com/gke-spot": "true"}},
            "target.node_selector.cloud.google.com/gke-spot",
            "target.capacity=spot",
        ),
        (GKE, {"node_selector": {"a": "b c"}}, "target.node_selector.a", "value of a label"),
        (GKE, {"env": {"1A": "x"}}, "target.env.1A", "not the name"),
        (GKE, {"env": {"A.B": "x"}}, "target.env.A.B", "not the name"),
        (GKE, {"env": {"": "x"}}, "target.env.", "not the name"),
        (GKE, {"env": {"\uff21": "x"}}, "target.env.\uff21", "not the name"),
        (GKE, {"env": {"MUSTER_RUN_DIR": "x"}}, "target.env.MUSTER_RUN_DIR", "set by Muster"),
        (GKE, {"env": {"MEGASCALE_PORT": "1"}}, "target.env.MEGASCALE_PORT", "set by"),
        (GKE, {"env": {"TPU_WORKER_ID": "1"}}, "target.env.TPU_WORKER_ID", "set by"),
        (GKE, {"env": {"JAX_PLATFORMS": "cpu"}}, "target.env.JAX_PLATFORMS", "set by"),
        (GKE, {"env": {"JAX_COORDINATOR_ADDRESS": "x"}}, "target.env.JAX_COORDINATOR_ADDRESS", "set by"),
        (GKE, {"env": {"A": "x\0"}}, "target.env.A", "NUL"),
        (GKE, {"env": {"A": "\udc80"}}, "target.env.A", "UTF-8"),
        (GKE, {"env": {"HF_TOKEN": "x"}}, "target.env.HF_TOKEN", "set target.secrets.HF_TOKEN=SECRET/KEY"),
        (GKE, {"env": {"A": "x" * MAX_ENV_BYTES}}, "target.env", f"takes {MAX_ENV_BYTES + 1} bytes"),
        (GKE, {"env": {"A": "x"}, "secrets": {"A": "s/k"}}, "target.env.A", "both given"),
        (GKE, {"secrets": {"A": "value"}}, "target.secrets.A", "SECRET/KEY"),
        (GKE, {"secrets": {"A": "s/k/k"}}, "target.secrets.A", "SECRET/KEY"),
        (GKE, {"secrets": {"A": "s/.."}}, "target.secrets.A", "SECRET/KEY"),
        (GKE, {"secrets": {"A": "S/k"}}, "target.secrets.A", "SECRET/KEY"),
        (GKE, {"secrets": {"MUSTER_X": "s/k"}}, "target.secrets.MUSTER_X", "set by"),
        ({**LOCAL, "target.kind": "gke"}, {"host_network": True}, "target.host_network", "ports clash"),
        ({**LOCAL, "target.kind": "gke"}, {"controller": "pathways"}, "target.controller", "cpu"),
        (LOCAL, {"controller": "pathways"}, "target.controller", "target.kind=local"),
        ({**LOCAL, "multislice.min_slices": 1}, {}, "multislice.min_slices", "target.kind=local"),
        ({**PATHWAYS, "multislice.min_slices": 3}, {}, "multislice.min_slices", "use at most 2"),
    ],
)
def test_bad_targets(base: Mapping[str, Any], changed: Mapping[str, Any], key: str, says: str) -> None:
    problems = check(recipe_of(base, changed))
    assert [problem.key for problem in problems] == [key]
    assert says in f"{problems[0].reason}; {problems[0].fix}"


def test_a_plan_needs_less_than_a_launch() -> None:
    recipe = recipe_of({**PATHWAYS, "run.root": "runs"}, {})
    assert check(recipe) == [] and make_plan(recipe).hardware.target == "gke"
    assert [problem.key for problem in launch_problems(recipe)] == [
        "run.root",
        "target.image",
        "target.pathways_server_image",
        "target.pathways_proxy_image",
    ]
    assert launch_problems(recipe, origins={"run.root": "default"})[0].origin == "default"


def test_a_launch_with_all_that_it_needs() -> None:
    assert (
        launch_problems(recipe_of({**GKE, "run.root": "gs://some-bucket/x"}, {"image": f"a{DIGEST}"})) == []
    )
    assert launch_problems(recipe_of(LOCAL, {})) == []
    on_tpu = recipe_of({**GKE, "run.root": "runs"}, {"kind": "tpu"})
    lacking = [problem.key for problem in launch_problems(on_tpu)]
    assert lacking == ["run.root", "target.project", "target.zone"]


def test_the_experiment_is_the_same_whatever_the_target() -> None:
    old, new = recipe_of(GKE, {}), recipe_of(GKE, {"env": {"A": "1"}, "labels": {"x.y/z": "1"}, "queue": "q"})
    assert fingerprint(old) == fingerprint(new)
    assert [change.key for change in changes(old, new)] == ["target.queue", "target.labels", "target.env"]


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (1, 'quote it: A: "1"'),
        (True, 'quote it: A: "true"'),
        (0.5, "quote it"),
        (None, "give a text"),
        ({"B": "c"}, "give a text"),
        (["x"], "give a text"),
    ],
)
def test_values_that_are_no_texts(value: object, says: str) -> None:
    with pytest.raises(RecipeError) as caught:
        recipe_of(GKE, {"env": {"A": value}})
    assert "target.env.A" in caught.value.message and says in caught.value.message


@pytest.mark.parametrize("value", [None, "A=1", ["A"], 3])
def test_a_free_form_key_is_a_mapping(value: object) -> None:
    with pytest.raises(RecipeError, match=r"target\.env.*is not a mapping"):
        recipe_of(GKE, {"env": value})


def test_names_at_their_limits() -> None:
    assert is_label_key(f"{'a' * 253}/{'b' * 63}") and not is_label_key(f"{'a' * 254}/b")
    assert not is_label_key("/b") and not is_label_key("a/")
    assert is_image_by_digest(f"{'a' * 255}{DIGEST}") and not is_image_by_digest(f"{'a' * 256}{DIGEST}")
    assert looks_secret("github_token") and looks_secret("DBPASSWD") and not looks_secret("TOKENIZER")


@pytest.mark.parametrize(
    "name", ["WANDB_KEY", "key", "GITHUB_PAT", "PAT", "DB_PASSWD", "MYSQL_PASSWD_OLD", "SSH_KEYS", "API-KEY"]
)
def test_names_that_tell_of_a_secret(name: str) -> None:
    assert looks_secret(name)


@pytest.mark.parametrize(
    "name", ["XLA_FLAGS", "KEYBOARD", "MONKEY", "PATIENCE", "KEY_COUNT", "PATH", "FORMAT"]
)
def test_names_that_tell_of_none(name: str) -> None:
    assert not looks_secret(name)


@pytest.mark.parametrize(
    ("value", "holds"),
    [
        ("postgres://me:hunter2@db:5432/x", True),
        ("redis://:hunter2@cache", True),
        ("a http://u:p@proxy:3128 b", True),
        ("https://host:443/a@b", False),
        ("https://user@host", False),
        ("gs://bucket/a:b@c", False),
        ("http://host:80?x=a@b", False),
    ],
)
def test_passwords_in_addresses(value: str, holds: bool) -> None:
    assert holds_password(value) == holds


def test_a_password_in_an_address_is_refused_and_not_shown() -> None:
    (problem,) = check(recipe_of(GKE, {"env": {"DATABASE": "postgres://me:hunter2@db/x"}}))
    assert problem.key == "target.env.DATABASE" and problem.value is None
    assert "password" in problem.reason and "target.secrets.DATABASE" in problem.fix


@pytest.mark.parametrize("name", ["PATH", "PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "LD_PRELOAD"])
@pytest.mark.parametrize("key", ["env", "secrets"])
def test_what_the_agent_starts_with_is_the_images(key: str, name: str) -> None:
    (problem,) = check(recipe_of(GKE, {key: {name: "a/b"}}))
    assert problem.key == f"target.{key}.{name}" and "agent" in problem.reason


@pytest.mark.parametrize("name", ["HOME", "LD_LIBRARY_PATH", "PYTHONUNBUFFERED"])
def test_what_the_agent_starts_without_is_the_users(name: str) -> None:
    assert check(recipe_of(GKE, {"env": {name: "/a"}})) == []
