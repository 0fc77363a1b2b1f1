"""A real Kubernetes control plane on free loopback ports, without containers; Linux.

    with ControlPlane(tmp_path / "control-plane") as plane:      # about 6 s; kueue=True adds Kueue
        plane.api.get("/api/v1/nodes")                            # the harness's own JSON client (api.py)
        subprocess.run(argv, env={**os.environ, **plane.env})     # KUBECONFIG; contexts: ADMIN, PLAIN
        plane.kill_apiserver()                                    # SIGKILL; start_apiserver() brings it back
        plane.restart_apiserver()                                 # same port, same data

etcd, kube-apiserver (RBAC, service accounts, kubelet logs), kube-controller-manager, kube-scheduler and the
JobSet controller with its CRD and webhooks. No kubelet: see kubelet.py, and conftest.py for fixtures that
start all of it once. Several planes can run side by side; every process ends with the test run. Each
process has its log in the folder.
"""

from __future__ import annotations

import base64
import contextlib
import os
import random
import socket
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import yaml

from tests.cluster.api import Api
from tests.cluster.build import find_program
from tests.cluster.children import Children
from tests.cluster.controllers import QPS, apply_crds, start_jobset, start_kueue
from tests.cluster.waiting import wait_until

READY_S = 150.0
ADMIN, PLAIN = "harness-admin", "harness-plain"
"""Contexts of the kubeconfig, and names of its users: one that may do all, one that may do nothing."""


class HarnessError(Exception):
    """The harness itself failed; the message ends with the last lines of the log that says why."""


class ControlPlane:
    """One cluster without nodes."""

    def __init__(self, folder: Path, *, kueue: bool = False) -> None:
        self.folder, self._kueue = folder, kueue
        self.kubeconfig = folder / "kubeconfig"
        self.authority = folder / "tls.crt"
        """Certificate of everything that serves here, its own authority."""
        self.children = Children()
        self._apis: list[Api] = []
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.ports: dict[str, int] = {}
        for name in ("etcd", "peer", "apiserver", "jobset", "jobset-health", "kueue", "kueue-health"):
            self.ports[name] = free_port(self.ports.values())
        self.server = f"https://127.0.0.1:{self.ports['apiserver']}"

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def env(self) -> dict[str, str]:
        """What a client process needs to find this cluster and no other."""
        return {"KUBECONFIG": str(self.kubeconfig)}

    def user(self, name: str = ADMIN) -> Api:
        """The API as one of the kubeconfig's users."""
        api = Api(self.server, token=name, authority=self.authority)
        self._apis.append(api)
        return api

    def stop(self) -> None:
        """Ends every process at once: nothing here is kept."""
        for api in self._apis:
            api.close()
        self.children.close()
        for process in self._processes.values():
            process.wait()

    def kill_apiserver(self) -> None:
        self.kill("apiserver")

    def kill(self, name: str) -> None:
        """Ends a process by the name that its log has."""
        process = self._processes.pop(name)
        process.kill()
        process.wait()

    def start_apiserver(self) -> None:
        """Starts it and returns when it is ready."""
        self._spawn_apiserver()
        self.wait_ready("apiserver", f"{self.server}/readyz")

    def restart_apiserver(self) -> None:
        self.kill_apiserver()
        self.start_apiserver()

    def _start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._make_credentials()
        self._spawn_etcd()
        self.start_apiserver()
        self.api = self.user()
        apply_crds(self, ("jobset", "kueue") if self._kueue else ("jobset",))
        self._spawn_controllers()
        start_jobset(self)
        if self._kueue:
            start_kueue(self)
        wait_until(self._has_default_account, READY_S)

    def _spawn_etcd(self) -> None:
        etcd, peer = (f"http://127.0.0.1:{self.ports[name]}" for name in ("etcd", "peer"))
        self.spawn(
            "etcd",
            f"--data-dir={self.folder}/etcd",
            f"--listen-client-urls={etcd}",
            f"--advertise-client-urls={etcd}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            "--quota-backend-bytes=8589934592",
            "--unsafe-no-fsync",
        )
        self.wait_ready("etcd", f"{etcd}/health")

    def _spawn_controllers(self) -> None:
        config, rate = f"--kubeconfig={self.kubeconfig}", (f"--kube-api-qps={QPS}", f"--kube-api-burst={QPS}")
        # nodelifecycle stays off: nothing renews the leases of stand-in nodes.
        self.spawn(
            "controller-manager",
            *(
                config,
                *rate,
                "--leader-elect=false",
                "--controllers=*,-node-lifecycle-controller,-ttl-controller",
            ),
            *(
                f"--service-account-private-key-file={self.folder}/tls.key",
                f"--root-ca-file={self.authority}",
            ),
            *("--concurrent-job-syncs=20", "--secure-port=0"),
            program="kube-controller-manager",
        )
        self.spawn(
            "scheduler", config, *rate, "--leader-elect=false", "--secure-port=0", program="kube-scheduler"
        )

    def _make_credentials(self) -> None:
        """Key and certificate of all servers, tokens of the users."""
        argv = [
            *(
                "openssl",
                "req",
                "-x509",
                "-newkey",
                "ec",
                "-pkeyopt",
                "ec_paramgen_curve:prime256v1",
                "-nodes",
            ),
            *("-days", "7", "-subj", "/CN=harness", "-keyout", str(self.folder / "tls.key")),
            *("-addext", "subjectAltName=IP:127.0.0.1", "-addext", "keyUsage=digitalSignature,keyCertSign"),
            *("-out", str(self.authority)),
        ]
        done = subprocess.run(argv, capture_output=True, text=True)
        if done.returncode:
            raise HarnessError(f"openssl made no certificate: {done.stderr}")
        (self.folder / "tokens.csv").write_text(f'{ADMIN},{ADMIN},1,"system:masters"\n{PLAIN},{PLAIN},2\n')
        users = (ADMIN, PLAIN)
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": ADMIN,
            "clusters": [
                {
                    "name": "harness",
                    "cluster": {"server": self.server, "certificate-authority-data": self.authority_data},
                }
            ],
            "users": [{"name": name, "user": {"token": name}} for name in users],
            "contexts": [{"name": name, "context": {"cluster": "harness", "user": name}} for name in users],
        }
        self.kubeconfig.write_text(yaml.safe_dump(config))

    @property
    def authority_data(self) -> str:
        return base64.b64encode(self.authority.read_bytes()).decode()

    def _spawn_apiserver(self) -> None:
        folder = self.folder
        self.spawn(
            "apiserver",
            f"--etcd-servers=http://127.0.0.1:{self.ports['etcd']}",
            *("--bind-address=127.0.0.1", f"--secure-port={self.ports['apiserver']}"),
            *(f"--tls-cert-file={folder}/tls.crt", f"--tls-private-key-file={folder}/tls.key"),
            *("--authorization-mode=RBAC", f"--token-auth-file={folder}/tokens.csv"),
            # As on GKE.
            "--allow-privileged=true",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={folder}/tls.crt",
            f"--service-account-signing-key-file={folder}/tls.key",
            *("--service-cluster-ip-range=10.0.0.0/24", "--endpoint-reconciler-type=none"),
            f"--kubelet-certificate-authority={folder}/tls.crt",
            "--kubelet-preferred-address-types=InternalIP",
            # Nodes are created ready: nothing would ever take the not-ready taint away.
            "--disable-admission-plugins=TaintNodesByCondition",
            program="kube-apiserver",
        )

    def spawn(
        self, name: str, *arguments: str, program: str = "", env: Mapping[str, str] | None = None
    ) -> None:
        """Starts one more process of this cluster; its log is ``name``.log."""
        argv = [str(find_program(program or name)), *arguments]
        with (self.folder / f"{name}.log").open("ab") as log:
            self._processes[name] = self.children.spawn(
                argv, env={**os.environ, **(env or {})}, output=log, cwd=self.folder
            )

    def wait_ready(self, name: str, url: str) -> None:
        """Returns once ``url`` answers 200.

        Raises:
          HarnessError: the process ended, or time is over.
        """
        deadline_s = time.monotonic() + READY_S
        context = ssl.create_default_context(cafile=self.authority)
        request = urllib.request.Request(url, headers={"Authorization": f"Bearer {ADMIN}"})
        while time.monotonic() < deadline_s and self._processes[name].poll() is None:
            with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=5, context=context):
                return
            time.sleep(0.05)
        raise HarnessError(f"{name} did not become ready; its log ends with:\n{self.log_tail(name)}")

    def log_tail(self, name: str, lines: int = 30) -> str:
        text = (self.folder / f"{name}.log").read_text(errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    def _has_default_account(self) -> bool:
        accounts = self.api.get("/api/v1/namespaces/default/serviceaccounts")["items"]
        return any(account["metadata"]["name"] == "default" for account in accounts)


def free_port(taken: Iterable[int] = ()) -> int:
    """A free port below those that the kernel hands out, so that it stays free while its server is away."""
    while True:
        port = random.randrange(20000, 32000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            if port not in taken:
                probe.bind(("127.0.0.1", port))
                return port
