"""The Cloud TPU API by its official client: the only importer of ``google.cloud.tpu_*`` and ``grpc``.

Nothing here waits for an operation: the state of the queued resource itself says how things are. Every
call has a timeout, and is repeated only where that is right. Imported on first use: it takes over a second.
"""

from __future__ import annotations

import functools
import ipaddress
import os
import threading
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from launcher.supervise.observation import Fault
from launcher.supervise.place import Refusal
from launcher.supervise.records import Trouble
from launcher.text import one_line
from launcher.tpu.faults import classify, classify_end
from launcher.tpu.machines import Node, Queued
from launcher.tpu.request import V2, V2ALPHA1, Request
from recipes.errors import UserError
from recipes.hardware import CPU
from recipes.schema import Recipe

ENDPOINT = "MUSTER_TPU_ENDPOINT"
"""``ADDRESS:PORT`` of a stand-in of the API on this machine, spoken to without encryption or credentials."""
CALL_TIMEOUT_S = 30.0
RETRY_S = 10.0
"""How long a call is repeated that the service did not answer as it should."""
PAGE = 1000
_UNANSWERED = ("UNAVAILABLE", "INTERNAL", "DEADLINE_EXCEEDED", "ABORTED", "UNKNOWN")


class Gone(Refusal):
    """There is nothing of that name."""


class Taken(Refusal):
    """There is something of that name already."""


def endpoint() -> str | None:
    """Where a stand-in listens, if one is to be used.

    Raises:
      UserError: it is not on this machine; credentials must not be sent unencrypted.
    """
    value = os.environ.get(ENDPOINT)
    if not value:
        return None
    host, _, port = value.rpartition(":")
    try:
        is_here = ipaddress.ip_address(host.strip("[]")).is_loopback and 0 < int(port) < 65536
    except ValueError:
        is_here = False
    if not is_here:
        raise UserError(
            f"{ENDPOINT}={value} is not a loopback ADDRESS:PORT",
            hint="it is for a stand-in on this machine; unset it for the Cloud TPU API",
        )
    return value


def check_endpoint(recipe: Recipe) -> None:
    """Raises UserError for a rehearsal on CPU devices where there is no stand-in to take it."""
    if recipe.hardware.generation == CPU and endpoint() is None:
        raise UserError(
            "hardware.generation=cpu with target=tpu is a rehearsal: the Cloud TPU API has TPUs only",
            hint=f"use target=local, or start a stand-in (docs/tpu-vm.md) and set {ENDPOINT}",
        )


class TpuApi:
    """Both versions of the API; safe to use from several threads."""

    def __init__(self, *, first_retry_s: float = 0.5) -> None:
        """See the class.

        Args:
          first_retry_s: before an unanswered call is repeated first; doubled each time.
        """
        self._first_retry_s = first_retry_s
        self._lock = threading.Lock()
        self._clients: dict[str, Any] = {}

    def create(self, asked: Request) -> None:
        """Has the service take a request; that it has is all that is waited for.

        Raises:
          Taken: something of that name is there.
          Refusal: the service refuses.
        """
        api = self._client(asked.version)
        message = {
            "parent": asked.parent,
            "queued_resource_id": asked.resource_id,
            "queued_resource": asked.body,
            # Repeated after a lost answer, it is the same request to the service.
            "request_id": str(uuid.uuid4()),
        }
        what = f"asking for {asked.resource_id} in {asked.parent}"
        self._call(api.create_queued_resource, message, what)

    def delete(self, name: str) -> None:
        """Has a queued resource removed with its nodes.

        Args:
          name: in full.

        Raises:
          Gone: there is none.
          Refusal: the service refuses.
        """
        api = self._client(V2)
        self._call(api.delete_queued_resource, {"name": name, "force": True}, f"removing {name}")

    def delete_node(self, name: str) -> None:
        """Has a node removed that no queued resource owns."""
        self._call(self._client(V2).delete_node, {"name": name}, f"removing {name}")

    def queued(self, parent: str) -> Sequence[Queued]:
        """Every queued resource of a zone, without nodes."""
        return [_queued(each) for each in self._listed("list_queued_resources", parent)]

    def nodes(self, parent: str) -> Sequence[Node]:
        """Every node of a zone."""
        return [_node(each) for each in self._listed("list_nodes", parent)]

    def guest_attribute(self, node: str, path: str) -> Mapping[str, str]:
        """What the hosts of a node have written: worker number -> value.

        Args:
          node: in full.
          path: ``NAMESPACE/KEY``.
        """
        message = {"name": node, "query_path": path}
        reply = self._call(self._client(V2).get_guest_attributes, message, f"asking the hosts of {node}")
        found: dict[str, str] = {}
        for number, worker in enumerate(reply.guest_attributes):
            for item in worker.query_value.items:
                found[str(number)] = one_line(item.value)
        return found

    def _listed(self, method: str, parent: str) -> Sequence[Any]:
        call = getattr(self._client(V2), method)
        pages = self._call(call, {"parent": parent, "page_size": PAGE}, f"listing {parent}", _whole)
        return [type(each).pb(each) for each in pages]

    def _call(
        self,
        method: Callable[..., Any],
        message: Mapping[str, Any],
        what: str,
        finish: Callable[[Any], Any] = lambda reply: reply,
    ) -> Any:
        from google.api_core import exceptions, retry
        from google.auth.exceptions import GoogleAuthError

        try:
            return finish(
                method(
                    request=message,
                    timeout=CALL_TIMEOUT_S,
                    retry=retry.Retry(
                        predicate=_is_unanswered,
                        initial=self._first_retry_s,
                        maximum=10.0,
                        multiplier=2.0,
                        timeout=RETRY_S,
                    ),
                )
            )
        except exceptions.RetryError as error:
            raise _refusal(what, error.cause) from error
        except exceptions.GoogleAPICallError as error:
            raise _refusal(what, error) from error
        except GoogleAuthError as error:
            raise _no_credentials(error) from error
        except (ValueError, TypeError, KeyError) as error:
            # What the client itself refuses to send.
            fault = Fault(trouble=Trouble.BAD_REQUEST, code="CLIENT", message=one_line(str(error)))
            raise Refusal(what, fault) from error

    def _client(self, version: str) -> Any:
        with self._lock:
            if version not in self._clients:
                self._clients[version] = _connect(version)
            return self._clients[version]


def _connect(version: str) -> Any:
    from google.auth.exceptions import GoogleAuthError

    api = _module(version)
    where = endpoint()
    if where is None:
        try:
            return api.TpuClient()
        except GoogleAuthError as error:
            raise _no_credentials(error) from error
    import grpc

    transport = api.TpuClient.get_transport_class("grpc")
    # As the client's own channels are made: a page of large zones is tens of megabytes.
    channel = grpc.insecure_channel(where, options=[("grpc.max_receive_message_length", -1)])
    return api.TpuClient(transport=transport(channel=channel))


@functools.cache
def _module(version: str) -> Any:
    if version == V2ALPHA1:
        from google.cloud import tpu_v2alpha1

        return tpu_v2alpha1
    from google.cloud import tpu_v2

    return tpu_v2


def _no_credentials(error: Exception) -> UserError:
    return UserError(
        f"no credentials for the Cloud TPU API: {one_line(str(error))}",
        hint="log in with `gcloud auth application-default login`, or use a service account",
    )


def _whole(pager: Any) -> Sequence[Any]:
    """All pages: later ones are called for while they are read."""
    return list(pager)


def _is_unanswered(error: BaseException) -> bool:
    """Quota and stock-outs are answers, though the library takes them for transient."""
    return _code(error) in _UNANSWERED


def _code(error: Any) -> str:
    status = getattr(error, "grpc_status_code", None)
    return str(status.name) if status is not None else "UNKNOWN"


def _refusal(what: str, error: Any) -> Refusal:
    code = _code(error)
    fault = classify(code, str(getattr(error, "reason", None) or ""), str(getattr(error, "message", error)))
    kind = {"NOT_FOUND": Gone, "ALREADY_EXISTS": Taken}.get(code, Refusal)
    return kind(what, fault)


# Messages are read as plain protobuf: unknown states are then numbers, not warnings.


def _name_of(enum: Any, value: int) -> str:
    try:
        return str(enum(value).name)
    except ValueError:
        return f"STATE_{value}"


def _seconds(timestamp: Any) -> float:
    return float(timestamp.seconds + timestamp.nanos / 1e9)


def _queued(message: Any) -> Queued:
    specs = list(message.tpu.node_spec)
    first = specs[0].node if specs else None
    state = message.state
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        word = _name_of(_module(V2).QueuedResourceState.State, state.state)
    return Queued(
        name=message.name,
        state=word,
        num_slices=sum(spec.multislice_params.node_count or 1 for spec in specs),
        capacity=_capacity(message),
        labels=dict(first.labels) if first is not None else {},
        created_s=_seconds(message.create_time),
        fault=_failed(state) if word == "FAILED" else None,
    )


def _capacity(message: Any) -> str:
    if message.reservation_name:
        return "reserved"
    return "spot" if message.WhichOneof("tier") == "spot" else "on_demand"


def _failed(state: Any) -> Fault:
    from google.rpc import code_pb2

    error = state.failed_data.error
    names = {number: name for name, number in code_pb2.Code.items()}
    return classify_end(names.get(error.code, str(error.code)), "", error.message)


def _node(message: Any) -> Node:
    kind = _module(V2).Node
    return Node(
        name=message.name,
        state=_name_of(kind.State, message.state),
        health=_name_of(kind.Health, message.health),
        owner=message.queued_resource,
        labels=dict(message.labels),
        created_s=_seconds(message.create_time),
    )
