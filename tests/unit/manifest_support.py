"""Golden JobSets, and every way to break one: each row is a rule of `launcher/gke/validate*.py`.

The rows are run twice: against the rules (tests/unit/test_gke_validate.py) and against the API server that
they mirror (tests/cluster/test_manifest_accepted.py).
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import yaml

from launcher.gke.jobs import PODSET
from tests.golden.update import MANIFEST_DIR

type Object = dict[str, Any]
type Change = Callable[[Object], object]
INT32 = 2**31
_ODD_WORDS = """
on Off y N yes NO true False null Null ~ = << - ? : 1 -1 +1 01 0o17 0x1f 0b1 1e3 1E3 1. .5 1_000 1:30 1.5e+3
0x .inf -.INF .nan NaN Infinity 2026-11-30 2026-11-30T10:00:00Z 12e4567890123456 {a:b} [a] #c &a *a !a | > %a
@a `a` ' " '' "a" \\n \\ --- ... `id` ../../etc ${a} $ $$ $a $(HOME) $$(HOME) $( $() a$
"""
ODD_TEXTS = (
    *_ODD_WORDS.split(),
    *(
        "",
        " ",
        " a",
        "a ",
        "- a",
        "a: b",
        "a #c",
        "!!str a",
        "; rm -rf /",
        "$(whoami) && {{ a }}",
        "x" * 5000,
    ),
    *("\ta", "\n", "a\n", "a\nb", "a\rb", "\x01", "\x7f", "\x85", "\xa0", "\u2028", "\ufeff"),
    *("\xe9", "e\u0301", "\u0430dmin", "\U0001f600", "$\xe9"),
)
"""What YAML readers, shells and templates take for something else."""


class Fate(enum.StrEnum):
    """What becomes of a broken manifest that is sent all the same."""

    REFUSED = "the API server or JobSet's webhook refuses the JobSet"
    CHILD = "the JobSet is accepted, and its Jobs are refused"
    KUEUE = "Kueue's webhook refuses the JobSet; without Kueue nobody looks"
    LATE = "all is accepted, and it does not run as it should"


@dataclass(frozen=True, kw_only=True, slots=True)
class Broken:
    """One way to break a JobSet."""

    name: str
    key: str
    """Of the problem that says so."""
    fate: Fate
    change: Change
    golden: str = "spot-two-slices"


def golden(name: str) -> Object:
    """A golden JobSet as an object."""
    found: Object = yaml.safe_load((MANIFEST_DIR / f"{name}.yaml").read_bytes())
    return found


def broken(row: Broken) -> Object:
    found = golden(row.golden)
    row.change(found)
    return found


def replicated(jobset: Object, index: int = 0) -> Object:
    found: Object = jobset["spec"]["replicatedJobs"][index]
    return found


def job(jobset: Object) -> Object:
    found: Object = replicated(jobset)["template"]["spec"]
    return found


def pod(jobset: Object) -> Object:
    found: Object = job(jobset)["template"]["spec"]
    return found


def container(jobset: Object) -> Object:
    found: Object = pod(jobset)["containers"][0]
    return found


def rules(jobset: Object) -> list[Object]:
    found: list[Object] = jobset["spec"]["failurePolicy"]["rules"]
    return found


def pod_rules(jobset: Object) -> list[Object]:
    found: list[Object] = job(jobset)["podFailurePolicy"]["rules"]
    return found


def env(jobset: Object, **entries: Any) -> Object:
    container(jobset)["env"] += [{"name": name, "value": value} for name, value in entries.items()]
    return jobset


def without_env(jobset: Object, prefix: str) -> None:
    entries = container(jobset)["env"]
    container(jobset)["env"] = [entry for entry in entries if not entry["name"].startswith(prefix)]


def chips(jobset: Object, requested: str, limit: str) -> None:
    container(jobset)["resources"] = {
        "requests": {"google.com/tpu": requested},
        "limits": {"google.com/tpu": limit},
    }


def pods(jobset: Object, number: int) -> None:
    job(jobset).update(parallelism=number, completions=number)


def secret(jobset: Object, name: str, key: str) -> None:
    entry = {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": name, "key": key}}}
    container(jobset)["env"].append(entry)


def in_order(jobset: Object) -> Object:
    jobset["spec"]["startupPolicy"] = {"startupPolicyOrder": "InOrder"}
    return jobset


def depends(jobset: Object, *names: str, status: str = "Ready", index: int = 1) -> None:
    replicated(jobset, index)["dependsOn"] = [{"name": name, "status": status} for name in names]


def copies(jobset: Object, *names: str) -> Object:
    """Further replicated Jobs like the first."""
    first = replicated(jobset)
    jobset["spec"]["replicatedJobs"] += [{**first, "name": name} for name in names]
    return jobset


def replace_name(jobset: Object, name: str) -> None:
    """Of the first replicated Job, which is the coordinator's."""
    replicated(jobset)["name"] = jobset["spec"]["coordinator"]["replicatedJob"] = name


def annotate(jobset: Object, **values: str) -> Object:
    annotations: Object = job(jobset)["template"]["metadata"].setdefault("annotations", {})
    annotations |= {f"{PODSET}-{name.replace('_', '-')}": text for name, text in values.items()}
    return annotations


def _refused(name: str, key: str, change: Change, golden: str = "spot-two-slices") -> Broken:
    return Broken(name=name, key=key, fate=Fate.REFUSED, change=change, golden=golden)


def _child(name: str, key: str, change: Change, golden: str = "spot-two-slices") -> Broken:
    return Broken(name=name, key=key, fate=Fate.CHILD, change=change, golden=golden)


def _late(name: str, key: str, change: Change, golden: str = "spot-two-slices") -> Broken:
    return Broken(name=name, key=key, fate=Fate.LATE, change=change, golden=golden)


def _kueue(name: str, key: str, change: Change) -> Broken:
    return Broken(name=name, key=key, fate=Fate.KUEUE, change=change, golden="kueue-topology")


_SPEC = "spec.failurePolicy"
_RULE = f"{_SPEC}.rules[0]"
_JOB = "spec.replicatedJobs[0].template.spec"
_POD = f"{_JOB}.template.spec"
_TRAINER = f"{_POD}.trainer"
_CODES = f"{_JOB}.podFailurePolicy.rules[1].onExitCodes"

JOBSET_ROWS = (
    _refused("kind", "kind", lambda js: js.update(kind="JobSets")),
    _refused("version", "kind", lambda js: js.update(apiVersion="jobset.x-k8s.io/v1")),
    _refused("name of capitals", "run.name", lambda js: js["metadata"].update(name="Llama")),
    _refused("name from a digit", "run.name", lambda js: js["metadata"].update(name="8b")),
    _refused("name of 41", "run.name", lambda js: js["metadata"].update(name="a" * 41)),
    _refused("namespace", "target.namespace", lambda js: js["metadata"].update(namespace="a.b")),
    _refused("label key", "target.labels.-a", lambda js: js["metadata"]["labels"].update({"-a": "b"})),
    _refused("label value", "target.labels.a", lambda js: js["metadata"]["labels"].update(a="b c")),
    _refused("label of 64", "target.labels.a", lambda js: js["metadata"]["labels"].update(a="b" * 64)),
    _refused("label that is a number", "target.labels.a", lambda js: js["metadata"]["labels"].update(a=1)),
    _refused(
        "queue",
        "target.queue",
        lambda js: js["metadata"]["labels"].update({"kueue.x-k8s.io/queue-name": "a b"}),
    ),
    _refused(
        "annotation key",
        "metadata.annotations.a b",
        lambda js: js["metadata"]["annotations"].update({"a b": ""}),
    ),
    _refused(
        "annotations of 256 KiB",
        "metadata.annotations",
        lambda js: js["metadata"]["annotations"].update(a="x" * 2**18),
    ),
    _refused(
        "subdomain of 64",
        "spec.network.subdomain",
        lambda js: js["spec"]["network"].update(subdomain="a" * 64),
    ),
    _refused(
        "subdomain from a digit",
        "spec.network.subdomain",
        lambda js: js["spec"]["network"].update(subdomain="1a"),
    ),
    _late(
        "no host names",
        "spec.network.enableDNSHostnames",
        lambda js: js["spec"]["network"].update(enableDNSHostnames=False),
    ),
    _late(
        "names once ready",
        "spec.network.publishNotReadyAddresses",
        lambda js: js["spec"]["network"].update(publishNotReadyAddresses=False),
    ),
    _refused("ttl below 0", "target.ttl_s", lambda js: js["spec"].update(ttlSecondsAfterFinished=-1)),
    _refused("ttl of 64 bits", "target.ttl_s", lambda js: js["spec"].update(ttlSecondsAfterFinished=INT32)),
    _refused("no Jobs", "spec.replicatedJobs", lambda js: js["spec"].pop("replicatedJobs")),
    _refused("Jobs of one name", "spec.replicatedJobs", lambda js: copies(js, "slice")),
    _refused("no slices", "multislice.num_slices", lambda js: replicated(js).update(replicas=0)),
    _refused("2**31 pods", "multislice.num_slices", lambda js: replicated(js).update(replicas=2**25)),
    _refused(
        "name of a Job",
        "run.name",
        lambda js: replace_name(js, "slice-of-a-very-large-machine" * 2),
    ),
    _refused(
        "coordinator's Job",
        "spec.coordinator",
        lambda js: js["spec"]["coordinator"].update(replicatedJob="head"),
    ),
    _refused(
        "coordinator's index", "spec.coordinator", lambda js: js["spec"]["coordinator"].update(jobIndex=2)
    ),
    _refused(
        "coordinator's pod", "spec.coordinator", lambda js: js["spec"]["coordinator"].update(podIndex=64)
    ),
    _refused(
        "coordinator's label without a short subdomain",
        "run.name",
        lambda js: (js["metadata"].update(name="a" * 27), js["spec"]["network"].pop("subdomain")),
    ),
    _refused(
        "the first depends", "spec.replicatedJobs[0].dependsOn", lambda js: depends(js, "slice", index=0)
    ),
    _late(
        "depends on itself",
        "spec.replicatedJobs[1].dependsOn",
        lambda js: depends(js, "worker"),
        "pathways",
    ),
    _refused(
        "depends on a later one",
        "spec.replicatedJobs[1].dependsOn",
        lambda js: depends(copies(js, "after"), "after"),
        "pathways",
    ),
    _refused(
        "depends until what",
        "spec.replicatedJobs[1].dependsOn",
        lambda js: depends(js, "head", status="Running"),
        "pathways",
    ),
    _refused(
        "depends on six",
        "spec.replicatedJobs[6].dependsOn",
        lambda js: depends(copies(js, *"bcdefg"), "slice", *"bcdef", index=6),
    ),
    _refused(
        "depends in order",
        "spec.replicatedJobs[1].dependsOn",
        lambda js: depends(in_order(js), "head"),
        "pathways",
    ),
    _refused(
        "success of what",
        "spec.successPolicy",
        lambda js: js["spec"]["successPolicy"].update(targetReplicatedJobs=["slice"]),
        "pathways",
    ),
    _refused(
        "success how",
        "spec.successPolicy",
        lambda js: js["spec"]["successPolicy"].update(operator="Some"),
        "pathways",
    ),
    _late(
        "restarts below 0", "run.max_restarts", lambda js: js["spec"]["failurePolicy"].update(maxRestarts=-1)
    ),
    _refused(
        "restarts of 64 bits",
        "run.max_restarts",
        lambda js: js["spec"]["failurePolicy"].update(maxRestarts=INT32),
    ),
    _refused(
        "restart strategy",
        f"{_SPEC}.restartStrategy",
        lambda js: js["spec"]["failurePolicy"].update(restartStrategy="InPlaceRestart"),
    ),
    _refused("rules of one name", f"{_SPEC}.rules", lambda js: rules(js)[1].update(name="preempted")),
    _refused("rule's name", f"{_RULE}.name", lambda js: rules(js)[0].update(name="user-error")),
    _refused("rule's name of 129", f"{_RULE}.name", lambda js: rules(js)[0].update(name="a" * 129)),
    _refused("rule's action", f"{_RULE}.action", lambda js: rules(js)[0].update(action="RecreateJob")),
    _refused(
        "rule's reason",
        f"{_RULE}.onJobFailureReasons",
        lambda js: rules(js)[0].update(onJobFailureReasons=["Evicted"]),
    ),
    _refused(
        "rule's Jobs",
        f"{_RULE}.targetReplicatedJobs",
        lambda js: rules(js)[0].update(targetReplicatedJobs=["head"]),
    ),
    _late(
        "pattern of Perl",
        f"{_RULE}.onJobFailureMessagePatterns",
        lambda js: rules(js)[0].update(onJobFailureMessagePatterns=["code (?!1)"]),
    ),
    _late(
        "pattern without an end",
        f"{_RULE}.onJobFailureMessagePatterns",
        lambda js: rules(js)[0].update(onJobFailureMessagePatterns=["code (1|2"]),
    ),
    _refused(
        "3 MiB",
        "target.env",
        lambda js: env(js, **{f"V{number}": "x" * 100_000 for number in range(32)}),
    ),
)

JOB_ROWS = (
    _refused(
        "no index", f"{_JOB}.completionMode", lambda js: job(js).update(completionMode="NonIndexed"), "cpu"
    ),
    _late("half at a time", f"{_JOB}.parallelism", lambda js: job(js).update(parallelism=32)),
    _child("100 001 pods", "hardware.topology", lambda js: pods(js, 100_001), "cpu"),
    _child("backoff below 0", f"{_JOB}.backoffLimit", lambda js: job(js).update(backoffLimit=-1)),
    _child("no restart policy", f"{_POD}.restartPolicy", lambda js: pod(js).pop("restartPolicy")),
    _child("restart policy", f"{_POD}.restartPolicy", lambda js: pod(js).update(restartPolicy="OnFailure")),
    _child(
        "replacement",
        f"{_JOB}.podFailurePolicy.podReplacementPolicy",
        lambda js: job(js).update(podReplacementPolicy="TerminatingOrFailed"),
    ),
    _child(
        "21 pod rules", f"{_JOB}.podFailurePolicy", lambda js: pod_rules(js).extend([pod_rules(js)[0]] * 18)
    ),
    _child(
        "pod rule's action",
        f"{_JOB}.podFailurePolicy.rules[0].action",
        lambda js: pod_rules(js)[0].update(action="FailIndex"),
    ),
    _child(
        "pod rule on nothing",
        f"{_JOB}.podFailurePolicy.rules[0]",
        lambda js: pod_rules(js)[0].pop("onPodConditions"),
    ),
    _child(
        "pod rule on both",
        f"{_JOB}.podFailurePolicy.rules[0]",
        lambda js: pod_rules(js)[0].update(onExitCodes=pod_rules(js)[1]["onExitCodes"]),
    ),
    _child(
        "21 conditions",
        f"{_JOB}.podFailurePolicy.rules[0]",
        lambda js: pod_rules(js)[0]["onPodConditions"].extend([{"type": "Ready", "status": "True"}] * 20),
    ),
    _child(
        "condition's type",
        f"{_JOB}.podFailurePolicy.rules[0].onPodConditions",
        lambda js: pod_rules(js)[0]["onPodConditions"][0].update(type="Disruption Target"),
    ),
    _child(
        "condition's status",
        f"{_JOB}.podFailurePolicy.rules[0].onPodConditions",
        lambda js: pod_rules(js)[0]["onPodConditions"][0].update(status="true"),
    ),
    _child(
        "codes descend", f"{_CODES}.values", lambda js: pod_rules(js)[1]["onExitCodes"].update(values=[2, 1])
    ),
    _refused(
        "codes repeat", f"{_CODES}.values", lambda js: pod_rules(js)[1]["onExitCodes"].update(values=[1, 1])
    ),
    _child("code 0", f"{_CODES}.values", lambda js: pod_rules(js)[1]["onExitCodes"].update(values=[0, 1])),
    _child("no codes", f"{_CODES}.values", lambda js: pod_rules(js)[1]["onExitCodes"].update(values=[])),
    _child(
        "256 codes",
        f"{_CODES}.values",
        lambda js: pod_rules(js)[1]["onExitCodes"].update(values=list(range(1, 257))),
    ),
    _late("code 256", f"{_CODES}.values", lambda js: pod_rules(js)[1]["onExitCodes"].update(values=[256])),
    _child(
        "codes how", f"{_CODES}.operator", lambda js: pod_rules(js)[1]["onExitCodes"].update(operator="Is")
    ),
    _child(
        "codes of what",
        f"{_CODES}.containerName",
        lambda js: pod_rules(js)[1]["onExitCodes"].update(containerName="main"),
    ),
    _late("chips without a selector", "hardware.topology", lambda js: pod(js).pop("nodeSelector")),
    _late("selector without chips", "hardware.topology", lambda js: container(js).pop("resources")),
    _late(
        "another generation's topology",
        "hardware.topology",
        lambda js: pod(js)["nodeSelector"].update({"cloud.google.com/gke-tpu-topology": "4x4x4"}),
    ),
    _late(
        "unknown accelerator",
        "hardware.topology",
        lambda js: pod(js)["nodeSelector"].update({"cloud.google.com/gke-tpu-accelerator": "tpu-v5e-slice"}),
    ),
    _late("8 chips of 4", "hardware.chips_per_host", lambda js: chips(js, "8", "8")),
    _late("half the hosts", "hardware.topology", lambda js: pods(js, 32)),
    _late("slices that never meet", "spec.replicatedJobs[0]", lambda js: without_env(js, "MEGASCALE_")),
    _late(
        "one slice waits for two",
        "target.env",
        lambda js: env(js, MEGASCALE_NUM_SLICES="2"),
        "spot-one-slice",
    ),
    _late("CPUs wait for slices", "target.env", lambda js: env(js, MEGASCALE_NUM_SLICES="2"), "cpu"),
    _late("no toleration of TPUs", f"{_POD}.tolerations", lambda js: pod(js)["tolerations"].pop(0)),
    _late("no toleration of Spot", f"{_POD}.tolerations", lambda js: pod(js)["tolerations"].pop(1)),
    _kueue(
        "two topology requests",
        "spec.replicatedJobs[0].annotations",
        lambda js: annotate(js, required_topology="a", preferred_topology="b"),
    ),
    _kueue(
        "a slice without a size",
        "spec.replicatedJobs[0].annotations",
        lambda js: annotate(js).pop(f"{PODSET}-slice-size"),
    ),
    _kueue(
        "a size too large",
        "spec.replicatedJobs[0].annotations",
        lambda js: annotate(js, slice_size="257"),
    ),
)

POD_ROWS = (
    _child(
        "no container",
        f"{_POD}.containers",
        lambda js: (pod(js).update(containers=[]), job(js).pop("podFailurePolicy")),
    ),
    _child("restart always", f"{_POD}.restartPolicy", lambda js: pod(js).update(restartPolicy="Always")),
    _late(
        "grace below 0", "target.grace_period_s", lambda js: pod(js).update(terminationGracePeriodSeconds=-1)
    ),
    _child(
        "service account", "target.service_account", lambda js: pod(js).update(serviceAccountName="Trainer")
    ),
    _late(
        "names on the node's network",
        f"{_POD}.dnsPolicy",
        lambda js: pod(js).pop("dnsPolicy"),
        "every-option",
    ),
    _child(
        "pod's label", "target.labels.a", lambda js: job(js)["template"]["metadata"]["labels"].update(a="b c")
    ),
    _child(
        "selector's key", "target.node_selector.a b", lambda js: pod(js)["nodeSelector"].update({"a b": "c"})
    ),
    _child("selector's value", "target.node_selector.a", lambda js: pod(js)["nodeSelector"].update(a="b/c")),
    _child(
        "reservation",
        "target.reservation",
        lambda js: pod(js)["nodeSelector"].update({"cloud.google.com/reservation-name": "projects/p/r"}),
    ),
    _late(
        "toleration of everything",
        f"{_POD}.tolerations[2]",
        lambda js: pod(js)["tolerations"].append({"operator": "Exists"}),
    ),
    _child(
        "toleration's key",
        f"{_POD}.tolerations[2]",
        lambda js: pod(js)["tolerations"].append({"key": "a b", "operator": "Exists"}),
    ),
    _child(
        "toleration how",
        f"{_POD}.tolerations[2]",
        lambda js: pod(js)["tolerations"].append({"key": "a", "operator": "In"}),
    ),
    _child(
        "toleration of a value",
        f"{_POD}.tolerations[2]",
        lambda js: pod(js)["tolerations"].append({"key": "a", "operator": "Exists", "value": "b"}),
    ),
    _child(
        "toleration's value",
        f"{_POD}.tolerations[2]",
        lambda js: pod(js)["tolerations"].append({"key": "a", "operator": "Equal", "value": "b c"}),
    ),
    _child(
        "toleration's effect",
        f"{_POD}.tolerations[2]",
        lambda js: pod(js)["tolerations"].append({"key": "a", "operator": "Exists", "effect": "Never"}),
    ),
    _child(
        "volume's name",
        f"{_POD}.volumes",
        lambda js: pod(js)["volumes"].append({"name": "A", "emptyDir": {}}),
    ),
    _refused(
        "volumes of one name",
        f"{_POD}.volumes",
        lambda js: pod(js)["volumes"].append({"name": "muster", "emptyDir": {}}),
    ),
    _child("mount of nothing", f"{_POD}.volumes", lambda js: pod(js)["volumes"].pop(0)),
    _refused(
        "mounted twice",
        f"{_POD}.volumes",
        lambda js: container(js)["volumeMounts"].append({"name": "muster", "mountPath": "/dev/shm"}),
    ),
    _refused(
        "containers of one name", f"{_POD}.containers", lambda js: pod(js)["containers"].append(container(js))
    ),
    _child(
        "container's name",
        f"{_POD}.Trainer.name",
        lambda js: (container(js).update(name="Trainer"), job(js).pop("podFailurePolicy")),
    ),
    _child("no image", "target.image", lambda js: container(js).update(image="")),
    _late("image by tag", "target.image", lambda js: container(js).update(image="repo/trainer:latest")),
    _child(
        "no server image",
        "target.pathways_server_image",
        lambda js: replicated(js, 1)["template"]["spec"]["template"]["spec"]["containers"][0].update(
            image=""
        ),
        "pathways",
    ),
    _child("port 0", f"{_TRAINER}.ports", lambda js: container(js)["ports"][0].update(containerPort=0)),
    _child(
        "port 65536", f"{_TRAINER}.ports", lambda js: container(js)["ports"][0].update(containerPort=65536)
    ),
    _child(
        "port's name",
        f"{_TRAINER}.ports",
        lambda js: container(js)["ports"][0].update(name="coordinator-port"),
    ),
    _child(
        "ports of one name", f"{_TRAINER}.ports", lambda js: container(js)["ports"][0].update(name="gang")
    ),
    _refused(
        "one port twice", f"{_TRAINER}.ports", lambda js: container(js)["ports"][0].update(containerPort=8483)
    ),
    _child(
        "requests above the limit", f"{_TRAINER}.resources.google.com/tpu", lambda js: chips(js, "4", "1")
    ),
    _child("half a chip", f"{_TRAINER}.resources.google.com/tpu", lambda js: chips(js, "500m", "500m")),
    _child("chips below 0", f"{_TRAINER}.resources.google.com/tpu", lambda js: chips(js, "-4", "-4")),
    _refused("chips in words", f"{_TRAINER}.resources.google.com/tpu", lambda js: chips(js, "four", "four")),
    _child(
        "privilege without escalation",
        "target.privileged",
        lambda js: container(js)["securityContext"].update(privileged=True),
    ),
    _child("variable's name", "target.env.A=B", lambda js: env(js, **{"A=B": "c"})),
    _child("no variable's name", "target.env.", lambda js: env(js, **{"": "c"})),
    _refused("variable twice", "target.env.A", lambda js: env(env(js, A="b"), A="c")),
    _refused("variable of ours", f"{_TRAINER}.env", lambda js: env(js, MUSTER_RUN_DIR="gs://other/run")),
    _refused("variable that is a number", "target.env.A", lambda js: env(js, A=1)),
    _late("variable with NUL", "target.env.A", lambda js: env(js, A="a\0b")),
    _late("variable of 128 KiB", "target.env.A", lambda js: env(js, A="x" * 2**17)),
    _late("variable of what", "target.env.A", lambda js: env(js, A="$(B)", B="b")),
    _late("command of what", f"{_TRAINER}.args", lambda js: container(js)["command"].append("$(NOWHERE)")),
    _child(
        "value and source",
        "target.env.A",
        lambda js: container(js)["env"].append(
            {"name": "A", "value": "b", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}
        ),
    ),
    _child("secret's name", "target.secrets.TOKEN", lambda js: secret(js, "Wandb_", "key")),
    _child("secret's key", "target.secrets.TOKEN", lambda js: secret(js, "wandb", "a/b")),
    _child("no secret's key", "target.secrets.TOKEN", lambda js: secret(js, "wandb", "")),
)

ROWS = (*JOBSET_ROWS, *JOB_ROWS, *POD_ROWS)
