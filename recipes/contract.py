"""What launcher and trainer agree on: exit codes, environment and run-directory layout.

The launcher never imports the trainer and the trainer never imports the launcher; both import this.
"""

from __future__ import annotations

import enum
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


class ExitCode(enum.IntEnum):
    """Exit codes of agent, trainer and command line; the table is published in docs/exit-codes.md."""

    COMPLETE = 0
    """The run is complete (command line: the command did what it says)."""
    EXPERIMENT_FAILED = 1
    """The experiment itself failed (non-finite loss, an exception in the step): fail at once."""
    BAD_INPUT = 2
    """A recipe, a file or a setting is wrong: fail at once, with the message."""
    PREEMPTED = 42
    """Stopped cleanly after a notice, checkpoint committed: restart, not counted."""
    INFRASTRUCTURE = 75
    """A peer was lost, the runtime failed or hung: restart, counted."""


RUN_NAME_PATTERN = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")
"""Run names: at most 40 characters, so that JobSet, pod and service names built from them fit 63."""

SCHEMA_VERSION = 1
"""Version of the run directory's layout, recorded in recipe.yaml."""


def is_run_name(name: str) -> bool:
    """Whether ``name`` may name a run (ASCII lower case, digits and hyphens, at most 40)."""
    return RUN_NAME_PATTERN.fullmatch(name) is not None


class Env(enum.StrEnum):
    """Environment variables that the agent reads and hands on to the trainer."""

    RUN_DIR = "MUSTER_RUN_DIR"
    """Run directory: a local path or gs://bucket/prefix."""
    ATTEMPT = "MUSTER_ATTEMPT"
    """Attempt number, from 1, unique within the run."""
    SLICE_ID = "MUSTER_SLICE_ID"
    NUM_SLICES = "MUSTER_NUM_SLICES"
    HOST_ID = "MUSTER_HOST_ID"
    """Index of this host within its slice."""
    HOSTS_PER_SLICE = "MUSTER_HOSTS_PER_SLICE"
    COORDINATOR = "MUSTER_COORDINATOR"
    """address:port of the JAX coordination service."""
    GRACE_PERIOD_S = "MUSTER_GRACE_PERIOD_S"
    """Seconds between SIGTERM and SIGKILL."""
    SCRATCH_DIR = "MUSTER_SCRATCH_DIR"
    """Local directory of this host and attempt: progress, logs, metrics before they are shipped."""


class PodEnv(enum.StrEnum):
    """What the pods of a JobSet are given beside :class:`Env`; ATTEMPT is known once they have met."""

    BUNDLE = "MUSTER_BUNDLE"
    """``sha256:<hex>`` of the code, as a tar archive, below :data:`BUNDLES`; absent: the image has it."""
    RECIPE = "MUSTER_RECIPE"
    """The recipe that was launched, relative to the run directory: safe changes are in it."""
    JOBSET_UID = "MUSTER_JOBSET_UID"
    RESTART_ATTEMPT = "MUSTER_RESTART_ATTEMPT"
    """JobSet's; together with its uid the same in all pods that belong together."""
    POD_NAME = "MUSTER_POD_NAME"
    POD_UID = "MUSTER_POD_UID"
    POD_IP = "MUSTER_POD_IP"
    NODE_NAME = "MUSTER_NODE_NAME"
    TERMINATION_LOG = "MUSTER_TERMINATION_LOG"
    """File whose content Kubernetes shows as the container's last words."""


BUNDLES = ".bundles"
"""Beside the run directories, in ``run.root``: ``<sha256 hex of the tar>.tar.gz``."""

COORDINATOR_PORT = 8482
"""Of JAX's coordination service; also the port that JAX itself uses on Cloud TPU."""
GANG_PORT = 8483
"""Where the agent of process 0 tells the others which attempt this is."""
MEGASCALE_PORT = 8081
"""Of the transport between slices."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostContext:
    """Who one process is within one attempt of a run. One process a host."""

    run_dir: str
    attempt: int
    slice_id: int
    num_slices: int
    host_id: int
    hosts_per_slice: int
    coordinator: str
    grace_period_s: float
    scratch_dir: str

    @property
    def process_id(self) -> int:
        """Rank over all slices; slices are contiguous."""
        return self.slice_id * self.hosts_per_slice + self.host_id

    @property
    def num_processes(self) -> int:
        return self.num_slices * self.hosts_per_slice

    @property
    def host_name(self) -> str:
        return host_name(self.slice_id, self.host_id)

    def to_env(self) -> dict[str, str]:
        """The variables of :class:`Env` that say the same as this object."""
        return {
            Env.RUN_DIR: self.run_dir,
            Env.ATTEMPT: str(self.attempt),
            Env.SLICE_ID: str(self.slice_id),
            Env.NUM_SLICES: str(self.num_slices),
            Env.HOST_ID: str(self.host_id),
            Env.HOSTS_PER_SLICE: str(self.hosts_per_slice),
            Env.COORDINATOR: self.coordinator,
            Env.GRACE_PERIOD_S: str(self.grace_period_s),
            Env.SCRATCH_DIR: self.scratch_dir,
        }

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> HostContext | None:
        """The context that the agent set, or None when there is none (a stand-alone trainer).

        Raises:
          ValueError: some variables are set and others are missing or malformed.
        """
        if Env.RUN_DIR not in environ:
            return None
        missing = [name.value for name in Env if name not in environ]
        if missing:
            raise ValueError(f"{Env.RUN_DIR.value} is set but {', '.join(missing)} are not")
        return cls(
            run_dir=environ[Env.RUN_DIR],
            attempt=int(environ[Env.ATTEMPT]),
            slice_id=int(environ[Env.SLICE_ID]),
            num_slices=int(environ[Env.NUM_SLICES]),
            host_id=int(environ[Env.HOST_ID]),
            hosts_per_slice=int(environ[Env.HOSTS_PER_SLICE]),
            coordinator=environ[Env.COORDINATOR],
            grace_period_s=float(environ[Env.GRACE_PERIOD_S]),
            scratch_dir=environ[Env.SCRATCH_DIR],
        )


def host_name(slice_id: int, host_id: int) -> str:
    """How a host is named in logs, heartbeats and messages, for example ``s0-h3``."""
    return f"s{slice_id}-h{host_id}"


def host_names(num_slices: int, hosts_per_slice: int) -> Sequence[str]:
    """Names of all hosts, in the order of their ranks."""
    pairs = itertools.product(range(num_slices), range(hosts_per_slice))
    return tuple(itertools.starmap(host_name, pairs))


class RunPath(enum.StrEnum):
    """Names inside a run directory (relative to it)."""

    RECIPE = "recipe.yaml"
    """Resolved recipe with its fingerprint; written once."""
    LOCK = "lock.json"
    """What the run was started from: code, versions, plan."""
    FORK = "fork.json"
    """Which checkpoint of another run this one begins with; only in forks."""
    LEASE = "lease.json"
    """Who may act on this run now."""
    STOP = "stop.json"
    """A request to stop cleanly; removed by the next launch."""
    LAUNCHES = "launches"
    """Recipes that were launched elsewhere, by content."""
    ORDER = "order.json"
    """What the supervisor is to keep running: the newest launch."""
    PROVISIONS = "provisions"
    """Every set of machines that the supervisor asked for, by number."""
    SUPERVISOR = "supervisor.json"
    """Who may provision for this run now."""
    ATTEMPTS = "attempts"
    HEARTBEATS = "heartbeat"
    CHECKPOINTS = "checkpoints"
    QUARANTINE = "quarantine"
    """Checkpoints found damaged: moved here, never deleted."""
    METRICS = "metrics"
    PROFILES = "profiles"
    """Profiler traces, as XProf reads them."""
    STACKS = "stacks.json"
    """The newest request for the stacks of an attempt's trainers."""


def attempt_path(attempt: int) -> str:
    """Directory of one attempt, relative to the run directory."""
    return f"{RunPath.ATTEMPTS}/{attempt:04d}"


def stacks_path(attempt: int, request: str) -> str:
    """Folder of the stacks that hosts brought for one request, relative to the run directory."""
    return f"{attempt_path(attempt)}/stacks/{request}"


def provision_path(number: int) -> str:
    """Ledger entry of one set of machines, relative to the run directory."""
    return f"{RunPath.PROVISIONS}/{number:04d}.json"


def heartbeat_path(host: str) -> str:
    """Heartbeat object of one host, relative to the run directory."""
    return f"{RunPath.HEARTBEATS}/{host}.json"


RECIPE_HEADER = "muster"
"""Top-level key of recipe.yaml that is no part of the recipe: schema version and fingerprint."""


def cache_dir(environ: Mapping[str, str]) -> Path:
    """Folder of one host that outlives attempts: data tables and compiled programs."""
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "muster"


PROGRESS_FILE = "progress.json"
"""In the scratch directory: the trainer's newest :class:`Progress`, replaced in place."""

FAILURE_FILE = "failure.json"
"""In the scratch directory: :class:`Failure`, written by a trainer that ends for a known reason."""

METRICS_DIR = "metrics"
"""In the scratch directory of process 0: JSONL and TensorBoard events, shipped to the run's metrics."""

PROFILES_DIR = "profiles"
"""In the scratch directory: traces as ``attempt-N/step-K``, there once complete; before that hidden."""

COMPILED_HLO_FILE = "compiled.txt"
COMPILED_FACTS_FILE = "compiled.json"
"""What `python -m trainer.aot` leaves: the scheduled program, and what the compiler says of it."""

COMPILE_PROBLEM_FILE = "problem.json"
"""What it leaves instead when the step does not compile: a :class:`CompileProblem`."""

STACKS_FILE = "stacks.txt"
"""In the scratch directory once SIGUSR1 is safe: the trainer appends all its stacks at each one."""


class Phase(enum.StrEnum):
    """What a trainer is doing."""

    STARTING = "starting"
    CONNECTING = "connecting"
    RESTORING = "restoring"
    COMPILING = "compiling"
    TRAINING = "training"
    EVALUATING = "evaluating"
    SAVING = "saving"
    DONE = "done"


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """What a trainer last reported: the body of PROGRESS_FILE and of the heartbeat."""

    phase: Phase
    step: int
    """Optimizer steps completed."""
    num_steps: int
    committed_step: int
    """Newest step whose checkpoint is committed; -1 when none."""
    time_s: float
    """Unix time of this report."""
    metrics: Mapping[str, float]
    """Newest metrics by name (``train/loss`` ...); empty before the first step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Why a trainer ended: the body of FAILURE_FILE."""

    exit_code: int
    message: str
    hint: str
    time_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileProblem:
    """Why a train step was not compiled: the body of COMPILE_PROBLEM_FILE."""

    exit_code: int
    message: str
    hint: str
    needed_bytes: int | None
    """HBM that it needs on a device and that there is, when it does not fit; else None."""
    usable_bytes: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Fork:
    """Where a run begins that continues another one with changes: the body of RunPath.FORK."""

    source_url: str
    """Run directory of the other run; read, never written to."""
    source_run: str
    step: int
    """Of the checkpoint that it begins with."""
    source_fingerprint: str
    """Recipe fingerprint of the other run."""
    changed_keys: Sequence[str]
    """What differs between the two recipes."""
