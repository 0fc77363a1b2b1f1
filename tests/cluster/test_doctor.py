"""``muster doctor`` against a real API server with JobSet and Kueue: stand-in nodes, queues, quotas, roles.

pytest tests/cluster/test_doctor.py
"""

from __future__ import annotations

import base64
import dataclasses
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import yaml

from launcher import cli
from launcher.compose import compose
from launcher.gke.blockers import blockers
from launcher.gke.client import connect
from launcher.gke.manifest import manifest, manifest_bytes
from launcher.gke.objects import JOBSETS
from launcher.plan import make_plan
from recipes.kubernetes_names import ACCELERATOR as ACCELERATOR_LABEL
from recipes.kubernetes_names import TOPOLOGY as TOPOLOGY_LABEL
from tests.cluster.api import Json
from tests.cluster.cluster import Cluster
from tests.cluster.control_plane import ADMIN, PLAIN, free_port
from tests.cluster.kueue import GROUP, make_priority, make_queue, workloads
from tests.cluster.waiting import wait_until
from tests.local.gcs_server import GcsServer

TPU = "google.com/tpu"
ACCELERATOR = "tpu-v6e-slice"
REGION = {"topology.kubernetes.io/region": "us-central1"}
"""Where the bucket server says that its buckets are."""
CANARY = "canary-of-a-secret"
RECIPE = ("llama3-8b-v6e-16x16-x2", "target=gke")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What one command said."""

    code: int
    checks: Mapping[str, Mapping[str, str]]
    text: str

    def levels(self, level: str) -> set[str]:
        return {name for name, check in self.checks.items() if check["level"] == level}

    def says(self, check: str) -> str:
        found = self.checks[check]
        return f"{found['level']}: {found['message']} / {found['fix']}"


class Doctor:
    """Asks about one recipe on one cluster."""

    def __init__(self, cluster: Cluster, root: str, capsys: pytest.CaptureFixture[str]) -> None:
        self.cluster, self._root, self._capsys = cluster, root, capsys

    def words(self, *more: str) -> Sequence[str]:
        """The recipe, for 2 slices of 4 hosts of 4 chips, and its overrides."""
        keys = {
            "hardware.topology": "4x4",
            "run.root": self._root,
            "target.cluster": ADMIN,
            "target.namespace": self.cluster.namespace,
            "target.image": f"repo/trainer@sha256:{'0' * 64}",
            "target.service_account": "trainer",
            "target.queue": "tpu",
            **dict(word.split("=", 1) for word in more),
        }
        return [*RECIPE, *(f"{key}={value}" for key, value in keys.items())]

    def ask(self, *more: str) -> Answer:
        self._capsys.readouterr()
        code = cli.main(["doctor", *self.words(*more), "--json"])
        captured = self._capsys.readouterr()
        assert captured.out, captured.err
        found = json.loads(captured.out)
        checks = {check["check"]: check for check in found["checks"]}
        assert len(checks) == len(found["checks"])
        return Answer(code=code, checks=checks, text=captured.out + captured.err)


@pytest.fixture
def doctor(
    kueue_cluster: Cluster,
    gcs: GcsServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Iterator[Doctor]:
    """A namespace with all that the recipe wants, but for nodes."""
    for name, value in {**gcs.env, **kueue_cluster.plane.env}.items():
        monkeypatch.setenv(name, value)
    annotations = {"iam.gke.io/gcp-service-account": "trainer@project.iam.gserviceaccount.com"}
    kueue_cluster.create("serviceaccounts", {"metadata": {"name": "trainer", "annotations": annotations}})
    secret = {"token": base64.b64encode(CANARY.encode()).decode()}
    kueue_cluster.create("secrets", {"metadata": {"name": "wandb"}, "data": secret})
    queue_of(kueue_cluster, "32")
    yield Doctor(kueue_cluster, gcs.make_bucket(kueue_cluster.namespace) + "/runs", capsys)


def queue_of(cluster: Cluster, chips: str, name: str = "tpu") -> None:
    labels = {ACCELERATOR_LABEL: ACCELERATOR}
    make_queue(cluster, name, quota={TPU: chips}, node_labels=labels)
    path = f"{GROUP}/clusterqueues/{cluster.namespace}-{name}"
    wait_until(lambda: active(cluster.api.get(path)), 30, "the ClusterQueue is active")


def active(queue: Json) -> bool:
    conditions = queue.get("status", {}).get("conditions", [])
    return any(each["type"] == "Active" and each["status"] == "True" for each in conditions)


def add_slices(
    cluster: Cluster, *pools: str, topology: str = "4x4", chips: int = 4, count: int = 4
) -> list[str]:
    return [
        name
        for pool in pools
        for name in cluster.kubelet.add_tpu_nodes(
            pool, accelerator=ACCELERATOR, topology=topology, chips=chips, count=count, labels=REGION
        )
    ]


def test_everything_fits(doctor: Doctor) -> None:
    add_slices(doctor.cluster, "a", "b")
    priority = make_priority(doctor.cluster, 7)
    answer = doctor.ask("target.secrets.WANDB_API_KEY=wandb/token", f"target.priority_class={priority}")
    # No Deployment: the controllers of this cluster are processes.
    assert answer.levels("unknown") == {"jobset controller"}, answer.text
    assert (answer.code, answer.levels("failed"), answer.levels("warning")) == (0, set(), set()), answer.text
    assert answer.says("whole slices") == "ok: 2 are up, 2 are wanted / "
    assert "32 of flavor" in answer.says(f"quota {TPU}")
    assert answer.says("bucket location").startswith("ok: US-CENTRAL1, as the nodes in us-central1")
    assert {"dry run", "jobset fields", "secret wandb/token", "priority class"} <= answer.levels("ok")
    assert CANARY not in answer.text
    assert doctor.cluster.jobset("llama3-8b-v6e-16x16-x2") is None


def test_one_line_a_check_and_a_fix_for_each_failure(
    doctor: Doctor, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["doctor", *doctor.words("target.queue=gpu")]) == 2
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    [at] = [number for number, line in enumerate(lines) if line.startswith("failed")]
    assert lines[at].split("  ")[0] == "failed"
    assert "there is no LocalQueue gpu in the namespace; it has tpu" in lines[at]
    assert lines[at + 1].strip() == "fix: correct target.queue, or have it made (k8s/base/queue)"
    assert captured.err.startswith("1 failed, ")


def test_another_topology(doctor: Doctor) -> None:
    add_slices(doctor.cluster, "a", topology="8x8")
    answer = doctor.ask()
    assert answer.code == 0
    assert f"the cluster has {ACCELERATOR} 8x8 (4 nodes)" in answer.says("nodes")
    assert answer.levels("warning") == {"nodes"}


def test_slices_that_are_not_whole(doctor: Doctor) -> None:
    names = add_slices(doctor.cluster, "a", "b")
    doctor.cluster.api.patch(f"/api/v1/nodes/{names[-1]}", {"spec": {"unschedulable": True}})
    answer = doctor.ask()
    assert answer.code == 0
    assert f"1 of the 2 slices can start on the nodes that are up; {names[-1]} is cordoned" in answer.says(
        "whole slices"
    )


def test_another_number_of_chips(doctor: Doctor) -> None:
    add_slices(doctor.cluster, "a", topology="2x4", chips=8, count=1)
    answer = doctor.ask("hardware.topology=2x4", "hardware.chips_per_host=4")
    assert (answer.code, answer.levels("failed")) == (2, {"chips per host"})
    assert "have 8 chips, the recipe means 4 / set hardware.chips_per_host=8" in answer.says("chips per host")


def test_bucket_elsewhere(doctor: Doctor) -> None:
    cluster = doctor.cluster
    for pool in ("a", "b"):
        cluster.kubelet.add_tpu_nodes(
            pool,
            accelerator=ACCELERATOR,
            topology="4x4",
            chips=4,
            count=4,
            labels={"topology.kubernetes.io/region": "us-east5"},
        )
    answer = doctor.ask()
    assert (answer.code, answer.levels("warning")) == (0, {"bucket location"})
    assert "use a bucket in us-east5" in answer.says("bucket location")


def test_no_bucket(doctor: Doctor) -> None:
    answer = doctor.ask("run.root=gs://bucket-that-is-not-there/runs")
    assert answer.levels("failed") == {"bucket"}
    assert "does not exist" in answer.says("bucket")


def test_what_is_missing_in_the_namespace(doctor: Doctor) -> None:
    add_slices(doctor.cluster, "a", "b")
    asked = (
        "target.queue=gpu",
        "target.priority_class=urgent",
        "target.service_account=nobody",
        "target.secrets.WANDB_API_KEY=wandb/key",
        "target.secrets.HF_TOKEN=huggingface/token",
    )
    answer = doctor.ask(*asked)
    missing = {"queue", "service account", "secret wandb/key", "secret huggingface/token"}
    assert (answer.code, answer.levels("failed")) == (2, {*missing, "priority class"}), answer.text
    assert "correct target.secrets.WANDB_API_KEY: it has token" in answer.says("secret wandb/key")
    # What launch asks is the part of it that costs a handful of requests.
    recipe = compose(doctor.words(*asked)[0], doctor.words(*asked)[1:]).recipe
    cluster = connect(ADMIN, doctor.cluster.namespace)
    quickest_s = 10.0
    for _ in range(4):
        began_s = time.monotonic()
        found = blockers(cluster, recipe)
        quickest_s = min(quickest_s, time.monotonic() - began_s)
        assert {result.check for result in found} == missing
    # The quickest: other tests share the cores.
    assert quickest_s < 0.3


def test_nothing_blocks(doctor: Doctor) -> None:
    words = doctor.words("target.secrets.WANDB_API_KEY=wandb/token")
    assert not blockers(connect(ADMIN, doctor.cluster.namespace), compose(words[0], words[1:]).recipe)


def test_no_such_namespace(doctor: Doctor) -> None:
    answer = doctor.ask("target.namespace=nowhere")
    assert answer.code == 2
    assert answer.says("namespace").startswith("failed: there is no namespace nowhere")
    words = doctor.words()
    recipe = compose(words[0], words[1:]).recipe
    assert "namespace" in {result.check for result in blockers(connect(ADMIN, "nowhere"), recipe)}


def test_quotas_that_are_too_small(doctor: Doctor) -> None:
    add_slices(doctor.cluster, "a", "b")
    queue_of(doctor.cluster, "31", "small")
    body = {"metadata": {"name": "chips"}, "spec": {"hard": {f"requests.{TPU}": "16", "pods": "100"}}}
    doctor.cluster.create("resourcequotas", body)
    path = doctor.cluster.path("resourcequotas", "chips")
    wait_until(lambda: doctor.cluster.api.get(path).get("status", {}).get("hard"), 30)
    answer = doctor.ask("target.queue=small")
    assert (answer.code, answer.levels("failed")) == (2, {f"quota {TPU}", "resource quota chips"}), (
        answer.text
    )
    assert "has 31 google.com/tpu" in answer.says(f"quota {TPU}")
    assert "allows 16 requests.google.com/tpu" in answer.says("resource quota chips")


def test_a_flavor_for_other_chips(doctor: Doctor) -> None:
    labels = {ACCELERATOR_LABEL: "tpu-v5p-slice"}
    make_queue(doctor.cluster, "v5p", quota={TPU: "64"}, node_labels=labels)
    answer = doctor.ask("target.queue=v5p")
    assert answer.code == 2
    assert "tpu-v5p-slice, not tpu-v6e-slice" in answer.says(f"quota {TPU}")


@pytest.mark.parametrize(
    ("quota", "labels", "admitted"),
    [
        ({TPU: "32"}, {ACCELERATOR_LABEL: ACCELERATOR}, True),
        ({TPU: "32"}, {}, True),
        ({TPU: "32"}, {"team": "red"}, True),
        ({TPU: "32", "cpu": "0"}, {ACCELERATOR_LABEL: ACCELERATOR, TOPOLOGY_LABEL: "4x4"}, True),
        ({TPU: "31"}, {ACCELERATOR_LABEL: ACCELERATOR}, False),
        ({TPU: "32"}, {ACCELERATOR_LABEL: "tpu-v5p-slice"}, False),
        ({TPU: "32"}, {TOPOLOGY_LABEL: "8x8"}, False),
        ({"cpu": "32"}, {ACCELERATOR_LABEL: ACCELERATOR}, False),
    ],
)
def test_kueue_itself_agrees(
    doctor: Doctor, quota: Mapping[str, str], labels: Mapping[str, str], admitted: bool
) -> None:
    make_queue(doctor.cluster, "other", quota=quota, node_labels=labels)
    answer = doctor.ask("target.queue=other")
    assert answer.checks[f"quota {TPU}"]["level"] == ("ok" if admitted else "failed"), answer.text
    words = doctor.words("target.queue=other")
    recipe = compose(words[0], words[1:]).recipe
    body = manifest_bytes(manifest(recipe, make_plan(recipe), bundle=None))
    connect(ADMIN, doctor.cluster.namespace).apply(JOBSETS, recipe.run_name, body)
    verdict = wait_until(lambda: quota_reserved(doctor.cluster), 30, "Kueue has decided")
    assert verdict == str(admitted)


def quota_reserved(cluster: Cluster) -> str:
    """Status of Kueue's condition; empty before there is one."""
    conditions = [
        each for found in workloads(cluster) for each in found.get("status", {}).get("conditions", [])
    ]
    return next((str(each["status"]) for each in conditions if each["type"] == "QuotaReserved"), "")


def test_one_who_may_nothing(doctor: Doctor) -> None:
    add_slices(doctor.cluster, "a", "b")
    answer = doctor.ask(f"target.cluster={PLAIN}", "target.secrets.WANDB_API_KEY=wandb/token")
    assert answer.code == 2
    assert answer.levels("failed") == {"may launch"}, answer.text
    assert "may look" in answer.levels("warning")
    for check in ("nodes", "namespace", "service account", "secret wandb/token", "queue", "dry run"):
        assert answer.says(check).startswith(f"unknown: {PLAIN} may not "), check
    # Every user may read what the server serves.
    assert {"cluster", "jobset", "jobset fields", "kueue", "clock"} <= answer.levels("ok")


def test_no_cluster_at_the_address(
    doctor: Doctor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = yaml.safe_load(doctor.cluster.plane.kubeconfig.read_text())
    config["clusters"][0]["cluster"]["server"] = f"https://127.0.0.1:{free_port()}"
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(config))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    assert cli.main(["doctor", *doctor.words()]) == 75
    assert f"error: cluster {ADMIN} does not answer at https://127.0.0.1:" in capsys.readouterr().err


def test_a_recipe_for_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "quickstart"]) == 2
    assert "target.kind=local: doctor compares a recipe with a GKE cluster" in capsys.readouterr().err
