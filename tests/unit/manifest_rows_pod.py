"""Every way to break the pods of a JobSet; see `manifest_rows.py`."""

from __future__ import annotations

from tests.unit.manifest_support import (
    child,
    chips,
    container,
    env,
    job,
    late,
    pod,
    refused,
    replicated,
    secret,
)

_POD = "spec.replicatedJobs[0].template.spec.template.spec"
_TRAINER = f"{_POD}.trainer"

POD_ROWS = (
    child(
        "no container",
        f"{_POD}.containers",
        lambda js: (pod(js).update(containers=[]), job(js).pop("podFailurePolicy")),
    ),
    child("restart always", f"{_POD}.restartPolicy", lambda js: pod(js).update(restartPolicy="Always")),
    late(
        "grace below 0", "target.grace_period_s", lambda js: pod(js).update(terminationGracePeriodSeconds=-1)
    ),
    child(
        "service account", "target.service_account", lambda js: pod(js).update(serviceAccountName="Trainer")
    ),
    late(
        "names on the node's network",
        f"{_POD}.dnsPolicy",
        lambda js: pod(js).pop("dnsPolicy"),
        "every-option",
    ),
    child(
        "pod's label", "target.labels.a", lambda js: job(js)["template"]["metadata"]["labels"].update(a="b c")
    ),
    child(
        "selector's key", "target.node_selector.a b", lambda js: pod(js)["nodeSelector"].update({"a b": "c"})
    ),
    child("selector's value", "target.node_selector.a", lambda js: pod(js)["nodeSelector"].update(a="b/c")),
    child(
        "reservation",
        "target.reservation",
        lambda js: pod(js)["nodeSelector"].update({"cloud.google.com/reservation-name": "projects/p/r"}),
    ),
    late(
        "toleration of everything",
        f"{_POD}.tolerations[2]",
        lambda js: pod(js)["tolerations"].append({"operator": "Exists"}),
    ),
    child(
        "toleration's key",
        f"{_POD}.tolerations[2]",
        lambda js: pod(js)["tolerations"].append({"key": "a b", "operator": "Exists"}),
    ),
    child(
        "toleration how",
        f"{_POD}.tolerations[2]",
        lambda js: pod(js)["tolerations"].append({"key": "a", "operator": "In"}),
    ),
    child(
        "toleration of a value",
        f"{_POD}.tolerations[2]",
        lambda js: pod(js)["tolerations"].append({"key": "a", "operator": "Exists", "value": "b"}),
    ),
    child(
        "toleration's value",
        f"{_POD}.tolerations[2]",
        lambda js: pod(js)["tolerations"].append({"key": "a", "operator": "Equal", "value": "b c"}),
    ),
    child(
        "toleration's effect",
        f"{_POD}.tolerations[2]",
        lambda js: pod(js)["tolerations"].append({"key": "a", "operator": "Exists", "effect": "Never"}),
    ),
    child(
        "volume's name",
        f"{_POD}.volumes",
        lambda js: pod(js)["volumes"].append({"name": "A", "emptyDir": {}}),
    ),
    refused(
        "volumes of one name",
        f"{_POD}.volumes",
        lambda js: pod(js)["volumes"].append({"name": "muster", "emptyDir": {}}),
    ),
    child("mount of nothing", f"{_POD}.volumes", lambda js: pod(js)["volumes"].pop(0)),
    refused(
        "mounted twice",
        f"{_POD}.volumes",
        lambda js: container(js)["volumeMounts"].append({"name": "muster", "mountPath": "/dev/shm"}),
    ),
    refused(
        "containers of one name", f"{_POD}.containers", lambda js: pod(js)["containers"].append(container(js))
    ),
    child(
        "container's name",
        f"{_POD}.Trainer.name",
        lambda js: (container(js).update(name="Trainer"), job(js).pop("podFailurePolicy")),
    ),
    child("no image", "target.image", lambda js: container(js).update(image="")),
    late("image by tag", "target.image", lambda js: container(js).update(image="repo/trainer:latest")),
    child(
        "no server image",
        "target.pathways_server_image",
        lambda js: replicated(js, 1)["template"]["spec"]["template"]["spec"]["containers"][0].update(
            image=""
        ),
        "pathways",
    ),
    child("port 0", f"{_TRAINER}.ports", lambda js: container(js)["ports"][0].update(containerPort=0)),
    child(
        "port 65536", f"{_TRAINER}.ports", lambda js: container(js)["ports"][0].update(containerPort=65536)
    ),
    child(
        "port's name",
        f"{_TRAINER}.ports",
        lambda js: container(js)["ports"][0].update(name="coordinator-port"),
    ),
    child("ports of one name", f"{_TRAINER}.ports", lambda js: container(js)["ports"][0].update(name="gang")),
    refused(
        "one port twice", f"{_TRAINER}.ports", lambda js: container(js)["ports"][0].update(containerPort=8483)
    ),
    child("requests above the limit", f"{_TRAINER}.resources.google.com/tpu", lambda js: chips(js, "4", "1")),
    child("half a chip", f"{_TRAINER}.resources.google.com/tpu", lambda js: chips(js, "500m", "500m")),
    child("chips below 0", f"{_TRAINER}.resources.google.com/tpu", lambda js: chips(js, "-4", "-4")),
    refused("chips in words", f"{_TRAINER}.resources.google.com/tpu", lambda js: chips(js, "four", "four")),
    child(
        "privilege without escalation",
        "target.privileged",
        lambda js: container(js)["securityContext"].update(privileged=True),
    ),
    child("variable's name", "target.env.A=B", lambda js: env(js, **{"A=B": "c"})),
    child("no variable's name", "target.env.", lambda js: env(js, **{"": "c"})),
    refused("variable twice", "target.env.A", lambda js: env(env(js, A="b"), A="c")),
    refused("variable of ours", f"{_TRAINER}.env", lambda js: env(js, MUSTER_RUN_DIR="gs://other/run")),
    refused("variable that is a number", "target.env.A", lambda js: env(js, A=1)),
    late("variable with NUL", "target.env.A", lambda js: env(js, A="a\0b")),
    late("variable of 128 KiB", "target.env.A", lambda js: env(js, A="x" * 2**17)),
    late("variable of what", "target.env.A", lambda js: env(js, A="$(B)", B="b")),
    late("command of what", f"{_TRAINER}.args", lambda js: container(js)["command"].append("$(NOWHERE)")),
    child(
        "value and source",
        "target.env.A",
        lambda js: container(js)["env"].append(
            {"name": "A", "value": "b", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}
        ),
    ),
    child("secret's name", "target.secrets.TOKEN", lambda js: secret(js, "Wandb_", "key")),
    child("secret's key", "target.secrets.TOKEN", lambda js: secret(js, "wandb", "a/b")),
    child("no secret's key", "target.secrets.TOKEN", lambda js: secret(js, "wandb", "")),
)
