"""The harness itself: what a real kubelet and cluster would do with these pods, it does too.

pytest tests/cluster/test_harness.py
"""

from __future__ import annotations

import base64
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import build
from tests.cluster.api import Api, ApiError, Json
from tests.cluster.bulk import bulk_create, bulk_run, list_pods
from tests.cluster.children import marked
from tests.cluster.cluster import JOBSET_NAME, Cluster
from tests.cluster.control_plane import PLAIN, ControlPlane
from tests.cluster.kubelet import Kubelet
from tests.cluster.kubelet_env import Sandbox, expand
from tests.cluster.kueue import QUEUE_LABEL, make_queue, workloads
from tests.cluster.waiting import WAIT_S, wait_until

STUBBORN = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(99)"
POLITE = """
import signal, sys, time
signal.signal(15, lambda *_: (print("saved", flush=True), sys.exit(42)))
print("up", flush=True)
time.sleep(99)
"""


def container(script: str, **more: Any) -> Json:
    return {"name": "main", "image": "none", "command": ["python", "-c", script], **more}


def pod_spec(script: str, **more: Any) -> Json:
    tolerations = [{"key": "google.com/tpu", "operator": "Exists"}]
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 30,
        "tolerations": tolerations,
        "containers": [container(script)],
        **more,
    }


def start_pod(cluster: Cluster, name: str, script: str, **more: Any) -> None:
    cluster.create("pods", {"metadata": {"name": name}, "spec": pod_spec(script, **more)})


def terminated(pod: Json) -> Json:
    state: Json = pod["status"]["containerStatuses"][0]["state"]["terminated"]
    return state


def wait_for_log(cluster: Cluster, pod: str, word: str) -> None:
    wait_until(lambda: word in cluster.log(pod))


def jobset(name: str, script: str, *, slices: int, chips: int = 0, queue: str = "") -> Json:
    """As the launcher's: an exclusive node pool a slice, uncounted restarts after exit 42 and disruption."""
    resources = {"limits": {"google.com/tpu": str(chips)}, "requests": {"google.com/tpu": str(chips)}}
    spec = pod_spec("", containers=[container(script, resources=resources if chips else {})])
    rules = [
        {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [42]}},
        {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]
    job = {
        "parallelism": 1,
        "completions": 1,
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": rules},
        "template": {"spec": spec},
    }
    uncounted = {
        "name": "preempted",
        "action": "RestartJobSetAndIgnoreMaxRestarts",
        "onJobFailureReasons": ["PodFailurePolicy"],
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name, "labels": {QUEUE_LABEL: queue} if queue else {}},
        "spec": {
            "replicatedJobs": [{"name": "slice", "replicas": slices, "template": {"spec": job}}],
            "failurePolicy": {"maxRestarts": 3, "restartStrategy": "BlockingRecreate", "rules": [uncounted]},
        },
    }


# Pods


@pytest.mark.parametrize(
    ("script", "phase", "code"),
    [
        ("pass", "Succeeded", 0),
        ("raise SystemExit(75)", "Failed", 75),
        ("import os; os.abort()", "Failed", 134),
        ("import os; os.kill(os.getpid(), 9)", "Failed", 137),
    ],
)
def test_exit_codes(cluster: Cluster, script: str, phase: str, code: int) -> None:
    cluster.kubelet.add_cpu_nodes("cpu")
    start_pod(cluster, "pod", script)
    assert terminated(cluster.wait_pod("pod", phase))["exitCode"] == code


def test_last_words_and_the_end_of_the_log(cluster: Cluster) -> None:
    cluster.kubelet.add_cpu_nodes("cpu")
    env = [{"name": "WORDS", "value": "/dev/termination-log"}]
    script = "import os; print('in the log'); open(os.environ['WORDS'], 'w').write('bad recipe'); os.abort()"
    start_pod(cluster, "file", "", containers=[container(script, env=env)])
    fallback = {"terminationMessagePolicy": "FallbackToLogsOnError"}
    start_pod(cluster, "log", "", containers=[container("print('no file'); raise SystemExit(2)", **fallback)])
    assert terminated(cluster.wait_pod("file", "Failed"))["message"] == "bad recipe"
    assert terminated(cluster.wait_pod("log", "Failed"))["message"] == "no file\n"


def test_deletion_signals_the_first_process_and_ends_all_others(cluster: Cluster) -> None:
    cluster.kubelet.add_cpu_nodes("cpu")
    child = "import subprocess; subprocess.Popen(['sleep', '99'], start_new_session=True);"
    start_pod(cluster, "polite", child + POLITE)
    start_pod(cluster, "stubborn", STUBBORN, terminationGracePeriodSeconds=1)
    for name in ("polite", "stubborn"):
        cluster.wait_pod(name, "Running")
        wait_for_log(cluster, name, "up")
    worker = cluster.kubelet.worker("polite").container()
    assert len(worker.pids) == 2
    for name in ("polite", "stubborn"):
        cluster.api.delete(cluster.path("pods", name))
    wait_until(lambda: not cluster.phase("polite") and not cluster.phase("stubborn"))
    assert worker.exit_code == 42
    assert not worker.pids


def test_init_containers_run_first_and_in_order(cluster: Cluster) -> None:
    cluster.kubelet.add_cpu_nodes("cpu")
    mount = {
        "volumeMounts": [{"name": "shared", "mountPath": "/shared"}],
        "env": [{"name": "F", "value": "/shared/f"}],
    }
    write = "import os, time; time.sleep(0.3); open(os.environ['F'], 'a').write('{}')"
    init = [container(write.format(n), **mount) | {"name": f"init-{n}"} for n in (1, 2)]
    volumes = [{"name": "shared", "emptyDir": {}}]
    main = container("import os; print(open(os.environ['F']).read())", **mount)
    start_pod(cluster, "pod", "", containers=[main], initContainers=init, volumes=volumes)
    start_pod(cluster, "bad", "print('never')", initContainers=[container("exit(3)") | {"name": "init"}])
    cluster.wait_pod("pod", "Succeeded")
    assert cluster.log("pod") == "12\n"
    bad = cluster.wait_pod("bad", "Failed")
    assert bad["status"]["initContainerStatuses"][0]["state"]["terminated"]["exitCode"] == 3


def test_what_cannot_start_waits_with_the_reason(cluster: Cluster) -> None:
    cluster.kubelet.add_cpu_nodes("cpu")
    cluster.kubelet.unpullable.add("missing")
    reference = {"secretKeyRef": {"name": "token", "key": "value"}}
    env = [{"name": "TOKEN", "valueFrom": reference}]
    start_pod(cluster, "secret", "", containers=[container("import os; print(os.environ['TOKEN'])", env=env)])
    start_pod(cluster, "image", "", containers=[container("pass") | {"image": "missing"}])

    def reason(pod: str) -> str:
        status = (cluster.find("pods", pod) or {})["status"].get("containerStatuses", [{}])[0]
        return str(status.get("state", {}).get("waiting", {}).get("reason"))

    wait_until(lambda: reason("secret") == "CreateContainerConfigError")
    wait_until(lambda: reason("image") == "ImagePullBackOff")
    value = base64.b64encode(b"canary").decode()
    cluster.create("secrets", {"metadata": {"name": "token"}, "data": {"value": value}})
    cluster.wait_pod("secret", "Succeeded")
    assert cluster.log("secret") == "canary\n"


def test_logs_through_the_api_server(cluster: Cluster) -> None:
    cluster.kubelet.add_cpu_nodes("cpu")
    start_pod(cluster, "pod", "import time\nfor n in range(5): print(n, flush=True); time.sleep(0.2)")
    wait_until(lambda: cluster.phase("pod") != "Pending")
    assert cluster.log("pod", follow="true").split() == ["0", "1", "2", "3", "4"]
    assert cluster.log("pod", tailLines="2").split() == ["3", "4"]
    stamp, _, text = cluster.log("pod", tailLines="1", timestamps="true").partition(" ")
    assert (stamp[:2], stamp[-1], text) == ("20", "Z", "4\n")
    assert "4\n" in cluster.log("pod", sinceTime=stamp)
    assert cluster.log("pod", sinceTime="2999-01-01T00:00:00Z") == ""
    assert cluster.log("pod", limitBytes="3") == "0\n1"
    with pytest.raises(ApiError, match="not found"):
        cluster.log("pod", previous="true")


def test_the_api_server_may_be_away(cluster: Cluster) -> None:
    cluster.kubelet.add_cpu_nodes("cpu")
    start_pod(cluster, "pod", "import time; time.sleep(99)")
    cluster.wait_pod("pod", "Running")
    worker = cluster.kubelet.worker("pod").container()
    cluster.plane.kill_apiserver()
    cluster.kubelet.kill_container("pod")
    wait_until(lambda: worker.exit_code is not None)
    cluster.plane.start_apiserver()
    assert terminated(cluster.wait_pod("pod", "Failed"))["exitCode"] == 137


def test_who_may_do_what_is_decided_by_rbac(cluster: Cluster) -> None:
    plain = cluster.plane.user(PLAIN)
    with pytest.raises(ApiError) as refused:
        plain.get(cluster.path("pods"))
    assert refused.value.status == 403
    token = cluster.api.create(f"{cluster.path('serviceaccounts', 'default')}/token", {"spec": {}})
    account = cluster.plane.user(token["status"]["token"])
    with pytest.raises(ApiError, match=f"system:serviceaccount:{cluster.namespace}:default"):
        account.get(cluster.path("pods"))


# JobSets


def test_a_preempted_slice_restarts_the_jobset_uncounted(cluster: Cluster) -> None:
    shape = {"accelerator": "tpu-v5p-slice", "topology": "2x2x1", "chips": 4}
    nodes = [cluster.kubelet.add_tpu_nodes(f"np{n}", **shape)[0] for n in range(2)]  # type: ignore[arg-type]
    cluster.create("jobsets", jobset("run", POLITE, slices=2, chips=4))
    wait_until(lambda: cluster.phases("run") == ["Running"] * 2)
    first = {pod["metadata"]["uid"] for pod in cluster.pods_of("run")}
    for pod in cluster.pods_of("run"):
        wait_for_log(cluster, pod["metadata"]["name"], "up")

    replacement = cluster.kubelet.preempt(nodes[1])

    def restarted() -> bool:
        pods = cluster.pods_of("run")
        return len(pods) == 2 and all(
            pod["status"]["phase"] == "Running" and pod["metadata"]["uid"] not in first for pod in pods
        )

    wait_until(restarted)
    status = (cluster.jobset("run") or {})["status"]
    assert (status["restarts"], status.get("restartsCountTowardsMax", 0)) == (1, 0)
    assert {pod["spec"]["nodeName"] for pod in cluster.pods_of("run")} == {nodes[0], replacement}

    cluster.kubelet.kill_node(nodes[0])
    wait_until(lambda: (cluster.jobset("run") or {})["status"]["restarts"] == 2)
    assert (cluster.jobset("run") or {})["status"].get("restartsCountTowardsMax", 0) == 0


def test_a_killed_process_restarts_the_jobset_counted(cluster: Cluster) -> None:
    cluster.kubelet.add_cpu_nodes("cpu", count=2)
    cluster.create("jobsets", jobset("run", POLITE, slices=1))
    wait_until(lambda: cluster.phases("run") == ["Running"])
    cluster.kubelet.kill_container(cluster.pods_of("run")[0]["metadata"]["name"])
    wait_until(lambda: (cluster.jobset("run") or {})["status"].get("restartsCountTowardsMax") == 1)


def test_pods_find_each_other_by_name(cluster: Cluster) -> None:
    """Names of the headless service, as the processes see them, are the addresses the API shows."""
    cluster.kubelet.add_cpu_nodes("cpu")
    body = jobset("run", "import os, time; print(os.environ['PEER'], flush=True); time.sleep(99)", slices=2)
    spec = body["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    spec["containers"][0]["env"] = [{"name": "PEER", "value": "run-slice-0-0.run:8482"}]
    cluster.create("jobsets", body)
    wait_until(lambda: cluster.phases("run") == ["Running"] * 2)
    pods = [pod["metadata"]["name"] for pod in cluster.pods_of("run")]
    wait_until(lambda: all(cluster.log(pod) for pod in pods))
    address = cluster.pods_of("run")[0]["status"]["podIP"]
    assert {cluster.log(pod) for pod in pods} == {f"{address}:8482\n"}


def test_kueue_admits_what_there_is_quota_for(kueue_cluster: Cluster) -> None:
    cluster = kueue_cluster
    make_queue(cluster, "tpus", quota={"google.com/tpu": "8"})
    for n in range(4):
        cluster.kubelet.add_tpu_nodes(f"np{n}", accelerator="tpu-v5p-slice", topology="2x2x1", chips=4)
    cluster.create("jobsets", jobset("first", POLITE, slices=2, chips=4, queue="tpus"))
    wait_until(lambda: cluster.phases("first") == ["Running"] * 2)
    cluster.create("jobsets", jobset("second", POLITE, slices=2, chips=4, queue="tpus"))
    wait_until(lambda: len(workloads(cluster)) == 2)

    def reason() -> str:
        [waiting] = [w for w in workloads(cluster) if "second" in w["metadata"]["name"]]
        conditions = waiting.get("status", {}).get("conditions", [])
        return next((str(c["message"]) for c in conditions if c["type"] == "QuotaReserved"), "")

    assert "insufficient unused quota for google.com/tpu" in wait_until(reason)
    assert cluster.pods_of("second") == []
    cluster.api.delete(cluster.path("jobsets", "first"))
    wait_until(lambda: cluster.phases("second") == ["Running"] * 2)


def test_a_kubelet_stops_before_its_watch_begins(
    plane: ControlPlane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    close, watch, closed = Api.close, Api.watch, threading.Event()

    def closing(api: Api) -> None:
        close(api)
        closed.set()

    def late(api: Api, path: str, **query: str) -> Iterator[Json]:
        closed.wait(WAIT_S)
        yield from watch(api, path, **query)

    monkeypatch.setattr(Api, "close", closing)
    monkeypatch.setattr(Api, "watch", late)
    began_s = time.monotonic()
    Kubelet(plane, tmp_path, env={}).stop()
    assert time.monotonic() - began_s < WAIT_S


def test_many_pods_run_at_once(cluster: Cluster) -> None:
    labels, spec = {JOBSET_NAME: "many"}, pod_spec("")
    pods = [{"metadata": {"name": f"pod-{n}", "labels": labels}, "spec": spec} for n in range(60)]
    assert bulk_create(cluster.api, cluster.namespace, pods) == 60
    assert bulk_run(cluster.api, cluster.namespace, f"{JOBSET_NAME}=many") == 60
    assert {p["status"]["phase"] for p in list_pods(cluster.api, cluster.namespace, "")} == {"Running"}


# Parts


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("$(A)/x", "1/x"),
        ("$$(A)", "$(A)"),
        ("$(B)", "$(B)"),
        ("$A ${A} $()", "$A ${A} $()"),
    ],
)
def test_expansion(text: str, expected: str) -> None:
    assert expand(text, {"A": "1"}) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("/data", "{data}"),
        ("/data/x:/data", "{data}/x:{data}"),
        ("--dir=/data", "--dir={data}"),
        ("/database /other/data gs://data/data", "/database /other/data gs://data/data"),
        ("js-slice-1-0.svc:80", "{peer}:80"),
        ("js-slice-1-0.svc.space.svc.cluster.local", "{peer}"),
        ("js-slice-1-0.svc.other.svc x.js-slice-1-0.svc2", "js-slice-1-0.svc.other.svc x.js-slice-1-0.svc2"),
    ],
)
def test_paths_and_names(tmp_path: Path, value: str, expected: str) -> None:
    mounts = {"volumeMounts": [{"name": "data", "mountPath": "/data"}]}
    main = container("", env=[{"name": "V", "value": value}], **mounts)
    spec = pod_spec("", subdomain="svc", containers=[main], volumes=[{"name": "data", "emptyDir": {}}])
    pod = {"metadata": {"name": "p", "namespace": "space", "uid": "u"}, "spec": spec}
    sandbox = Sandbox(pod=pod, folder=tmp_path, salt="s", image_env={}, read_secret=lambda _: {})
    peer = sandbox.address_of("js-slice-1-0")
    data = tmp_path / "volumes" / "data"
    assert sandbox.env(main)["V"] == expected.format(data=data, peer=peer)


def test_children_end_with_a_parent_that_is_killed(repo: Path) -> None:
    script = (
        "import os, subprocess, time; from tests.cluster.children import Children; c = Children();"
        "c.spawn(['sh', '-c', 'setsid sleep 97 & sleep 98'], env=os.environ, output=subprocess.DEVNULL);"
        "print(c.mark, flush=True); time.sleep(99)"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], cwd=repo, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    mark = parent.stdout.readline().strip()
    wait_until(lambda: len(marked(mark)) == 3)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_until(lambda: not marked(mark))


@pytest.mark.parametrize(
    ("version", "problem"),
    [("go1.24.9", "this is go1.24.9"), ("go1.25.0", ""), ("go2.0", ""), ("", "no `go` on the PATH")],
)
def test_an_old_or_missing_go_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, problem: str
) -> None:
    if version:
        (tmp_path / "go").write_text(f"#!/bin/sh\necho {version}\n")
        (tmp_path / "go").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    if not problem:
        build.check_go()
        return
    with pytest.raises(build.Unavailable, match=problem):
        build.check_go()
