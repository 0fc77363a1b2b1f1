"""The run directory: the only state of a run. Every other module reads and writes it through here.

A run exists once its ``recipe.yaml`` does, which is written once and whole; everything before is
nothing, everything after can be written again. So a kill at any moment leaves no run or a valid one.
See docs/run-directory.md for each object.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import yaml

from launcher import lease, ledger
from launcher.ledger import (
    AttemptEnd,
    AttemptStart,
    Damaged,
    Heartbeat,
    HostRecord,
    HostStacks,
    StacksRequest,
    StopRequest,
)
from launcher.storage_types import Exists, Names, NotFound, Storage, StorageError, Unavailable
from launcher.supervise.records import Order, Provision
from launcher.text import one_line
from recipes.contract import (
    RECIPE_HEADER,
    SCHEMA_VERSION,
    Fork,
    RunPath,
    attempt_path,
    heartbeat_path,
    provision_path,
    stacks_path,
)
from recipes.errors import UserError
from recipes.fingerprint import Change, changes, fingerprint
from recipes.load import recipe_from_dict, recipe_to_dict
from recipes.schema import Recipe
from recipes.schema_key import Effect

COMMIT_MARKER = "commit_success.txt"
"""What Orbax writes into a checkpoint last; a step without it does not count."""
READERS = 32
"""Objects of hosts read at once."""
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""As safe as the other, and ten times as fast, where PyYAML was built with libyaml."""


class DamagedRecipe(StorageError):
    """A recipe that cannot be read, or was edited."""


class RunDir:
    """One run. Cheap to make: nothing is read before it is asked for."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage

    @property
    def url(self) -> str:
        return self.storage.url

    def exists(self) -> bool:
        """Whether there is a run here."""
        return RunPath.RECIPE in self.storage.children()

    def recipe(self) -> Recipe:
        """The recipe that the run was created with.

        Raises:
          DamagedRecipe: it cannot be used; the hint names a copy that can, if there is one.
        """
        try:
            return read_recipe(self.storage, RunPath.RECIPE)
        except DamagedRecipe as error:
            if copy := self._good_copy():
                error.hint = f"restore it: copy {self.url}/{copy} over it"
            raise

    def fork(self) -> Fork | None:
        """Which checkpoint of another run it began with; None when it is no fork."""
        header, _ = _read_document(self.storage, RunPath.RECIPE)
        where = f"{self.url}/{RunPath.RECIPE}"
        return ledger.from_plain(header["fork"], Fork, where) if "fork" in header else None

    def lock(self) -> Mapping[str, Any]:
        """What the run was started from; empty when its launcher died before writing it."""
        try:
            return ledger.read_record(self.storage, RunPath.LOCK, Mapping[str, Any])  # type: ignore[type-abstract]
        except NotFound:
            return {}

    def launches(self) -> Sequence[str]:
        """Paths of the recipes that were launched onto a cluster, newest first."""
        times = self.storage.modified(RunPath.LAUNCHES)
        newest = sorted(times, key=lambda name: (times[name], name), reverse=True)
        return [f"{RunPath.LAUNCHES}/{name}" for name in newest]

    def _good_copy(self) -> str | None:
        # Only recipe.yaml itself says what a fork began with.
        if RunPath.FORK in self.storage.children():
            return None
        attempts = [self.attempt_recipe_path(number) for number in reversed(self.attempts())]
        for path in (*self.launches(), *attempts):
            with contextlib.suppress(StorageError):
                read_recipe(self.storage, path)
                return path
        return None

    # Attempts

    def attempts(self) -> Sequence[int]:
        """Numbers of all attempts, ascending."""
        names = self.storage.children(RunPath.ATTEMPTS)
        return sorted(int(name) for name in names if name.isascii() and name.isdigit())

    def next_attempt(
        self, now: float, *, recipe: Recipe, hosts: Sequence[str], lock: Mapping[str, Any] | None = None
    ) -> int:
        """Opens an attempt under a number that no other process can get.

        Writes ``recipe.yaml`` (in effect: safe changes included), whose creation claims the number,
        and ``start.json``. A number whose claimer died stays unused.
        """
        from_step = committed_step(self.storage)
        number = max(self.attempts(), default=0) + 1
        while True:
            try:
                self.storage.create(self.attempt_recipe_path(number), encode_recipe(recipe))
                break
            except Exists:
                number += 1
        start = AttemptStart(
            attempt=number, started_s=now, hosts=tuple(hosts), from_step=from_step, lock=dict(lock or {})
        )
        self.storage.replace(f"{attempt_path(number)}/start.json", ledger.encode(start))
        return number

    def attempt_recipe_path(self, attempt: int) -> str:
        """Where the recipe in effect for one attempt is, relative to the run directory."""
        return f"{attempt_path(attempt)}/{RunPath.RECIPE}"

    def attempt_start(self, attempt: int) -> AttemptStart | None:
        return self._maybe(f"{attempt_path(attempt)}/start.json", AttemptStart)

    def attempt_end(self, attempt: int, damaged: Names | None = None) -> AttemptEnd | None:
        """How it ended; None while it runs, when all its processes died at once, or when it is unreadable.

        Args:
          attempt: its number.
          damaged: gets a line when it cannot be read, here and below.
        """
        end: AttemptEnd | None = None
        with _noted(damaged):
            end = self._maybe(f"{attempt_path(attempt)}/end.json", AttemptEnd)
        return end

    def write_attempt_end(self, attempt: int, end: AttemptEnd) -> None:
        self.storage.replace(f"{attempt_path(attempt)}/end.json", ledger.encode(end))

    def write_host(self, attempt: int, record: HostRecord) -> None:
        self.storage.replace(f"{attempt_path(attempt)}/hosts/{record.host}.json", ledger.encode(record))

    def hosts(
        self, attempt: int, damaged: Names | None = None, *, only: Iterable[str] | None = None
    ) -> Sequence[HostRecord]:
        """The hosts of one attempt that have reported, in the order of slices and hosts.

        Args:
          attempt: its number.
          damaged: gets a line for each that cannot be read, here and below.
          only: those hosts; with thousands of them the others need not be read.
        """
        return self._records(f"{attempt_path(attempt)}/hosts", HostRecord, damaged, only)

    # Logs

    def log_path(self, attempt: int, host: str) -> str:
        """Name of one host's log, for Storage.write_log and read_log."""
        return f"{attempt_path(attempt)}/logs/{host}.log"

    # Heartbeats

    def write_heartbeat(self, heartbeat: Heartbeat) -> None:
        self.storage.replace(heartbeat_path(heartbeat.host), ledger.encode(heartbeat))

    def heartbeats(
        self, damaged: Names | None = None, *, only: Iterable[str] | None = None
    ) -> Sequence[Heartbeat]:
        """The newest heartbeat of every host that ever wrote one (look at its attempt)."""
        return self._records(RunPath.HEARTBEATS, Heartbeat, damaged, only)

    def beat_times(self) -> Mapping[str, float]:
        """When each host last wrote its heartbeat (Unix time), without reading one."""
        times = self.storage.modified(RunPath.HEARTBEATS)
        return {
            name.removesuffix(".json"): time_s for name, time_s in times.items() if name.endswith(".json")
        }

    # Supervision

    def order(self) -> Order | None:
        """What is to be kept running elsewhere; None for a local run."""
        return self._maybe(RunPath.ORDER, Order)

    def write_order(self, order: Order) -> None:
        self.storage.replace(RunPath.ORDER, ledger.encode(order))

    def provisions(self, damaged: Names | None = None) -> Sequence[Provision]:
        """Every set of machines that was asked for, oldest first."""
        found = self._records(RunPath.PROVISIONS, Provision, damaged, None)
        return sorted(found, key=lambda each: each.number)

    def claim_provision(self, provision: Provision) -> bool:
        """Writes a new entry; False when another process has that number."""
        try:
            self.storage.create(provision_path(provision.number), ledger.encode(provision))
        except Exists:
            return False
        return True

    def write_provision(self, provision: Provision) -> None:
        self.storage.replace(provision_path(provision.number), ledger.encode(provision))

    # Stop requests

    def request_stop(self, now: float, by: str, *, resumes: bool = False) -> None:
        request = StopRequest(requested_s=now, by=by, resumes=resumes)
        self.storage.replace(RunPath.STOP, ledger.encode(request))

    def stop_request(self) -> StopRequest | None:
        """The request for a stop; a damaged one counts too, for somebody asked."""
        try:
            return self._maybe(RunPath.STOP, StopRequest)
        except Damaged:
            return StopRequest(requested_s=0.0, by="somebody")

    def clear_stop(self) -> None:
        """For the next launch; call it while holding the lease."""
        self.storage.delete(RunPath.STOP)

    # Stacks

    def request_stacks(self, request: StacksRequest) -> None:
        """Asks; whoever asked before and has not been heard is not."""
        self.storage.replace(RunPath.STACKS, ledger.encode(request))

    def stacks_request(self) -> StacksRequest | None:
        return self._maybe(RunPath.STACKS, StacksRequest)

    def write_stacks(self, attempt: int, request: str, stacks: HostStacks) -> None:
        self.storage.replace(f"{stacks_path(attempt, request)}/{stacks.host}.json", ledger.encode(stacks))

    def stacks_hosts(self, attempt: int, request: str) -> Sequence[str]:
        """Whose stacks are there, as objects are named."""
        return self._host_files(stacks_path(attempt, request))

    def stacks(
        self, attempt: int, request: str, damaged: Names | None = None, *, only: Iterable[str]
    ) -> Sequence[HostStacks]:
        """Of those hosts, as far as they are there."""
        return self._records(stacks_path(attempt, request), HostStacks, damaged, only)

    # Lease

    def acquire(self, owner: lease.Owner, now: float, path: str = RunPath.LEASE) -> lease.Held:
        """See :func:`launcher.lease.acquire`."""
        return lease.acquire(self.storage, owner, now, path)

    def renew(self, held: lease.Held, now: float) -> lease.Held:
        return lease.renew(self.storage, held, now)

    def release(self, held: lease.Held) -> None:
        lease.release(self.storage, held)

    def _records[T](
        self, folder: str, cls: type[T], damaged: Names | None, only: Iterable[str] | None
    ) -> list[T]:
        listed = only if only is not None else self._host_files(folder)

        def read(host: str) -> tuple[T | None, Names]:
            problems: Names = []
            with contextlib.suppress(NotFound), _noted(problems):
                return ledger.read_record(self.storage, f"{folder}/{host}.json", cls), problems
            return None, problems

        hosts = sorted(listed, key=host_order)
        if not hosts:
            return []
        # In a bucket each takes some 50 ms.
        with ThreadPoolExecutor(min(READERS, len(hosts))) as pool:
            found = list(pool.map(read, hosts))
        if damaged is not None:
            damaged += [problem for _, problems in found for problem in problems]
        return [record for record, _ in found if record is not None]

    def _host_files(self, folder: str) -> Names:
        names = self.storage.children(folder)
        return [name.removesuffix(".json") for name in names if name.endswith(".json")]

    def _maybe[T](self, path: str, cls: type[T]) -> T | None:
        try:
            return ledger.read_record(self.storage, path, cls)
        except NotFound:
            return None


@contextlib.contextmanager
def _noted(damaged: Names | None) -> Iterator[None]:
    """Passes over an object that cannot be read: one of many, or one that the run can do without."""
    try:
        yield
    except (NotFound, Unavailable):
        raise
    except StorageError as error:
        if damaged is not None:
            damaged.append(error.message)


@dataclass(frozen=True, kw_only=True, slots=True)
class Opened:
    """What launching onto a run directory found."""

    run: RunDir
    created: bool
    """False: an existing run is resumed."""
    changes: Sequence[Change]
    """Safe differences of the new recipe from the run's; empty for a new run."""


def create_or_open(
    storage: Storage, recipe: Recipe, lock: Mapping[str, Any], *, fork: Fork | None = None
) -> Opened:
    """Makes the run, or opens it when it is the same experiment.

    Args:
      storage: the run directory.
      recipe: what is to run now.
      lock: see :func:`launcher.provenance.lock_info`.
      fork: what a new run begins with (see :mod:`launcher.fork`); an existing one is then refused.

    Raises:
      UserError: another experiment is there; the message names every key that differs.
    """
    run = RunDir(storage)
    try:
        storage.create(RunPath.RECIPE, encode_recipe(recipe, fork))
        created = True
    except Exists:
        if fork is not None:
            raise _exists_already(storage.url, recipe.run_name) from None
        created, fork = False, run.fork()
    found = () if created else safe_changes(run, recipe)
    # Also after a launcher that died between the two writes: nothing has run yet, so this is the truth.
    with contextlib.suppress(Exists):
        storage.create(RunPath.LOCK, ledger.encode(dict(lock)))
    if fork is not None:
        with contextlib.suppress(Exists):
            storage.create(RunPath.FORK, ledger.encode(fork))
    return Opened(run=run, created=created, changes=tuple(found))


def safe_changes(run: RunDir, recipe: Recipe) -> Sequence[Change]:
    """How a recipe differs from that of an existing run.

    Raises:
      UserError: it is another experiment; the message names every key that differs.
    """
    found = changes(run.recipe(), recipe)
    if any(change.effect is Effect.EXPERIMENT for change in found):
        raise _another_experiment(run.storage, found)
    return found


def encode_recipe(recipe: Recipe, fork: Fork | None = None) -> bytes:
    """``recipe.yaml``: the schema's keys under a header with version, fingerprint and, in a fork, its source.

    The source is in this one object so that no kill leaves a fork that would start from scratch.
    """
    header: dict[str, Any] = {"schema_version": SCHEMA_VERSION, "fingerprint": fingerprint(recipe)}
    if fork is not None:
        header["fork"] = {**dataclasses.asdict(fork), "changed_keys": list(fork.changed_keys)}
    document = {RECIPE_HEADER: header, **recipe_to_dict(recipe)}
    text = yaml.safe_dump(document, sort_keys=False, allow_unicode=False)
    return text.encode()


def launched_recipe(recipe: Recipe) -> tuple[str, bytes]:
    """Path, relative to the run directory, and content of a recipe as hosts elsewhere read it."""
    body = encode_recipe(recipe)
    return f"{RunPath.LAUNCHES}/{hashlib.sha256(body).hexdigest()[:16]}.yaml", body


def read_recipe(storage: Storage, path: str) -> Recipe:
    """Reads back what :func:`encode_recipe` wrote.

    Raises:
      NotFound: there is none.
      DamagedRecipe: it is damaged or was edited by hand; the message names it.
      StorageError: it is of a newer version.
    """
    where = f"{storage.url}/{path}"
    header, data = _read_document(storage, path)
    try:
        recipe = recipe_from_dict(data)
    except UserError as error:
        raise DamagedRecipe(f"{where} is damaged: {error.message}", hint="restore it from a copy") from error
    if fingerprint(recipe) != header.get("fingerprint"):
        raise DamagedRecipe(
            f"{where} does not match its fingerprint: it was edited",
            hint="undo the edit; to change a key, launch with an override",
        )
    return recipe


def _parsed(data: bytes) -> Any:
    loader = _LOADER(data)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


def _read_document(storage: Storage, path: str) -> tuple[Mapping[str, Any], object]:
    """A recipe's header and the rest of it."""
    where = f"{storage.url}/{path}"
    try:
        data = _parsed(storage.read(path))
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise DamagedRecipe(
            f"{where} is damaged: {one_line(str(error))}", hint="restore it from a copy"
        ) from error
    header = data.pop(RECIPE_HEADER, None) if isinstance(data, dict) else None
    if not isinstance(header, dict) or not isinstance(header.get("schema_version"), int):
        raise DamagedRecipe(
            f"{where} has no {RECIPE_HEADER} header", hint="it is damaged or was not written by Muster"
        )
    if header["schema_version"] > SCHEMA_VERSION:
        raise StorageError(
            f"{where} was written by a newer Muster", hint="upgrade: pip install -U muster-tpu"
        )
    return header, data


def committed_step(storage: Storage) -> int:
    """The newest step whose checkpoint is committed, -1 when none. Needs no Orbax."""
    names = storage.children(RunPath.CHECKPOINTS)
    for step in sorted((int(name) for name in names if name.isascii() and name.isdigit()), reverse=True):
        if COMMIT_MARKER in storage.children(f"{RunPath.CHECKPOINTS}/{step}"):
            return step
    return -1


def host_order(host: str) -> tuple[int, int, str]:
    """Sort key that puts s0-h2 before s0-h10."""
    slice_part, _, host_part = host.partition("-h")
    numbers = slice_part.removeprefix("s"), host_part
    if all(number.isascii() and number.isdigit() for number in numbers):
        return int(numbers[0]), int(numbers[1]), host
    return 2**31, 0, host


def _another_experiment(storage: Storage, found: Sequence[Change]) -> UserError:
    width = max(len(change.key) for change in found)
    lines = [
        f"  {change.key:<{width}}  {change.old} -> {change.new}  ({change.effect.value})" for change in found
    ]
    # Not to remove it, though nothing may be saved there: it may have been submitted a moment ago.
    fork = ", or start NEW from this run's checkpoint with --fork NEW" if committed_step(storage) >= 0 else ""
    return UserError(
        f"{storage.url} holds another experiment; what differs:\n" + "\n".join(lines),
        hint=f"choose another name with run.name=NEW{fork}",
    )


def _exists_already(where: str, name: str) -> UserError:
    return UserError(
        f"{where} exists already, and a fork is a new run",
        hint=f"to resume it, give run.name={name} and no --fork; or choose another name",
    )
