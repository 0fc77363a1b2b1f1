"""The Kubernetes API: the only importer of ``kubernetes``, and only inside functions.

    cluster = connect("my-cluster", "default")
    cluster.get(JOBSETS, "my-run")

The official client reads the kubeconfig (certificates, tokens, exec plugins, proxies) and makes the
connection pool. Requests go through that pool as they are: the generated API classes would add half a
second of imports and hide the bytes. Every call has a timeout, and idempotent ones are tried again.
"""

from __future__ import annotations

import copy
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import quote, urlencode

import yaml

from launcher import waiting
from launcher.gke.api_errors import (
    Call,
    ClusterError,
    Conflicting,
    Missing,
    is_retried,
    is_untrusted,
    refusal,
    unreachable,
)
from launcher.gke.credentials import SUBPROCESS, check_certificates, credential_errors
from launcher.gke.kubeconfig import choose_context
from launcher.gke.names import FIELD_MANAGER
from launcher.gke.objects import Object, Resource, items, text
from launcher.text import one_line
from recipes.errors import UserError

CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 30.0
BACKOFFS_S = (0.2, 0.5, 1.0, 2.0)
"""Before each further try of an idempotent request."""
MAX_RETRY_AFTER_S = 10.0
PAGE, METADATA_PAGE = 500, 2000
CONNECTIONS = 32
"""Kept open to one server: as many threads may read at once."""
IN_CLUSTER = "in-cluster"
"""Context name inside a pod, where there is no kubeconfig."""
_APPLY = "application/apply-patch+yaml"
_METADATA = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"


@dataclass(frozen=True, kw_only=True, slots=True)
class Listing:
    """Objects of one kind."""

    items: Sequence[Object]
    more: bool
    """There are others beyond the limit."""


def connect(cluster: str | None, namespace: str, *, sleep: Callable[[float], None] = time.sleep) -> Cluster:
    """The cluster of a context (see :mod:`launcher.gke.kubeconfig`); no request is made yet.

    Raises:
      UserError: the kubeconfig is missing or damaged, no context fits, or its credential plugin fails.
    """
    context, configuration = _configuration(cluster)
    return Cluster(context, namespace, configuration, sleep)


class Cluster:
    """One namespace of one cluster. Safe to share between threads.

    All methods raise ClusterError subclasses, or UserError when credentials cannot be renewed.
    """

    def __init__(
        self, context: str, namespace: str, configuration: Any, sleep: Callable[[float], None]
    ) -> None:
        from kubernetes.client import rest

        self.context, self.namespace = context, namespace
        self.server: str = configuration.host
        configuration.connection_pool_maxsize = CONNECTIONS
        http: Any = vars(rest)["urllib3"]
        if not configuration.verify_ssl:
            # The kubeconfig says so; a warning at each request helps nobody.
            http.disable_warnings(http.exceptions.InsecureRequestWarning)
        self._configuration, self._sleep = configuration, sleep
        self._http_error: type[Exception] = http.exceptions.HTTPError
        self._pool: Any = rest.RESTClientObject(configuration).pool_manager
        self._timeout = http.Timeout(connect=CONNECT_TIMEOUT_S, read=READ_TIMEOUT_S)
        self._backoffs_s: Sequence[float] = BACKOFFS_S

    def get(self, resource: Resource, name: str) -> Object | None:
        """One object; None when there is none of that name."""
        call = self._call("get", resource, name)
        try:
            return _object(self._request(call, "GET", self._path(resource, name)))
        except Missing:
            return None

    def list(
        self,
        resource: Resource,
        *,
        labels: str = "",
        fields: str = "",
        limit: int | None = None,
        metadata_only: bool = False,
    ) -> Listing:
        """Objects that fit the selectors, read in pages.

        Args:
          resource: their kind.
          labels: label selector.
          fields: field selector.
          limit: how many at most; None for all.
          metadata_only: leave out specs and status, which is much less to read.
        """
        call, found, token = self._call("list", resource), list[Object](), ""
        accept = {"Accept": _METADATA} if metadata_only else {}
        full = METADATA_PAGE if metadata_only else PAGE
        while True:
            page = full if limit is None else min(full, limit - len(found))
            query = {"labelSelector": labels, "fieldSelector": fields, "limit": str(page), "continue": token}
            body = _object(self._request(call, "GET", self._path(resource), query=query, headers=accept))
            found += items(body, "items")
            token = text(body, "metadata", "continue")
            if not token or (limit is not None and len(found) >= limit):
                return Listing(items=found, more=bool(token))

    def apply(self, resource: Resource, name: str, body: bytes, *, dry_run: bool = False) -> Object:
        """Server-side apply of these very bytes; unknown fields and other owners' fields are errors."""
        query = {"fieldManager": FIELD_MANAGER, "fieldValidation": "Strict"}
        query |= {"dryRun": "All"} if dry_run else {}
        call = self._call("patch", resource, name)
        path, headers = self._path(resource, name), {"Content-Type": _APPLY}
        return _object(self._request(call, "PATCH", path, query=query, headers=headers, body=body))

    def delete(self, resource: Resource, name: str, *, uid: str) -> bool:
        """Begins the deletion of one object after all that it owns; False when this object is gone already.

        Args:
          resource: its kind.
          name: its name.
          uid: of the object meant; another one of the same name is left alone.
        """
        options = {"propagationPolicy": "Foreground", "preconditions": {"uid": uid}}
        body = json.dumps({"kind": "DeleteOptions", "apiVersion": "v1", **options}).encode()
        call, headers = self._call("delete", resource, name), {"Content-Type": "application/json"}
        try:
            self._request(call, "DELETE", self._path(resource, name), headers=headers, body=body)
        except (Missing, Conflicting):
            return False
        return True

    def may(self, verb: str, resource: Resource, subresource: str = "") -> bool:
        """Whether these credentials allow a verb in the namespace."""
        review = Resource(
            group="authorization.k8s.io", version="v1", plural="selfsubjectaccessreviews", namespaced=False
        )
        asked = {
            "verb": verb,
            "group": resource.group,
            "resource": resource.plural,
            "subresource": subresource,
        }
        asked |= {"namespace": self.namespace} if resource.namespaced else {}
        document = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": asked},
        }
        call, headers = self._call("create", review), {"Content-Type": "application/json"}
        answer = self._request(
            call, "POST", self._path(review), headers=headers, body=json.dumps(document).encode()
        )
        status = _object(answer).get("status")
        return isinstance(status, Mapping) and status.get("allowed") is True

    def read(self, path: str) -> Object:
        """A document at a path of the server that is no resource, for example ``/version``."""
        return _object(self._request(self._call("get", None, path), "GET", path))

    def log(
        self,
        pod: str,
        container: str,
        *,
        tail_lines: int | None = None,
        since_s: int | None = None,
        limit_bytes: int | None = None,
        timestamps: bool = False,
    ) -> bytes:
        """What a container has written so far; empty when the pod is gone or has not started.

        Not tried again: a kubelet that does not answer is one of many.
        """
        query = {
            "container": container,
            "tailLines": _given(tail_lines),
            "sinceSeconds": _given(since_s),
            "limitBytes": _given(limit_bytes),
            "timestamps": "true" if timestamps else "",
        }
        call = self._call("get", _PODS_LOG, pod)
        try:
            return self._request(call, "GET", f"{self._path(_PODS, pod)}/log", query=query, backoffs_s=())
        except Missing:
            return b""
        except ClusterError as error:
            # 400: the container waits to start.
            if error.status == 400:
                return b""
            raise

    def _call(self, verb: str, resource: Resource | None, name: str = "") -> Call:
        return Call(context=self.context, namespace=self.namespace, verb=verb, resource=resource, name=name)

    def _path(self, resource: Resource, name: str = "") -> str:
        path = resource.path(_quoted(self.namespace))
        return f"{path}/{_quoted(name)}" if name else path

    def _request(
        self,
        call: Call,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
        backoffs_s: Sequence[float] | None = None,
    ) -> bytes:
        """One request, tried again where that can help; all callers' requests are idempotent."""
        backoffs_s = self._backoffs_s if backoffs_s is None else backoffs_s
        given = {name: value for name, value in (query or {}).items() if value}
        url = f"{self.server}{path}" + (f"?{urlencode(given)}" if given else "")
        with waiting.named(f"cluster {self.context} at {self.server}"):
            for backoff_s in (*backoffs_s, None):
                try:
                    # Its own retries and redirects are off: they would hide what happened.
                    answer = self._pool.request(
                        method, url, headers=self._headers(headers or {}), body=body,
                        timeout=self._timeout, retries=False,
                    )  # fmt: skip
                except self._http_error as error:
                    if backoff_s is None or is_untrusted(str(error)):
                        raise unreachable(self.context, self.server, str(error)) from error
                    self._sleep(backoff_s)
                    continue
                data: bytes = answer.data
                if 200 <= answer.status < 300:
                    return data
                if backoff_s is None or not is_retried(answer.status, data):
                    raise refusal(call, answer.status, data)
                self._sleep(max(backoff_s, _retry_after_s(answer.headers)))
        raise AssertionError("the last try returns or raises")

    def _headers(self, own: Mapping[str, str]) -> dict[str, str]:
        with credential_errors(self.context):
            # Renews a token that has expired.
            settings = self._configuration.auth_settings()
        auth = {each["key"]: each["value"] for each in settings.values() if each["value"]}
        return {
            "Accept": "application/json",
            "Accept-Encoding": "gzip",
            "User-Agent": "muster",
            **auth,
            **own,
        }

    def inside(self, namespace: str) -> Cluster:
        """Another namespace over the same connections."""
        other = copy.copy(self)
        other.namespace = namespace
        return other

    def impatient(self, timeout_s: float) -> Cluster:
        """The same, for what can be done without: one try, and no longer than this until an answer begins."""
        other = copy.copy(self)
        other._timeout = type(self._timeout)(connect=timeout_s, read=timeout_s)
        other._backoffs_s = ()
        return other

    def time_s(self) -> float | None:
        """Unix time by the server's clock, to the second; None when it does not say."""
        try:
            answer = self._pool.request(
                "GET",
                f"{self.server}/version",
                headers=self._headers({}),
                timeout=self._timeout,
                retries=False,
            )
        except self._http_error as error:
            raise unreachable(self.context, self.server, str(error)) from error
        try:
            return parsedate_to_datetime(answer.headers.get("Date", "")).timestamp()
        except ValueError:
            return None


_PODS = Resource(group="", version="v1", plural="pods")
_PODS_LOG = Resource(group="", version="v1", plural="pods/log")


def _quoted(part: str) -> str:
    """One part of a path, whatever is in it; dots alone would stand for another folder."""
    return part.replace(".", "%2E") if part in (".", "..") else quote(part, safe="")


def _given(value: int | None) -> str:
    return "" if value is None else str(value)


def _retry_after_s(headers: Mapping[str, str]) -> float:
    seconds = headers.get("Retry-After", "")
    return min(float(seconds), MAX_RETRY_AFTER_S) if seconds.isdigit() else 0.0


def _object(body: bytes) -> Object:
    try:
        found = json.loads(body)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ClusterError(
            f"the cluster's answer is no object: {one_line(body[:200].decode(errors='replace'))}",
            hint="something else answers at the address of its API server; look at the kubeconfig",
        )
    return found


def _configuration(cluster: str | None) -> tuple[str, Any]:
    """The context's name and the official client's configuration of it."""
    from kubernetes.client import Configuration
    from kubernetes.config import ConfigException, exec_provider, incluster_config, kube_config

    files = os.environ.get("KUBECONFIG") or "~/.kube/config"
    configuration: Any = Configuration()
    merger_of: Any = kube_config.KubeConfigMerger
    loader_of: Any = kube_config.KubeConfigLoader
    load_incluster: Any = incluster_config.load_incluster_config
    vars(exec_provider)["subprocess"] = SUBPROCESS
    try:
        merged = merger_of(files).config
        if merged is None:
            if cluster is None and "KUBERNETES_SERVICE_HOST" in os.environ:
                load_incluster(client_configuration=configuration)
                return IN_CLUSTER, configuration
            raise UserError(
                f"there is no kubeconfig at {files}",
                hint="`gcloud container clusters get-credentials NAME --location=LOCATION` makes one",
            )
        context = choose_context(cluster, *_contexts(merged.value))
        loader = loader_of(merged, active_context=context, config_base_path=None)
        with credential_errors(context):
            loader.load_and_set(configuration)
        check_certificates(configuration.ssl_ca_cert, configuration.cert_file, configuration.key_file)
    except (ConfigException, yaml.YAMLError, OSError, ValueError, TypeError, AttributeError) as error:
        is_another = isinstance(error, (TypeError, AttributeError))
        reason = "it is not a kubeconfig" if is_another else one_line(str(error))
        raise UserError(
            f"the kubeconfig {files} cannot be used: {reason}",
            hint="`kubectl config view` shows what is in it; KUBECONFIG names another",
        ) from error
    return context, configuration


def _contexts(config: object) -> tuple[Sequence[str], str]:
    """Names of all contexts, and the current one."""
    nodes = config.get("contexts") if isinstance(config, Mapping) else None
    values = [getattr(node, "value", node) for node in nodes] if isinstance(nodes, list) else []
    return [text(value, "name") for value in values], text(config, "current-context")
