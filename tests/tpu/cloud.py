"""A stand-in for the Cloud TPU API on loopback: real gRPC, both versions, for the real client.

    with TpuCloud(folder) as cloud:                  # real time: its agenda is worked off by a thread
        os.environ["MUSTER_TPU_ENDPOINT"] = cloud.endpoint
        cloud.preempt("run-1a2b3c-1")

With a ManualClock nothing happens until ``advance``. What the documentation leaves open is switchable
(``Ways``). Quota is refused when asked for; without stock a request waits. Both count slices, by zone.
"""

from __future__ import annotations

import heapq
import importlib
import itertools
import re
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from google.longrunning import operations_pb2
from google.protobuf import empty_pb2
from grpc import StatusCode
from grpc_status import rpc_status

from tests.tpu.versions import as_v2
from tests.tpu.vocabulary import (
    QUICK,
    Fault,
    ManualClock,
    Refused,
    Timing,
    Ways,
    Weather,
    ZoneState,
    find,
    hosts_of,
    page,
)
from tests.tpu.workers import Worker, network

__all__ = ["QUICK", "ManualClock", "Timing", "TpuCloud", "Ways"]
RPCS = (
    "CreateQueuedResource",
    "GetQueuedResource",
    "ListQueuedResources",
    "DeleteQueuedResource",
    "CreateNode",
    "GetNode",
    "ListNodes",
    "DeleteNode",
    "GetGuestAttributes",
)
VERSIONS = ("v2", "v2alpha1")
TICK_S = 0.05


@dataclass(kw_only=True, slots=True)
class _State:
    queued: dict[str, Any] = field(default_factory=dict)
    nodes: dict[str, Any] = field(default_factory=dict)
    workers: dict[str, list[Worker]] = field(default_factory=dict)
    operations: dict[str, Any] = field(default_factory=dict)
    requests: dict[str, tuple[bytes, str]] = field(default_factory=dict)


class TpuCloud:
    """Everything is decided on the clock: each RPC and each tick first do what has fallen due, in order."""

    def __init__(
        self,
        folder: Path,
        *,
        clock: Callable[[], float] = time.time,
        timing: Timing | None = None,
        ways: Ways | None = None,
        environ: Mapping[str, str] | None = None,
        with_workers: bool = True,
    ) -> None:
        self.folder, self.clock = folder, clock
        self.timing = timing or (Timing() if isinstance(clock, ManualClock) else QUICK)
        self.ways, self.environ, self.with_workers = ways or Ways(), dict(environ or {}), with_workers
        self.api: Any = importlib.import_module("google.cloud.tpu_v2")
        self.alpha: Any = importlib.import_module("google.cloud.tpu_v2alpha1")
        self.states = self.api.QueuedResourceState.State
        self.node_states = self.api.Node.State
        self.zones: dict[str, ZoneState] = defaultdict(ZoneState)
        self.calls: Counter[str] = Counter()
        self.history: list[tuple[float, str, str]] = []
        """Time, id and state of each queued resource and node, as they changed."""
        self.on_boot: Callable[[str], None] = lambda node: None
        self.on_lost: Callable[[str], None] = lambda node: None
        self.weather: Weather | None = None
        self.doubles: list[str] = []
        """Runs that had two sets of machines at once: never to happen."""
        self._homes: dict[str, set[str]] = defaultdict(set)
        self._faults: list[Fault] = []
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._count, self._slices = itertools.count(1), itertools.count(1)
        self._network = network() if with_workers else 0
        self._lock = threading.RLock()
        self._done = threading.Event()
        self._it = _State()
        self.now = clock()

    # --- the world outside the API: what tests do to it

    def advance(self, seconds: float) -> None:
        """Moves a ManualClock on, and everything that happens until then."""
        assert isinstance(self.clock, ManualClock)
        until_s = self.clock.now + seconds
        with self._lock:
            while self._agenda and self._agenda[0][0] <= until_s:
                self.clock.now = max(self.clock.now, self._agenda[0][0])
                self._tick()
            self.clock.now = until_s
            self._tick()

    def stock(self, zone: str, slices: int) -> None:
        """How many slices a zone has in all."""
        with self._lock:
            self.zones[zone].stock = slices

    def quota(self, zone: str, slices: int) -> None:
        """How many slices may be asked for in a zone."""
        with self._lock:
            self.zones[zone].quota = slices

    def fault(
        self,
        rpc: str,
        code: StatusCode,
        text: str = "injected",
        *,
        times: int = 1,
        is_committed: bool = False,
        reason: str = "",
    ) -> None:
        """The next calls of an RPC fail."""
        refused = Refused(code, text, reason=reason)
        self._faults.append(Fault(rpc=rpc, refused=refused, times=times, is_committed=is_committed))

    def preempt(self, node_id: str) -> None:
        """A notice now; the VMs die after ``notice_s``, or once nothing runs on them."""
        with self._lock:
            self._tick()
            name = self._full(node_id)
            for worker in self._it.workers.get(name, ()):
                worker.notice()
            self._after(self.timing.notice_s, lambda: self._lose(name))

    def lose(self, node_id: str) -> None:
        """The VMs die now, without a notice."""
        with self._lock:
            self._tick()
            self._lose(self._full(node_id))

    def put_state(self, resource_id: str, state: int, health: int = 1) -> None:
        """A queued resource or node gets a state, which may be one that no client knows yet."""
        with self._lock:
            for name, queued in self._it.queued.items():
                if name.rpartition("/")[2] == resource_id:
                    queued.state.state = state
            for name, node in self._it.nodes.items():
                if name.rpartition("/")[2] == resource_id:
                    node.state, node.health = state, health

    def fail(self, resource_id: str, code: StatusCode, text: str) -> None:
        """A queued resource ends in FAILED."""
        with self._lock:
            name = next(name for name in self._it.queued if name.endswith(f"/{resource_id}"))
            self._enter(self._it.queued[name], "FAILED", error=Refused(code, text))

    def workers(self, node_id: str) -> list[Worker]:
        return self._it.workers.get(self._full(node_id), [])

    def all_workers(self) -> list[Worker]:
        with self._lock:
            return [worker for workers in self._it.workers.values() for worker in workers]

    def queued_ids(self) -> list[str]:
        return self._ids(self._it.queued)

    def state(self, resource_id: str) -> str:
        """State of a queued resource; empty when there is none."""
        with self._lock:
            self._tick()
            for name, queued in self._it.queued.items():
                if name.endswith(f"/{resource_id}"):
                    return str(self.states(queued.state.state).name)
        return ""

    def node_ids(self) -> list[str]:
        return self._ids(self._it.nodes)

    def _ids(self, kind: Mapping[str, Any]) -> list[str]:
        with self._lock:
            self._tick()
            return sorted(name.rpartition("/")[2] for name in kind)

    def states_of(self, resource_id: str) -> list[str]:
        """Every state that something had, in order."""
        return [state for _, name, state in self.history if name == resource_id]

    # --- time and bookkeeping

    def _full(self, node_id: str) -> str:
        found = [name for name in self._it.nodes if name.rpartition("/")[2] == node_id]
        assert found, f"no node {node_id}: {sorted(self._it.nodes)}"
        return found[0]

    def _after(self, seconds: float, do: Callable[[], None], *, still: object = None) -> None:
        """Run later; of a queued resource, only if it is there still and in the same state."""
        state = _state_of(still)

        def run() -> None:
            if still is None or self._is_still(still, state):
                do()

        heapq.heappush(self._agenda, (self.now + seconds, next(self._count), run))

    def _is_still(self, queued: object, state: int) -> bool:
        return any(each is queued for each in self._it.queued.values()) and _state_of(queued) == state

    def _tick(self) -> None:
        while self._agenda and self._agenda[0][0] <= self.clock():
            self.now, _, do = heapq.heappop(self._agenda)
            do()
        self.now = self.clock()

    def _keep_ticking(self) -> None:
        while not self._done.wait(TICK_S):
            with self._lock:
                self._tick()

    def _pb(self, name: str, **fields: Any) -> Any:
        return getattr(self.api, name).pb()(**fields)

    def _enter(self, queued: Any, state: str, *, by: str = "SERVICE", error: Refused | None = None) -> None:
        queued.state.state = self.states[state]
        queued.state.state_initiator = self.api.QueuedResourceState.StateInitiator[by]
        if error is not None:
            queued.state.failed_data.error.CopyFrom(error.status)
        self.history.append((self.now, queued.name.rpartition("/")[2], state))
        self._look_for_doubles(queued, state)

    def _look_for_doubles(self, queued: Any, state: str) -> None:
        """Probes aside, one run has machines in one queued resource only."""
        labels = queued.tpu.node_spec[0].node.labels
        home = labels.get("muster-home", "")
        if not home or labels.get("muster-probe") == "true":
            return
        if state in ("PROVISIONING", "ACTIVE"):
            self._homes[home].add(queued.name)
        elif state != "DELETING":
            self._homes[home].discard(queued.name)
        if len(self._homes[home]) > 1:
            self.doubles.append(home)

    def _slices_counted(self, parent: str) -> int:
        """What the quota counts: everything asked for that was not deleted, in whatever state."""
        own = sum(
            len(self._wanted(queued)) for name, queued in self._it.queued.items() if name.startswith(parent)
        )
        return own + sum(
            name.startswith(parent) and not node.queued_resource for name, node in self._it.nodes.items()
        )

    def _slices_in_use(self, parent: str) -> int:
        gone = self.node_states.PREEMPTED, self.node_states.TERMINATED
        return sum(
            name.startswith(parent) and node.state not in gone for name, node in self._it.nodes.items()
        )

    def _wanted(self, queued: Any) -> dict[str, Any]:
        """Nodes of a queued resource by full name."""
        found: dict[str, Any] = {}
        for spec in queued.tpu.node_spec:
            place = "/".join(queued.name.split("/")[:4])
            count = spec.multislice_params.node_count
            prefix = spec.multislice_params.node_id_prefix or queued.name.rpartition("/")[2]
            ids = [f"{prefix}-{number}" for number in range(count)] if count else [spec.node_id]
            found |= {f"{place}/nodes/{node_id}": spec.node for node_id in ids}
        return found

    def _nodes_of(self, name: str) -> list[Any]:
        return [node for _, node in sorted(self._it.nodes.items()) if node.queued_resource == name]

    def _admit(self, parent: str, resource_id: str, name: str, taken: Mapping[str, Any], slices: int) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_.~+%-]+", resource_id):
            raise Refused(StatusCode.INVALID_ARGUMENT, f"Invalid resource id {resource_id!r}.")
        if name in taken:
            raise Refused(StatusCode.ALREADY_EXISTS, f"Resource '{name}' already exists.")
        zone = parent.rpartition("/")[2]
        if self._slices_counted(parent) + slices > self.zones[zone].quota:
            limit = f"Limit: {self.zones[zone].quota} in zone {zone}."
            text = f"Quota limit 'TPUsPerProjectPerZone' has been exceeded. {limit}"
            raise Refused(StatusCode.RESOURCE_EXHAUSTED, text, reason="RESOURCE_QUOTA_EXCEEDED", zone=zone)

    def _operation(self, verb: str, target: str, request: Any = None) -> Any:
        place = "/".join(target.split("/")[:4])
        operation = operations_pb2.Operation(name=f"{place}/operations/operation-{next(self._count)}")
        operation.metadata.Pack(self._pb("OperationMetadata", verb=verb, target=target))
        self._it.operations[operation.name] = operation
        if request_id := getattr(request, "request_id", ""):
            self._it.requests[request_id] = request.SerializeToString(deterministic=True), operation.name
        return operation

    # --- the machines

    def _build(self, name: str, spec: Any, owner: str) -> Any:
        node = self._it.nodes[name] = self._pb("Node")
        node.CopyFrom(spec)
        node.name, node.queued_resource, node.state = name, owner, self.node_states.CREATING
        node.create_time.FromNanoseconds(int(self.now * 1e9))
        number, self._it.workers[name] = next(self._slices), []
        for index in range(hosts_of(node.accelerator_type) if self.with_workers else 0):
            ip = f"127.{self._network}.{number % 250 + 1}.{index + 1}"
            folder = self.folder / f"{name.rpartition('/')[2]}.{number}" / f"worker-{index}"
            worker = Worker(
                ip=ip, folder=folder, index=index, node=name.rpartition("/")[2], environ=self.environ
            )
            self._it.workers[name].append(worker)
            node.network_endpoints.add(ip_address=ip, port=8470)
        return node

    def _boot(self, nodes: Sequence[Any]) -> None:
        first = self._it.workers[nodes[0].name][:1] if nodes else []
        for slice_id, node in enumerate(nodes):
            node.state, node.health = self.node_states.READY, self.api.Node.Health.HEALTHY
            node.multislice_node = len(nodes) > 1
            workers = self._it.workers[node.name]
            for worker in workers:
                facts = {
                    "ACCELERATOR_TYPE": node.accelerator_type,
                    "NODE_ID": node.name.rpartition("/")[2],
                    "WORKER_ID": str(worker.index),
                }
                if len(nodes) > 1 and first:
                    facts |= {
                        "MEGASCALE_COORDINATOR_ADDRESS": first[0].ip,
                        "MEGASCALE_NUM_SLICES": str(len(nodes)),
                        "MEGASCALE_SLICE_ID": str(slice_id),
                    }
                worker.attributes = {
                    **node.metadata,
                    "agent-worker-number": str(worker.index),
                    "accelerator-type": node.accelerator_type,
                    "worker-network-endpoints": ",".join(f"unknown:unknown:{peer.ip}" for peer in workers),
                    "tpu-env": "".join(f"{key}: '{value}'\n" for key, value in facts.items()),
                }
                worker.boot()
            self.history.append((self.now, node.name.rpartition("/")[2], "READY"))
            self.on_boot(node.name.rpartition("/")[2])

    def reboot(self, node_id: str) -> None:
        """The VMs of a node restart: their startup scripts run again on the same disks."""
        with self._lock:
            for worker in self.workers(node_id):
                worker.halt()
                worker.boot()

    def _destroy(self, nodes: Sequence[Any]) -> None:
        for node in nodes:
            self.on_lost(node.name.rpartition("/")[2])
            del self._it.nodes[node.name]
            for worker in self._it.workers.pop(node.name):
                worker.close()

    def _lose(self, name: str) -> None:
        node = self._it.nodes.get(name)
        if node is None or node.state == self.node_states.PREEMPTED:
            return
        node.state = self.node_states.PREEMPTED
        self.history.append((self.now, name.rpartition("/")[2], "PREEMPTED"))
        self.on_lost(name.rpartition("/")[2])
        for worker in self._it.workers[name]:
            worker.halt()
        owner = self._it.queued.get(node.queued_resource)
        if self.ways.stays_active or owner is None or owner.state.state != self.states.ACTIVE:
            return
        self._enter(owner, "SUSPENDING")
        self._after(self.timing.suspend_s, lambda: self._suspended(owner), still=owner)

    def _suspended(self, owner: Any) -> None:
        for sibling in self._nodes_of(owner.name):
            for worker in self._it.workers[sibling.name]:
                worker.halt()
            if sibling.state != self.node_states.PREEMPTED:
                sibling.state = self.node_states.TERMINATED
                self.on_lost(sibling.name.rpartition("/")[2])
        if not self.ways.lists_nodes_after_suspension:
            self._destroy(self._nodes_of(owner.name))
        self._enter(owner, "SUSPENDED")

    # --- the API: one method an RPC, under the RPC's own name

    def CreateQueuedResource(self, request: Any) -> Any:
        name = f"{request.parent}/queuedResources/{request.queued_resource_id}"
        queued = self._pb("QueuedResource")
        queued.CopyFrom(request.queued_resource)
        queued.name = name
        wanted = self._wanted(queued)
        self._admit(request.parent, request.queued_resource_id, name, self._it.queued, len(wanted))
        if taken := wanted.keys() & self._it.nodes.keys():
            raise Refused(StatusCode.ALREADY_EXISTS, f"Resource '{min(taken)}' already exists.")
        queued.create_time.FromNanoseconds(int(self.now * 1e9))
        self._it.queued[name] = queued
        self._enter(queued, "CREATING", by="USER")
        operation = self._operation("create", name, request)

        def accepted() -> None:
            self._enter(queued, "ACCEPTED")
            operation.done = True
            operation.response.Pack(queued)
            self._after(self.timing.queue_s, lambda: self._wait(queued), still=queued)

        self._after(self.timing.accept_s, accepted, still=queued)
        return operation

    def _wait(self, queued: Any) -> None:
        self._enter(queued, "WAITING_FOR_RESOURCES")
        self._after(self.timing.queue_s, lambda: self._provision(queued), still=queued)

    def _provision(self, queued: Any) -> None:
        wanted, parent = self._wanted(queued), "/".join(queued.name.split("/")[:4])
        until_s = queued.queueing_policy.valid_until_duration.ToNanoseconds() / 1e9
        if until_s and self.now > queued.create_time.ToNanoseconds() / 1e9 + until_s:
            error = Refused(StatusCode.DEADLINE_EXCEEDED, "The request was not fulfilled before valid_until.")
            return self._enter(queued, "FAILED", error=error)
        if self._slices_in_use(parent) + len(wanted) > self.zones[parent.rpartition("/")[2]].stock:
            return self._after(self.timing.queue_s, lambda: self._provision(queued), still=queued)
        self._enter(queued, "PROVISIONING")
        for node, spec in wanted.items():
            self._build(node, spec, queued.name)

        def active() -> None:
            self._boot(self._nodes_of(queued.name))
            self._enter(queued, "ACTIVE")

        return self._after(self.timing.provision_s, active, still=queued)

    def GetQueuedResource(self, request: Any) -> Any:
        return find(self._it.queued, request.name)

    def ListQueuedResources(self, request: Any) -> Any:
        return page(self._it.queued, request, "queued_resources", self._pb("ListQueuedResourcesResponse"))

    def DeleteQueuedResource(self, request: Any) -> Any:
        queued = find(self._it.queued, request.name)
        nodes, value = self._nodes_of(queued.name), queued.state.state
        if value == self.states.DELETING and self.ways.refuses_second_delete:
            raise Refused(
                StatusCode.FAILED_PRECONDITION, f"Queued resource '{queued.name}' is being deleted."
            )
        if value == self.states.SUSPENDING:
            raise Refused(
                StatusCode.FAILED_PRECONDITION, f"Queued resource '{queued.name}' is being suspended."
            )
        free = (self.states.ACCEPTED, self.states.FAILED, self.states.SUSPENDED)
        if nodes and not request.force and value not in free:
            raise Refused(StatusCode.FAILED_PRECONDITION, "It has nodes: delete them first, or use force.")
        operation = self._operation("delete", queued.name, request)
        self._enter(queued, "DELETING", by="USER")

        def deleted() -> None:
            self._destroy(self._nodes_of(queued.name))
            del self._it.queued[queued.name]
            self._look_for_doubles(queued, "GONE")
            self.history.append((self.now, queued.name.rpartition("/")[2], "GONE"))
            operation.done = True
            operation.response.Pack(empty_pb2.Empty())

        self._after(self.timing.delete_s, deleted, still=queued)
        return operation

    def CreateNode(self, request: Any) -> Any:
        name = f"{request.parent}/nodes/{request.node_id}"
        self._admit(request.parent, request.node_id, name, self._it.nodes, 1)
        operation = self._operation("create", name, request)
        node = self._build(name, request.node, "")
        self._after(self.timing.provision_s, lambda: self._boot([node]) if name in self._it.nodes else None)
        return operation

    def GetNode(self, request: Any) -> Any:
        return find(self._it.nodes, request.name)

    def ListNodes(self, request: Any) -> Any:
        return page(self._it.nodes, request, "nodes", self._pb("ListNodesResponse"))

    def DeleteNode(self, request: Any) -> Any:
        node = find(self._it.nodes, request.name)
        operation = self._operation("delete", node.name, request)
        self._destroy([node])
        operation.done = True
        operation.response.Pack(empty_pb2.Empty())
        return operation

    def GetGuestAttributes(self, request: Any) -> Any:
        find(self._it.nodes, request.name)
        reply = self._pb("GetGuestAttributesResponse")
        namespace, _, key = request.query_path.strip("/").partition("/")
        for worker in self._it.workers[request.name]:
            items = reply.guest_attributes.add(query_path=request.query_path).query_value.items
            for (its_namespace, its_key), value in sorted(worker.guest.items()):
                if namespace in ("", its_namespace) and key in ("", its_key):
                    items.add(namespace=its_namespace, key=its_key, value=value)
        return reply

    def GetOperation(self, request: Any) -> Any:
        return find(self._it.operations, request.name)

    # --- the wire

    def _handler(self, rpc: str, request_type: Any, version: str) -> grpc.RpcMethodHandler:
        def call(raw: bytes, context: grpc.ServicerContext) -> bytes:
            with self._lock:
                self._tick()
                self.calls[rpc] += 1
                refused, is_committed = self._due_fault(rpc)
                try:
                    if refused and not is_committed:
                        raise refused
                    request = (
                        as_v2(request_type.FromString(raw), rpc)
                        if version == "v2alpha1"
                        else request_type.FromString(raw)
                    )
                    reply = self._replayed(request) or getattr(self, rpc)(request)
                    if refused:
                        raise refused
                    return bytes(reply.SerializeToString())
                except Refused as error:
                    context.abort_with_status(rpc_status.to_status(error.status))
                    raise

        return grpc.unary_unary_rpc_method_handler(call)

    def _due_fault(self, rpc: str) -> tuple[Refused | None, bool]:
        for fault in self._faults:
            if fault.rpc == rpc and fault.times > 0:
                fault.times -= 1
                return fault.refused, fault.is_committed
        weather = self.weather
        if weather is not None and weather.random.random() < weather.rate:
            code = weather.random.choice(
                [
                    StatusCode.UNAVAILABLE,
                    StatusCode.INTERNAL,
                    StatusCode.DEADLINE_EXCEEDED,
                    StatusCode.UNKNOWN,
                ]
            )
            return Refused(code, "bad weather"), weather.random.random() < 0.5
        return None, False

    def _replayed(self, request: Any) -> Any:
        """The first operation of a request that came before; an id may not be used for two."""
        seen = self._it.requests.get(getattr(request, "request_id", "") or "none")
        if seen and seen[0] != request.SerializeToString(deterministic=True):
            raise Refused(StatusCode.INVALID_ARGUMENT, "request_id was used for another request.")
        return self._it.operations[seen[1]] if seen else None

    def __enter__(self) -> TpuCloud:
        unlimited = [("grpc.max_send_message_length", -1)]
        self._server = grpc.server(futures.ThreadPoolExecutor(8), options=unlimited)
        for version, api in (("v2", self.api), ("v2alpha1", self.alpha)):
            handlers = {rpc: self._handler(rpc, getattr(api, f"{rpc}Request").pb(), version) for rpc in RPCS}
            service = grpc.method_handlers_generic_handler(f"google.cloud.tpu.{version}.Tpu", handlers)
            self._server.add_generic_rpc_handlers((service,))
        get = {"GetOperation": self._handler("GetOperation", operations_pb2.GetOperationRequest, "v2")}
        operations = grpc.method_handlers_generic_handler("google.longrunning.Operations", get)
        self._server.add_generic_rpc_handlers((operations,))
        self.endpoint = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()
        if not isinstance(self.clock, ManualClock):
            threading.Thread(target=self._keep_ticking, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._server.stop(0.1).wait()
        with self._lock:
            self._destroy(list(self._it.nodes.values()))


def _state_of(queued: Any) -> int:
    return 0 if queued is None else int(queued.state.state)
