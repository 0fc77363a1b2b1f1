"""Logs of pods through the API server, for hosts that have none in the run directory yet.

Those are hosts in their first seconds, and pods that ended before there was an attempt: without code,
without a bucket. All other lines are in the bucket, which keeps them longer and takes more readers.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from launcher.gke import names
from launcher.gke.api_errors import ClusterError
from launcher.gke.client import Cluster, connect
from launcher.gke.objects import PODS, label, name
from launcher.gke.observe import JOB_INDEX, JOBSET_NAME, POD_INDEX, RESTART_ATTEMPT, pod_host
from launcher.gke.of_run import own_jobset, target_of
from launcher.rundir import RunDir, host_order
from launcher.storage import is_remote
from launcher.summary import run_name
from recipes.contract import ExitCode
from recipes.errors import UserError

READERS = 32
LIMIT_BYTES = 8 * 2**20
"""Of each pod, from its beginning; what is beyond will be in the bucket."""
MAX_HOSTS = 64
"""Of a whole run: pods are asked one by one, through the API server; the others will be in the bucket."""
MAX_LISTED = 1000
"""Of them, in the order of their names: to list 12,736 keeps a busy API server for many seconds."""
LISTED_S = 5.0
"""How long a list of pods is used at least; one that took long is used for ten times as long."""


class PodLogs:
    """Output so far of a run's pods, by host; nothing where there is no cluster, or it does not answer.

    Args:
      run: whose pods.
      note: is told why lines are missing, once.
      slice_id: only pods of this slice.
      host_id: only pods of this number in their slice.
      monotonic: a clock.
    """

    def __init__(
        self,
        run: RunDir,
        note: Callable[[str], None],
        *,
        slice_id: int | None = None,
        host_id: int | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run, self._note, self._monotonic = run, note, monotonic
        indices = {JOB_INDEX: slice_id, POD_INDEX: host_id}
        self._chosen = [f"{key}={index}" for key, index in indices.items() if index is not None]
        self._more, self._said_more = False, False
        self._cluster: Cluster | None = None
        self._is_over = not is_remote(run.url)
        self._pods: Sequence[tuple[str, str]] = ()
        """Host and pod."""
        self._stale_s = 0.0
        self._pool = ThreadPoolExecutor(READERS, thread_name_prefix="pod-logs")

    def __call__(self, wants: Callable[[str], bool]) -> Mapping[str, Iterable[bytes]]:
        """Chunks of logs with times, of the hosts that are wanted; each is read when it is iterated over."""
        if not self._is_over and self._monotonic() >= self._stale_s:
            self._refresh()
        pods = self._bounded([pod for pod in self._pods if wants(pod[0])])
        ahead = _Ahead(self._pool, self._read, [pod for _, pod in pods])
        return {host: ahead.chunks(index) for index, (host, _) in enumerate(pods)}

    def _bounded(self, pods: Sequence[tuple[str, str]]) -> Sequence[tuple[str, str]]:
        if self._chosen:
            return pods
        if (self._more or len(pods) > MAX_HOSTS) and not self._said_more:
            self._said_more = True
            self._note(
                f"of the hosts that have nothing in the run directory yet only {min(len(pods), MAX_HOSTS)} "
                "are shown; --slice and --host show others"
            )
        return pods[:MAX_HOSTS]

    def _refresh(self) -> None:
        began_s = self._monotonic()
        try:
            self._pods = self._list()
        except UserError as error:
            self._note(f"{error.message}; only what is in the run directory is shown")
            self._is_over, self._pods = True, ()
        took_s = self._monotonic() - began_s
        self._stale_s = self._monotonic() + max(LISTED_S, 10 * took_s)

    def _list(self) -> Sequence[tuple[str, str]]:
        """The pods of the newest restart that have started."""
        cluster, run = self._connected(), run_name(self._run.url)
        if cluster is None:
            return ()
        labels = ",".join([f"{JOBSET_NAME}={run}", *self._chosen])
        limit = None if self._chosen else MAX_LISTED
        listing = cluster.list(
            PODS, labels=labels, fields="status.phase!=Pending", metadata_only=True, limit=limit
        )
        found, self._more = listing.items, listing.more
        newest = max((_restart(pod) for pod in found), default=0)
        pods = [(pod_host(pod), name(pod)) for pod in found if _restart(pod) == newest]
        return sorted(pods, key=lambda pod: host_order(pod[0]))

    def _connected(self) -> Cluster | None:
        """None when no cluster has pods of this run."""
        if self._cluster is not None:
            return self._cluster
        attempts = self._run.attempts()
        end = self._run.attempt_end(attempts[-1]) if attempts else None
        target = None if end and end.exit_code == ExitCode.COMPLETE else target_of(self._run)
        if target is not None:
            cluster = connect(target.cluster, target.namespace)
            if own_jobset(cluster, self._run, run_name(self._run.url)) is not None:
                self._cluster = cluster
        self._is_over = self._cluster is None
        return self._cluster

    def _read(self, pod: str) -> bytes:
        """Empty where the kubelet does not answer."""
        if self._cluster is not None:
            with contextlib.suppress(ClusterError):
                return self._cluster.log(pod, names.CONTAINER, limit_bytes=LIMIT_BYTES, timestamps=True)
        return b""


class _Ahead:
    """Reads a few pods beyond the one that is asked for: most readers want all, one after the other."""

    def __init__(self, pool: ThreadPoolExecutor, read: Callable[[str], bytes], pods: Sequence[str]) -> None:
        self._pool, self._read, self._pods = pool, read, pods
        self._futures: dict[int, Future[bytes]] = {}
        self._taken: set[int] = set()

    def chunks(self, index: int) -> Iterator[bytes]:
        """The log of one pod."""
        for near in range(index, min(index + READERS, len(self._pods))):
            if near not in self._futures and near not in self._taken:
                self._futures[near] = self._pool.submit(self._read, self._pods[near])
        self._taken.add(index)
        yield self._futures.pop(index).result()


def _restart(pod: object) -> int:
    restart = label(pod, RESTART_ATTEMPT)
    return int(restart) if restart.isascii() and restart.isdigit() else 0
