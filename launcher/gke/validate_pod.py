"""Rules of the pods of a JobSet, which JobSet itself does not check.

k8s.io/kubernetes v1.34.3 pkg/apis/core/validation/validation.go; and what is accepted, but then no process
can be started with, or would see other values than the recipe's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from launcher.gke import names, syntax
from launcher.gke.podspec import TPU
from launcher.gke.validating import Found, JobShape, finding, listed, mapped, whole
from recipes.kubernetes_names import RESERVATION

_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")
_MAX_PORT = 65535
_IMAGES = {names.CONTAINER: "target.image", "pathways-proxy": "target.pathways_proxy_image"}
"""Recipe keys by container; all others run Pathways' server."""


def pod_problems(job: JobShape) -> Found:
    """Everything that is wrong with the pods of one Job, except whether their hardware exists."""
    for rule in (_pod, _node_selector, _tolerations, _volumes):
        yield from rule(job)
    for container in job.containers:
        yield from _container(container, f"{job.pod_path}.{container.get('name')}")
    for name in _repeated([str(container.get("name", "")) for container in job.containers]):
        yield finding(f"{job.pod_path}.containers", name, "is there twice", "give each its own name")


def _pod(job: JobShape) -> Found:
    pod, key = job.pod, job.pod_path
    if not listed(pod.get("containers")):
        yield finding(f"{key}.containers", None, "is empty", "add a container")
    if pod.get("restartPolicy", "OnFailure") not in ("Never", "OnFailure"):
        yield finding(f"{key}.restartPolicy", pod["restartPolicy"], "is not for Jobs", "use Never")
    grace = pod.get("terminationGracePeriodSeconds", 30)
    if whole(grace, -1) < 0:
        yield finding("target.grace_period_s", grace, "is not whole seconds from 0 on", "give seconds")
    account = pod.get("serviceAccountName")
    if account is not None and (reason := syntax.dns1123_subdomain(str(account))):
        yield finding("target.service_account", account, reason, "give the name of a service account")
    if pod.get("hostNetwork") and pod.get("dnsPolicy") != "ClusterFirstWithHostNet":
        reason = "does not resolve the names of pods on the node's network: hosts would never meet"
        yield finding(f"{key}.dnsPolicy", pod.get("dnsPolicy"), reason, "use ClusterFirstWithHostNet")


def _node_selector(job: JobShape) -> Found:
    for key, value in mapped(job.pod.get("nodeSelector")).items():
        where = "target.reservation" if key == RESERVATION else f"target.node_selector.{key}"
        if reason := syntax.qualified_name(key):
            yield finding(where, key, reason, "use the key of a node's label")
        if not isinstance(value, str):
            yield finding(where, value, "is no text", "write it in quotes")
        elif reason := syntax.label_value(value):
            yield finding(where, value, f"{reason}: no node can have it", "use the value of a node's label")


def _tolerations(job: JobShape) -> Found:
    for index, entry in enumerate(map(mapped, listed(job.pod.get("tolerations")))):
        key, taint = f"{job.pod_path}.tolerations[{index}]", str(entry.get("key", ""))
        operator, value = entry.get("operator", "Equal"), str(entry.get("value", ""))
        if not taint:
            reason = "has no key: it would run on nodes that are about to be terminated"
            yield finding(key, None, reason, "name the taint")
        elif reason := syntax.qualified_name(taint):
            yield finding(key, taint, reason, "use the key of a taint")
        if operator not in ("Equal", "Exists"):
            yield finding(key, operator, "is no operator", "use Equal or Exists")
        if operator == "Exists" and value:
            yield finding(key, value, "is a value with the operator Exists", "leave it out")
        elif reason := syntax.label_value(value):
            yield finding(key, value, reason, "use the value of a taint")
        if entry.get("effect", "NoSchedule") not in _EFFECTS:
            yield finding(key, entry["effect"], "is no effect", f"use {', '.join(_EFFECTS)}")


def _volumes(job: JobShape) -> Found:
    key = f"{job.pod_path}.volumes"
    known = [str(mapped(volume).get("name", "")) for volume in listed(job.pod.get("volumes"))]
    for name in known:
        if reason := syntax.dns1123_label(name):
            yield finding(key, name, reason, "use a-z, 0-9 and hyphens")
    for name in _repeated(known):
        yield finding(key, name, "is there twice", "give each its own name")
    for container in job.containers:
        mounts = [mapped(mount) for mount in listed(container.get("volumeMounts"))]
        for mount in mounts:
            if mount.get("name") not in known:
                yield finding(key, mount.get("name"), "is mounted, but no volume of the pod", "add it")
        for path in _repeated([str(mount.get("mountPath", "")) for mount in mounts]):
            yield finding(key, path, "is mounted twice", "mount one volume there")


def _container(container: Mapping[str, Any], key: str) -> Found:
    name, image = str(container.get("name", "")), str(container.get("image", ""))
    if reason := syntax.dns1123_label(name):
        yield finding(f"{key}.name", name, reason, "use a-z, 0-9 and hyphens")
    if reason := syntax.image(image):
        where = _IMAGES.get(name, "target.pathways_server_image")
        yield finding(where, image or None, reason, "give REPOSITORY@sha256:DIGEST (docs/image.md)")
    yield from _ports(listed(container.get("ports")), key)
    yield from _resources(mapped(container.get("resources")), key)
    yield from _security(container)
    yield from _environment(listed(container.get("env")), key)
    defined = [str(mapped(entry).get("name", "")) for entry in listed(container.get("env"))]
    for word in (*listed(container.get("command")), *listed(container.get("args"))):
        for wanted in syntax.references(str(word)):
            if wanted not in defined:
                yield finding(f"{key}.args", word, f"$({wanted}) is no variable of the container", "use $$")


def _ports(ports: Sequence[Any], key: str) -> Found:
    entries = [mapped(entry) for entry in ports]
    for entry in entries:
        number, name = entry.get("containerPort"), str(entry.get("name", ""))
        if not 1 <= whole(number, 0) <= _MAX_PORT:
            yield finding(f"{key}.ports", number, f"is not from 1 to {_MAX_PORT}", "give a port")
        if name and (reason := syntax.port_name(name)):
            yield finding(f"{key}.ports", name, reason, "use a short name")
    for name in _repeated([str(entry["name"]) for entry in entries if "name" in entry]):
        yield finding(f"{key}.ports", name, "is there twice", "give each port its own name")
    for number in _repeated([str(entry.get("containerPort")) for entry in entries]):
        yield finding(f"{key}.ports", number, "is there twice", "give each port once")


def _resources(resources: Mapping[str, Any], key: str) -> Found:
    requests, limits = mapped(resources.get("requests")), mapped(resources.get("limits"))
    for name, value in (*requests.items(), *limits.items()):
        amount = syntax.quantity(value)
        if amount is None or amount < 0 or (name == TPU and (amount <= 0 or amount != int(amount))):
            yield finding(f"{key}.resources.{name}", value, "is not an amount above 0", "give a whole number")
    for name, value in requests.items():
        if name == TPU and limits.get(name) != value:
            reason = f"is not the limit {limits.get(name)}, and chips cannot be overcommitted"
            yield finding(f"{key}.resources.{name}", value, reason, "request as many as the limit")


def _security(container: Mapping[str, Any]) -> Found:
    context = mapped(container.get("securityContext"))
    if context.get("privileged") is True and context.get("allowPrivilegeEscalation") is False:
        reason = "excludes allowPrivilegeEscalation=false"
        yield finding("target.privileged", True, reason, "use one of them")


def _environment(entries: Sequence[Any], key: str) -> Found:
    earlier: list[str] = []
    for entry in map(mapped, entries):
        name = str(entry.get("name", ""))
        where = f"{key}.env" if name.startswith("MUSTER_") else f"target.env.{name}"
        if reason := syntax.env_name(name):
            yield finding(where, name, f"{reason}: no variable", "use letters, digits and '_'")
        if name in earlier:
            reason = "is set by Muster, or both in target.env and in target.secrets"
            yield finding(where, name, reason, "remove it from the recipe")
        yield from _value(entry, name, where, earlier)
        earlier.append(name)


def _value(entry: Mapping[str, Any], name: str, where: str, earlier: Sequence[str]) -> Found:
    if ("value" in entry) == ("valueFrom" in entry):
        yield finding(where, None, "has not exactly one of value and valueFrom", "give one")
    value = entry.get("value", "")
    if not isinstance(value, str):
        yield finding(where, None, "is no text", "write it in quotes")
        return
    if reason := syntax.env_value(name, value):
        yield finding(where, None, reason, "use shorter text without NUL characters")
    for wanted in syntax.references(value):
        if wanted not in earlier:
            reason = f"refers to $({wanted}), which is not set before it"
            yield finding(where, None, reason, "write $$ for a dollar sign, or set it earlier")
    secret = mapped(entry.get("valueFrom")).get("secretKeyRef")
    if secret is not None:
        yield from _secret(mapped(secret), f"target.secrets.{name}")


def _secret(reference: Mapping[str, Any], where: str) -> Found:
    name, key = str(reference.get("name", "")), str(reference.get("key", ""))
    # Neither is shown: somebody may have put the secret itself there.
    fix = "give SECRET/KEY, for example wandb/api-key"
    if reason := syntax.dns1123_subdomain(name):
        yield finding(where, None, f"the name of the secret {reason}", fix)
    if reason := syntax.secret_key(key):
        yield finding(where, None, f"the key of the secret {reason}", fix)


def _repeated(found: Sequence[str]) -> list[str]:
    return [name for name, count in Counter(found).items() if count > 1]
