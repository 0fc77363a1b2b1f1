"""What the API server answers when it refuses, as one plain sentence with what to do. Pure.

Exit codes: 2 when the user or an administrator has to change something, 75 when waiting may help.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from launcher.gke.objects import Resource, items, text
from launcher.text import one_line
from recipes.contract import ExitCode
from recipes.errors import UserError

RETRIED = (429, 500, 502, 503, 504)
MAX_CHARS = 600
_USER = re.compile(r'User "([^"]*)" cannot ')
_WEBHOOK = re.compile(r'admission webhook "[^"]*" denied the request: ')
_CONNECTION = re.compile(r"^\w+\([^)]*\): ")
_PERMANENT = ("field not declared in schema", "failed to create typed patch object")
"""The API server answers 500 to these, although no retry helps."""


class ClusterError(UserError):
    """The cluster refused, or did not answer."""

    def __init__(self, message: str, *, hint: str = "", status: int = 0, exit_code: int = 2) -> None:
        super().__init__(message, hint=hint, exit_code=exit_code)
        self.status = status
        """HTTP status; 0 when there was no answer."""


class Missing(ClusterError):
    """There is no such object, namespace or kind."""


class Conflicting(ClusterError):
    """The object is another one, or belongs to somebody else."""


class Denied(ClusterError):
    """These credentials are not enough."""


class Refused(ClusterError):
    """The API server or a webhook finds the object wrong."""


class Unreachable(ClusterError):
    """No answer within the retries."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One request, for messages."""

    context: str
    namespace: str
    verb: str
    """As RBAC names it: get, list, patch, delete."""
    resource: Resource | None
    name: str = ""

    def what(self) -> str:
        if self.resource is None:
            return self.name
        return f"{self.resource.plural} {self.name}".rstrip()

    def where(self) -> str:
        inside = f"namespace {self.namespace} of " if self.resource and self.resource.namespaced else ""
        return f"{inside}cluster {self.context}"


def is_retried(status: int, body: bytes) -> bool:
    """Whether the same idempotent request may do better in a moment."""
    return status in RETRIED and not any(words in _message(status, body) for words in _PERMANENT)


def refusal(call: Call, status: int, body: bytes) -> ClusterError:
    """The error for an answer that is no success."""
    message = _message(status, body)
    if status == 401:
        return Denied(
            f"cluster {call.context} does not accept these credentials",
            hint="log in again, for GKE with `gcloud auth login`, or name another context in target.cluster",
            status=status,
        )
    if status == 403 and _USER.search(message):
        return _forbidden(call, message)
    if status == 404:
        return _missing(call, body, message)
    if status == 409:
        return Conflicting(f"{call.what()} in {call.where()}: {message}", status=status)
    if status in RETRIED and is_retried(status, body):
        return _failing(call, status, message)
    return _refused(call, status, body, message)


def is_untrusted(reason: str) -> bool:
    """Whether a connection failed because the server's certificate is not one that the kubeconfig trusts."""
    return "CERTIFICATE_VERIFY_FAILED" in reason


def unreachable(context: str, server: str, reason: str) -> Unreachable:
    """No connection, or no answer in time."""
    if is_untrusted(reason):
        return Unreachable(
            f"the certificate of {server} is not one that the kubeconfig trusts for cluster {context}:"
            f" {one_line(_CONNECTION.sub('', reason))}",
            hint="get the cluster's credentials again, or look at a proxy on the way",
        )
    return Unreachable(
        f"cluster {context} does not answer at {server}: {one_line(_CONNECTION.sub('', reason))}",
        hint="look at the network, a VPN or proxy, and whether the cluster still exists",
        exit_code=ExitCode.INFRASTRUCTURE,
    )


def no_namespace(context: str, namespace: str) -> Missing:
    return Missing(
        f"there is no namespace {namespace} in cluster {context}",
        hint="correct target.namespace or --namespace, or have the namespace made",
        status=404,
    )


def _forbidden(call: Call, message: str) -> Denied:
    user = _USER.search(message)
    who = user[1] if user else "this user"
    kind = call.resource.plural if call.resource else call.name
    if call.resource and call.resource.group:
        kind = f"{kind}.{call.resource.group}"
    hint = f"an administrator can grant {call.verb} on {kind} there (k8s/ has the roles that Muster needs)"
    if who == "system:anonymous":
        hint = "the kubeconfig gave no credentials: log in again, for GKE with `gcloud auth login`"
    return Denied(f"{who} may not {call.verb} {kind} in {call.where()}", hint=hint, status=403)


def _missing(call: Call, body: bytes, message: str) -> Missing:
    if text(_status(body), "details", "kind") == "namespaces":
        return no_namespace(call.context, call.namespace)
    if call.resource is not None and not text(_status(body), "details", "name"):
        return _not_served(call, call.resource)
    return Missing(f"there is no {call.what()} in {call.where()}: {message}", status=404)


def _not_served(call: Call, resource: Resource) -> Missing:
    kind = f"{resource.plural}.{resource.group}" if resource.group else resource.plural
    return Missing(
        f"cluster {call.context} does not serve {kind} {resource.version}",
        hint="`muster doctor` says what the cluster lacks",
        status=404,
    )


def _failing(call: Call, status: int, message: str) -> ClusterError:
    hint = "wait a little, then try again"
    if "failed calling webhook" in message:
        hint = "a controller of the cluster (JobSet or Kueue) is not up; an administrator can say why"
    return ClusterError(
        f"cluster {call.context} could not {call.verb} {call.what()}: {message}",
        hint=hint,
        status=status,
        exit_code=ExitCode.INFRASTRUCTURE,
    )


def _refused(call: Call, status: int, body: bytes, message: str) -> Refused:
    causes = [
        f"\n  {text(cause, 'field')}: {one_line(text(cause, 'message'))}"
        for cause in items(_status(body), "details", "causes")
        if text(cause, "field")
    ]
    # With causes the message only repeats them on one long line.
    reason = "".join(causes[:20]) if causes else f" {message}"
    return Refused(f"{call.what()} is refused by cluster {call.context}:{reason}", status=status)


def _status(body: bytes) -> object:
    """The body as a meta/v1 Status, or None when something else answered (a proxy)."""
    try:
        return json.loads(body)
    except ValueError:
        return None


def _message(status: int, body: bytes) -> str:
    message = text(_status(body), "message") or body.decode(errors="replace") or f"HTTP {status}"
    return one_line(_WEBHOOK.sub("", message), MAX_CHARS)
