"""Every way to break a JobSet: each row is a rule of `launcher/gke/validate*.py`.

The rows are run twice: against the rules (tests/unit/test_gke_validate.py) and against the API server that
they mirror (tests/cluster/test_manifest_accepted.py). Those of pods are in `manifest_rows_pod.py`.
"""

from __future__ import annotations

from launcher.gke.jobs import PODSET
from tests.unit.manifest_rows_pod import POD_ROWS
from tests.unit.manifest_support import (
    INT32,
    annotate,
    child,
    chips,
    container,
    copies,
    depends,
    env,
    in_order,
    job,
    kueue,
    late,
    pod,
    pod_rules,
    pods,
    refused,
    replace_name,
    replicated,
    rules,
    without_env,
)

_SPEC = "spec.failurePolicy"
_RULE = f"{_SPEC}.rules[0]"
_JOB = "spec.replicatedJobs[0].template.spec"
_POD = f"{_JOB}.template.spec"
_CODES = f"{_JOB}.podFailurePolicy.rules[1].onExitCodes"

JOBSET_ROWS = (
    refused("kind", "kind", lambda js: js.update(kind="JobSets")),
    refused("version", "kind", lambda js: js.update(apiVersion="jobset.x-k8s.io/v1")),
    refused("name of capitals", "run.name", lambda js: js["metadata"].update(name="Llama")),
    refused("name from a digit", "run.name", lambda js: js["metadata"].update(name="8b")),
    refused("name of 41", "run.name", lambda js: js["metadata"].update(name="a" * 41)),
    refused("namespace", "target.namespace", lambda js: js["metadata"].update(namespace="a.b")),
    refused("label key", "target.labels.-a", lambda js: js["metadata"]["labels"].update({"-a": "b"})),
    refused("label value", "target.labels.a", lambda js: js["metadata"]["labels"].update(a="b c")),
    refused("label of 64", "target.labels.a", lambda js: js["metadata"]["labels"].update(a="b" * 64)),
    refused("label that is a number", "target.labels.a", lambda js: js["metadata"]["labels"].update(a=1)),
    refused(
        "queue",
        "target.queue",
        lambda js: js["metadata"]["labels"].update({"kueue.x-k8s.io/queue-name": "a b"}),
    ),
    refused(
        "annotation key",
        "metadata.annotations.a b",
        lambda js: js["metadata"]["annotations"].update({"a b": ""}),
    ),
    refused(
        "annotations of 256 KiB",
        "metadata.annotations",
        lambda js: js["metadata"]["annotations"].update(a="x" * 2**18),
    ),
    refused(
        "subdomain of 64",
        "spec.network.subdomain",
        lambda js: js["spec"]["network"].update(subdomain="a" * 64),
    ),
    refused(
        "subdomain from a digit",
        "spec.network.subdomain",
        lambda js: js["spec"]["network"].update(subdomain="1a"),
    ),
    late(
        "no host names",
        "spec.network.enableDNSHostnames",
        lambda js: js["spec"]["network"].update(enableDNSHostnames=False),
    ),
    late(
        "names once ready",
        "spec.network.publishNotReadyAddresses",
        lambda js: js["spec"]["network"].update(publishNotReadyAddresses=False),
    ),
    refused("ttl below 0", "target.ttl_s", lambda js: js["spec"].update(ttlSecondsAfterFinished=-1)),
    refused("ttl of 64 bits", "target.ttl_s", lambda js: js["spec"].update(ttlSecondsAfterFinished=INT32)),
    refused("no Jobs", "spec.replicatedJobs", lambda js: js["spec"].pop("replicatedJobs")),
    refused("Jobs of one name", "spec.replicatedJobs", lambda js: copies(js, "slice")),
    refused("no slices", "multislice.num_slices", lambda js: replicated(js).update(replicas=0)),
    refused("2**31 pods", "multislice.num_slices", lambda js: replicated(js).update(replicas=2**25)),
    refused(
        "name of a Job",
        "run.name",
        lambda js: replace_name(js, "slice-of-a-very-large-machine" * 2),
    ),
    refused(
        "coordinator's Job",
        "spec.coordinator",
        lambda js: js["spec"]["coordinator"].update(replicatedJob="head"),
    ),
    refused(
        "coordinator's index", "spec.coordinator", lambda js: js["spec"]["coordinator"].update(jobIndex=2)
    ),
    refused(
        "coordinator's pod", "spec.coordinator", lambda js: js["spec"]["coordinator"].update(podIndex=64)
    ),
    refused(
        "coordinator's label without a short subdomain",
        "run.name",
        lambda js: (js["metadata"].update(name="a" * 27), js["spec"]["network"].pop("subdomain")),
    ),
    refused(
        "the first depends", "spec.replicatedJobs[0].dependsOn", lambda js: depends(js, "slice", index=0)
    ),
    late(
        "depends on itself",
        "spec.replicatedJobs[1].dependsOn",
        lambda js: depends(js, "worker"),
        "pathways",
    ),
    refused(
        "depends on a later one",
        "spec.replicatedJobs[1].dependsOn",
        lambda js: depends(copies(js, "after"), "after"),
        "pathways",
    ),
    refused(
        "depends until what",
        "spec.replicatedJobs[1].dependsOn",
        lambda js: depends(js, "head", status="Running"),
        "pathways",
    ),
    refused(
        "depends on six",
        "spec.replicatedJobs[6].dependsOn",
        lambda js: depends(copies(js, *"bcdefg"), "slice", *"bcdef", index=6),
    ),
    refused(
        "depends in order",
        "spec.replicatedJobs[1].dependsOn",
        lambda js: depends(in_order(js), "head"),
        "pathways",
    ),
    refused(
        "success of what",
        "spec.successPolicy",
        lambda js: js["spec"]["successPolicy"].update(targetReplicatedJobs=["slice"]),
        "pathways",
    ),
    refused(
        "success how",
        "spec.successPolicy",
        lambda js: js["spec"]["successPolicy"].update(operator="Some"),
        "pathways",
    ),
    late(
        "restarts below 0", "run.max_restarts", lambda js: js["spec"]["failurePolicy"].update(maxRestarts=-1)
    ),
    refused(
        "restarts of 64 bits",
        "run.max_restarts",
        lambda js: js["spec"]["failurePolicy"].update(maxRestarts=INT32),
    ),
    refused(
        "restart strategy",
        f"{_SPEC}.restartStrategy",
        lambda js: js["spec"]["failurePolicy"].update(restartStrategy="InPlaceRestart"),
    ),
    refused("rules of one name", f"{_SPEC}.rules", lambda js: rules(js)[1].update(name="preempted")),
    refused("rule's name", f"{_RULE}.name", lambda js: rules(js)[0].update(name="user-error")),
    refused("rule's name of 129", f"{_RULE}.name", lambda js: rules(js)[0].update(name="a" * 129)),
    refused("rule's action", f"{_RULE}.action", lambda js: rules(js)[0].update(action="RecreateJob")),
    refused(
        "rule's reason",
        f"{_RULE}.onJobFailureReasons",
        lambda js: rules(js)[0].update(onJobFailureReasons=["Evicted"]),
    ),
    refused(
        "rule's Jobs",
        f"{_RULE}.targetReplicatedJobs",
        lambda js: rules(js)[0].update(targetReplicatedJobs=["head"]),
    ),
    late(
        "pattern of Perl",
        f"{_RULE}.onJobFailureMessagePatterns",
        lambda js: rules(js)[0].update(onJobFailureMessagePatterns=["code (?!1)"]),
    ),
    late(
        "pattern without an end",
        f"{_RULE}.onJobFailureMessagePatterns",
        lambda js: rules(js)[0].update(onJobFailureMessagePatterns=["code (1|2"]),
    ),
    refused(
        "3 MiB",
        "target.env",
        lambda js: env(js, **{f"V{number}": "x" * 100_000 for number in range(32)}),
    ),
)

JOB_ROWS = (
    refused(
        "no index", f"{_JOB}.completionMode", lambda js: job(js).update(completionMode="NonIndexed"), "cpu"
    ),
    late("half at a time", f"{_JOB}.parallelism", lambda js: job(js).update(parallelism=32)),
    child("100 001 pods", "hardware.topology", lambda js: pods(js, 100_001), "cpu"),
    child("backoff below 0", f"{_JOB}.backoffLimit", lambda js: job(js).update(backoffLimit=-1)),
    child("no restart policy", f"{_POD}.restartPolicy", lambda js: pod(js).pop("restartPolicy")),
    child("restart policy", f"{_POD}.restartPolicy", lambda js: pod(js).update(restartPolicy="OnFailure")),
    child(
        "replacement",
        f"{_JOB}.podFailurePolicy.podReplacementPolicy",
        lambda js: job(js).update(podReplacementPolicy="TerminatingOrFailed"),
    ),
    child(
        "21 pod rules", f"{_JOB}.podFailurePolicy", lambda js: pod_rules(js).extend([pod_rules(js)[0]] * 18)
    ),
    child(
        "pod rule's action",
        f"{_JOB}.podFailurePolicy.rules[0].action",
        lambda js: pod_rules(js)[0].update(action="FailIndex"),
    ),
    child(
        "pod rule on nothing",
        f"{_JOB}.podFailurePolicy.rules[0]",
        lambda js: pod_rules(js)[0].pop("onPodConditions"),
    ),
    child(
        "pod rule on both",
        f"{_JOB}.podFailurePolicy.rules[0]",
        lambda js: pod_rules(js)[0].update(onExitCodes=pod_rules(js)[1]["onExitCodes"]),
    ),
    child(
        "21 conditions",
        f"{_JOB}.podFailurePolicy.rules[0]",
        lambda js: pod_rules(js)[0]["onPodConditions"].extend([{"type": "Ready", "status": "True"}] * 20),
    ),
    child(
        "condition's type",
        f"{_JOB}.podFailurePolicy.rules[0].onPodConditions",
        lambda js: pod_rules(js)[0]["onPodConditions"][0].update(type="Disruption Target"),
    ),
    child(
        "condition's status",
        f"{_JOB}.podFailurePolicy.rules[0].onPodConditions",
        lambda js: pod_rules(js)[0]["onPodConditions"][0].update(status="true"),
    ),
    child(
        "codes descend", f"{_CODES}.values", lambda js: pod_rules(js)[1]["onExitCodes"].update(values=[2, 1])
    ),
    refused(
        "codes repeat", f"{_CODES}.values", lambda js: pod_rules(js)[1]["onExitCodes"].update(values=[1, 1])
    ),
    child("code 0", f"{_CODES}.values", lambda js: pod_rules(js)[1]["onExitCodes"].update(values=[0, 1])),
    child("no codes", f"{_CODES}.values", lambda js: pod_rules(js)[1]["onExitCodes"].update(values=[])),
    child(
        "256 codes",
        f"{_CODES}.values",
        lambda js: pod_rules(js)[1]["onExitCodes"].update(values=list(range(1, 257))),
    ),
    late("code 256", f"{_CODES}.values", lambda js: pod_rules(js)[1]["onExitCodes"].update(values=[256])),
    child(
        "codes how", f"{_CODES}.operator", lambda js: pod_rules(js)[1]["onExitCodes"].update(operator="Is")
    ),
    child(
        "codes of what",
        f"{_CODES}.containerName",
        lambda js: pod_rules(js)[1]["onExitCodes"].update(containerName="main"),
    ),
    late("chips without a selector", "hardware.topology", lambda js: pod(js).pop("nodeSelector")),
    late("selector without chips", "hardware.topology", lambda js: container(js).pop("resources")),
    late(
        "another generation's topology",
        "hardware.topology",
        lambda js: pod(js)["nodeSelector"].update({"cloud.google.com/gke-tpu-topology": "4x4x4"}),
    ),
    late(
        "unknown accelerator",
        "hardware.topology",
        lambda js: pod(js)["nodeSelector"].update({"cloud.google.com/gke-tpu-accelerator": "tpu-v5e-slice"}),
    ),
    late("8 chips of 4", "hardware.chips_per_host", lambda js: chips(js, "8", "8")),
    late("half the hosts", "hardware.topology", lambda js: pods(js, 32)),
    late("slices that never meet", "spec.replicatedJobs[0]", lambda js: without_env(js, "MEGASCALE_")),
    late(
        "one slice waits for two",
        "target.env",
        lambda js: env(js, MEGASCALE_NUM_SLICES="2"),
        "spot-one-slice",
    ),
    late("CPUs wait for slices", "target.env", lambda js: env(js, MEGASCALE_NUM_SLICES="2"), "cpu"),
    late("no toleration of TPUs", f"{_POD}.tolerations", lambda js: pod(js)["tolerations"].pop(0)),
    late("no toleration of Spot", f"{_POD}.tolerations", lambda js: pod(js)["tolerations"].pop(1)),
    kueue(
        "two topology requests",
        "spec.replicatedJobs[0].annotations",
        lambda js: annotate(js, required_topology="a", preferred_topology="b"),
    ),
    kueue(
        "a slice without a size",
        "spec.replicatedJobs[0].annotations",
        lambda js: annotate(js).pop(f"{PODSET}-slice-size"),
    ),
    kueue(
        "a size too large",
        "spec.replicatedJobs[0].annotations",
        lambda js: annotate(js, slice_size="257"),
    ),
)

ROWS = (*JOBSET_ROWS, *JOB_ROWS, *POD_ROWS)
