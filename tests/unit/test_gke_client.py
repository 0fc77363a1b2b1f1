"""Which cluster is meant, and what its refusals say: pure parts of the Kubernetes client."""

from __future__ import annotations

import contextlib
import http.server
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher import waiting
from launcher.gke import credentials
from launcher.gke.api_errors import (
    Call,
    ClusterError,
    Conflicting,
    Denied,
    Missing,
    Refused,
    is_retried,
    refusal,
    unreachable,
)
from launcher.gke.client import connect
from launcher.gke.kubeconfig import choose_context, gke_name
from launcher.gke.objects import JOBSETS
from recipes.errors import UserError

CONTEXTS = ["gke_proj_us-east5_train", "gke_proj_us-east5_serve", "gke_other_us-west4_serve", "kind-dev"]


@pytest.mark.parametrize(
    ("cluster", "current", "context"),
    [
        (None, "kind-dev", "kind-dev"),
        ("train", "kind-dev", "gke_proj_us-east5_train"),
        ("gke_other_us-west4_serve", "", "gke_other_us-west4_serve"),
        ("kind-dev", "", "kind-dev"),
    ],
)
def test_contexts(cluster: str | None, current: str, context: str) -> None:
    assert choose_context(cluster, CONTEXTS, current) == context


@pytest.mark.parametrize(
    ("cluster", "current", "message", "hint"),
    [
        ("serve", "", "2 contexts", "gke_proj_us-east5_serve, gke_other_us-west4_serve"),
        ("trian", "", "no such context", "did you mean train?"),
        ("kind-dve", "", "no such context", "did you mean kind-dev?"),
        ("zzz", "", "no such context", "gke_proj_us-east5_train"),
        (None, "", "no current context", "target.cluster"),
        (None, "gone", "current context gone does not exist", "target.cluster"),
    ],
)
def test_contexts_that_are_not_there(cluster: str | None, current: str, message: str, hint: str) -> None:
    with pytest.raises(UserError) as raised:
        choose_context(cluster, CONTEXTS, current)
    assert message in raised.value.message
    assert hint in raised.value.hint


def test_only_four_parts_are_a_name_of_gclouds() -> None:
    assert [gke_name(name) for name in ("gke_a_b_c", "gke_a_b", "x_a_b_c", "gke_a_b_c_d")] == [
        "c",
        "",
        "",
        "",
    ]


CALL = Call(context="ctx", namespace="ns", verb="patch", resource=JOBSETS, name="r")


def answer(message: str, **details: Any) -> bytes:
    return json.dumps({"kind": "Status", "message": message, "details": details}).encode()


REFUSALS: dict[str, tuple[int, bytes, type[ClusterError], str, int]] = {
    "no login": (401, answer("Unauthorized"), Denied, "does not accept these credentials", 2),
    "no right": (
        403,
        answer('jobsets is forbidden: User "bob" cannot patch resource "jobsets" in API group', name="r"),
        Denied,
        "bob may not patch jobsets.jobset.x-k8s.io in namespace ns of cluster ctx",
        2,
    ),
    "a webhook says no": (
        403,
        answer('admission webhook "vjobset.kb.io" denied the request: spec is immutable', name="r"),
        Refused,
        "jobsets r is refused by cluster ctx: spec is immutable",
        2,
    ),
    "a quota": (403, answer("exceeded quota: q", name="r"), Refused, "exceeded quota: q", 2),
    "no namespace": (
        404,
        answer('namespaces "ns" not found', name="ns", kind="namespaces"),
        Missing,
        "there is no namespace ns in cluster ctx",
        2,
    ),
    "no such kind": (
        404,
        answer("the server could not find the requested resource"),
        Missing,
        "does not serve jobsets.jobset.x-k8s.io v1alpha2",
        2,
    ),
    "no such object": (
        404,
        answer('"r" not found', name="r", kind="jobsets"),
        Missing,
        "there is no jobsets r",
        2,
    ),
    "a conflict": (409, answer("Apply failed with 1 conflict", name="r"), Conflicting, "1 conflict", 2),
    "causes": (
        422,
        answer(
            "long",
            name="r",
            causes=[{"field": "a.b", "message": "Invalid"}, {"field": "c", "message": "Bad"}],
        ),
        Refused,
        "\n  a.b: Invalid\n  c: Bad",
        2,
    ),
    "webhook down": (500, answer('failed calling webhook "x": refused'), ClusterError, "could not patch", 75),
    "unknown field": (
        500,
        answer("failed to create typed patch object: .spec.x: field not declared in schema"),
        Refused,
        "field not declared in schema",
        2,
    ),
    "a proxy answers": (502, b"<html>\x1b[31mBad Gateway</html>", ClusterError, "Bad Gateway", 75),
    "nothing": (503, b"", ClusterError, "HTTP 503", 75),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_refusals(what: str) -> None:
    status, body, kind, message, exit_code = REFUSALS[what]
    error = refusal(CALL, status, body)
    assert (type(error), error.exit_code) == (kind, exit_code)
    assert message in error.message and "\x1b" not in error.message


def test_only_what_may_pass_is_tried_again() -> None:
    assert [is_retried(status, b"") for status in (429, 500, 503, 400, 403, 404, 409, 422)] == [True] * 3 + [
        False
    ] * 5
    assert not is_retried(500, answer("x: field not declared in schema"))


def test_unreachable_says_where() -> None:
    error = unreachable("ctx", "https://1.2.3.4", "HTTPSConnection(host='1.2.3.4', port=443): refused")
    assert error.message == "cluster ctx does not answer at https://1.2.3.4: refused"
    assert error.exit_code == 75


KUBECONFIG = """
apiVersion: v1
kind: Config
current-context: a
clusters: [{name: c, cluster: {server: "https://127.0.0.1:1"}}]
users:
- {name: plugin, user: {exec: {apiVersion: client.authentication.k8s.io/v1beta1, command: no-such-plugin}}}
- {name: token, user: {token: t}}
contexts:
- {name: a, context: {cluster: c, user: token}}
- {name: b, context: {cluster: c, user: plugin}}
- {name: d, context: {cluster: missing, user: token}}
"""


@pytest.fixture
def kubeconfig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "config"
    path.write_text(KUBECONFIG)
    monkeypatch.setenv("KUBECONFIG", str(path))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    return path


def test_a_cluster_that_is_away(kubeconfig: Path) -> None:
    slept: list[float] = []
    cluster = connect(None, "ns", sleep=slept.append)
    with pytest.raises(ClusterError, match=r"cluster a does not answer at https://127\.0\.0\.1:1"):
        cluster.get(JOBSETS, "r")
    assert slept == sorted(slept) and 2 <= len(slept) <= 6


def test_an_impatient_client_tries_once(kubeconfig: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        kubeconfig.write_text(KUBECONFIG.replace("https://127.0.0.1:1", address))
        cluster = connect(None, "ns", sleep=lambda _: pytest.fail("tried again"))
        with pytest.raises(ClusterError, match="does not answer"):
            cluster.impatient(0.05).get(JOBSETS, "r")


def test_credentials_that_fail(kubeconfig: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match=r"no credentials for context b: .*no-such-plugin"):
        connect("b", "ns")
    assert capsys.readouterr().err == ""


def test_credentials_that_never_come(
    kubeconfig: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin = tmp_path / "plugin"
    plugin.write_text("#!/bin/sh\nexec sleep 100\n")
    plugin.chmod(0o755)
    kubeconfig.write_text(KUBECONFIG.replace("no-such-plugin", str(plugin)))
    monkeypatch.setattr(credentials, "LIMIT_S", 0.3)
    monkeypatch.setattr(waiting, "PATIENCE_S", 0.05)
    said: list[str] = []
    waiting.say_by(said.append)
    try:
        with pytest.raises(UserError, match=f"the credential plugin {plugin} gave no credentials") as raised:
            connect("b", "ns")
    finally:
        waiting.say_by(None)
    assert raised.value.exit_code == 75
    assert said == [f"waiting for the credential plugin {plugin}"]


@pytest.mark.parametrize(
    ("cluster", "user", "message"),
    [
        ("certificate-authority-data: bm9uc2Vuc2U=", "token: t", "certificate authority"),
        ("certificate-authority-data: '!'", "token: t", ""),
        ("certificate-authority: /no/such", "token: t", "/no/such"),
        (
            "insecure-skip-tls-verify: true",
            "client-certificate-data: bm9uc2Vuc2U=, client-key-data: bm9uc2Vuc2U=",
            "client certificate",
        ),
    ],
)
def test_certificates_that_are_none(kubeconfig: Path, cluster: str, user: str, message: str) -> None:
    text = KUBECONFIG.replace('127.0.0.1:1"', f'127.0.0.1:1", {cluster}').replace("token: t}", f"{user}}}")
    kubeconfig.write_text(text)
    with pytest.raises(UserError) as raised:
        connect(None, "ns")
    assert raised.value.exit_code == 2
    assert raised.value.message.startswith(f"the kubeconfig {kubeconfig} cannot be used: ")
    assert message in raised.value.message


@pytest.mark.parametrize("text", ["root:x:0:0:root:/root:/bin/bash\n", "7", "[1, 2]"])
def test_a_file_that_is_no_kubeconfig(kubeconfig: Path, text: str) -> None:
    kubeconfig.write_text(text)
    with pytest.raises(UserError, match="cannot be used: it is not a kubeconfig"):
        connect(None, "ns")


def test_a_server_that_is_not_the_one_trusted_is_no_matter_of_patience() -> None:
    reason = "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: self-signed certificate"
    error = unreachable("ctx", "https://1.2.3.4", reason)
    assert error.exit_code == 2
    assert "is not one that the kubeconfig trusts for cluster ctx" in error.message


@pytest.mark.parametrize(
    ("namespace", "name", "path"),
    [
        ("..", "x/../../secrets", "/namespaces/%2E%2E/jobsets/x%2F..%2F..%2Fsecrets"),
        ("a?b", ".", "/namespaces/a%3Fb/jobsets/%2E"),
    ],
)
def test_names_stay_in_their_part_of_the_path(kubeconfig: Path, namespace: str, name: str, path: str) -> None:
    with http_server() as (address, paths):
        kubeconfig.write_text(KUBECONFIG.replace("https://127.0.0.1:1", address))
        assert connect(None, namespace).get(JOBSETS, name) == {}
    assert paths == [f"/apis/jobset.x-k8s.io/v1alpha2{path}"]


def test_a_server_that_is_slow_is_spoken_of(kubeconfig: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "PATIENCE_S", 0.05)
    said: list[str] = []
    waiting.say_by(said.append)
    try:
        with http_server(delay_s=0.3) as (address, _paths):
            kubeconfig.write_text(KUBECONFIG.replace("https://127.0.0.1:1", address))
            cluster = connect(None, "ns")
            for _ in range(2):
                cluster.get(JOBSETS, "r")
    finally:
        waiting.say_by(None)
    assert said == [f"waiting for cluster a at {address}"]


@contextlib.contextmanager
def http_server(delay_s: float = 0.0) -> Iterator[tuple[str, list[str]]]:
    """Answers ``{}`` to all; gives its address and the paths asked for."""
    paths: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            paths.append(self.path)
            time.sleep(delay_s)
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", paths
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("text", ["{", "[]", "apiVersion: v1", "contexts: 7", "contexts: [7, {name: a}]", ""])
def test_a_damaged_kubeconfig(kubeconfig: Path, text: str) -> None:
    kubeconfig.write_text(text)
    with pytest.raises(UserError):
        connect(None, "ns")


def test_a_context_without_its_cluster(kubeconfig: Path) -> None:
    with pytest.raises(UserError, match="cannot be used"):
        connect("d", "ns")


def test_no_kubeconfig(kubeconfig: Path) -> None:
    kubeconfig.unlink()
    with pytest.raises(UserError, match="there is no kubeconfig at"):
        connect(None, "ns")


def test_the_client_is_imported_only_when_it_is_used(repo: Path) -> None:
    modules = "launcher.cli.launch_gke, launcher.cli.status, launcher.cli.stop, launcher.gke.client"
    code = f"import sys, {modules}; assert 'kubernetes' not in sys.modules and 'google' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=repo)
