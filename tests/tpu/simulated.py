"""A run on the stand-in in simulated time: real supervisor, client and run directory; hosts that count.

Hosts are simulated at the run directory: they take the lease, open and close attempts by the real code,
make steps, and commit checkpoints. Nothing waits: ``sleep`` moves the clock.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from launcher import lease
from launcher.attempts import Opening, close_attempt, number_attempt, verdict
from launcher.exits import HostEnd
from launcher.rundir import COMMIT_MARKER, RunDir, committed_step, create_or_open, launched_recipe
from launcher.storage import open_storage
from launcher.supervise.actions import Finish, Wait
from launcher.supervise.fleet import RunFacts
from launcher.supervise.loop import Supervisor
from launcher.supervise.one import Supervised, supervised
from launcher.supervise.place import Place
from launcher.supervise.records import Order
from launcher.tpu.client import TpuApi
from launcher.tpu.listing import Listings
from launcher.tpu.place import TpuPlace
from launcher.tpu.vm import lease_owner
from recipes.contract import ExitCode, RunPath, host_names
from recipes.load import recipe_from_dict, recipe_to_dict
from recipes.schema import Recipe
from tests.tpu.cloud import ManualClock, TpuCloud
from tests.unit.rundir_support import make_recipe

ZONE = "us-east5-a"
STEP_S, SAVE_STEPS, START_S = 10.0, 30, 60.0
"""A step; steps between saves; from VMs that are up to the first step."""
TICK_S = 5.0


def tpu_recipe(root: Path, num_steps: int, **changes: Any) -> Recipe:
    """Two slices of one CPU host each.

    Args:
      root: folder of all runs.
      num_steps: of the whole run.
      changes: of sections, by name.
    """
    plain = recipe_to_dict(make_recipe())
    plain["target"] |= {
        "kind": "tpu",
        "project": "my-project",
        "zone": ZONE,
        "capacity": "spot",
        "python": "/usr/bin/python3",
    }
    plain["multislice"] |= {"num_slices": 2, "data": -1, "fsdp": 1}
    plain["train"] |= {"num_steps": num_steps, "global_batch_size": 32}
    plain["run"] |= {"root": str(root), "name": "run"}
    plain["hardware"] |= {"price_per_chip_hour": 1.0}
    for section, values in changes.items():
        plain[section] |= values
    return recipe_from_dict(plain)


class Hosts:
    """All hosts of a run."""

    def __init__(self, run: RunDir, order: Order, cloud: TpuCloud, num_steps: int) -> None:
        self.run, self.order, self.cloud, self.num_steps = run, order, cloud, num_steps
        self.up: dict[str, float] = {}
        """Nodes that are up, and since when."""
        self.noticed: set[str] = set()
        self.records: list[int] = []
        """Steps whose records are in the committed state, in order."""
        self._pending: list[int] = []
        self._attempt, self._step, self._next_s = 0, 0, 0.0
        self._held: lease.Held | None = None
        self._nodes: list[str] = []
        cloud.on_boot = lambda node: self.up.__setitem__(node, cloud.now)
        cloud.on_lost = self._lost

    def preempt(self, node: str) -> None:
        self.noticed.add(node)
        self.cloud.preempt(node)

    def tick(self, now: float) -> None:
        """What the hosts do until ``now``."""
        if self._attempt == 0:
            if not self.up or (ours := self._provision()) is None:
                return
            number, self._nodes = ours
            since_s = max(self.up.get(node, 0.0) for node in self._nodes)
            if self._is_whole() and not self.noticed & {*self._nodes} and now >= since_s + START_S:
                self._begin(number, len(self._nodes), now)
        elif not self._is_whole():
            self._die(now)
        else:
            self._renew(now)
            while self._attempt and self._next_s <= now:
                self._make_step(self._nodes, now)

    def _is_whole(self) -> bool:
        return all(node in self.up for node in self._nodes)

    def _provision(self) -> tuple[int, list[str]] | None:
        live = [each for each in self.run.provisions() if each.ended_s is None and not each.is_probe]
        if not live or not live[-1].is_created:
            return None
        return live[-1].number, [f"{live[-1].name}-{index}" for index in range(live[-1].num_slices)]

    def _begin(self, provision: int, num_slices: int, now: float) -> None:
        if self.run.stop_request() is not None or verdict(self.run, self.run.recipe(), self.order.id):
            return
        owner = lease.this_process("host", owner_id=lease_owner(self.order.id, provision))
        with contextlib.suppress(lease.LeaseHeld):
            self._held = self.run.acquire(owner, now)
            opening = Opening(
                recipe=self.run.recipe(), hosts=host_names(num_slices, 1), job=self.order.id, lock={}
            )
            self._attempt = number_attempt(self.run, opening, now)
            self._step, self._pending = max(0, committed_step(self.run.storage)), []
            self._next_s = now + STEP_S

    def _make_step(self, nodes: list[str], now: float) -> None:
        self._step += 1
        self._pending.append(self._step)
        self._next_s += STEP_S
        done = self._step >= self.num_steps
        leaving = bool(self.noticed & {*nodes}) or self.run.stop_request() is not None
        if done or leaving or self._step % SAVE_STEPS == 0:
            self.run.storage.replace(f"{RunPath.CHECKPOINTS}/{self._step}/{COMMIT_MARKER}", b"")
            self.records += self._pending
            self._pending = []
        if done or leaving:
            self._leave(ExitCode.COMPLETE if done else ExitCode.PREEMPTED, now)

    def _leave(self, code: ExitCode, now: float) -> None:
        names = self.run.attempt_start(self._attempt)
        assert names is not None and self._held is not None
        ends = {host: HostEnd(host=host, exit_code=code, reason="left", time_s=now) for host in names.hosts}
        close_attempt(self.run, self._attempt, ends, now=now)
        self.run.release(self._held)
        self._attempt = 0

    def _lost(self, node: str) -> None:
        self.up.pop(node, None)
        self.noticed.discard(node)

    def _die(self, now: float) -> None:
        """One slice is gone: the others die of it and say so, unless process 0 went with it."""
        start = self.run.attempt_start(self._attempt)
        assert start is not None
        if any(node.endswith("-0") for node in self.up):
            close_attempt(self.run, self._attempt, {}, now=now)
        self._attempt, self._pending = 0, []

    def _renew(self, now: float) -> None:
        if self._held is not None and now > self._held.lease.expires_s - lease.LEASE_S / 2:
            self._held = self.run.renew(self._held, now)


class World:
    """One run, its cloud and its clock."""

    def __init__(self, folder: Path, cloud: TpuCloud, clock: ManualClock, recipe: Recipe) -> None:
        self.cloud, self.clock, self.recipe = cloud, clock, recipe
        self.run = create_or_open(open_storage(recipe.run_dir), recipe, {}).run
        path, body = launched_recipe(recipe)
        self.run.storage.replace(path, body)
        self.order = Order(id="o1", recipe=path, bundle="sha256:" + 64 * "0", launched_s=clock(), by="me")
        self.run.write_order(self.order)
        self.hosts = Hosts(self.run, self.order, cloud, recipe.train.num_steps)
        self.listings = Listings(TpuApi(first_retry_s=0.001))
        self.said: list[str] = []
        self.events: list[tuple[float, Callable[[], None]]] = []
        """What happens to the world, by time; soonest first."""

    def sleep(self, seconds: float) -> None:
        """Lets time pass for the cloud, the hosts, and whatever is to happen."""
        until_s = self.clock() + seconds
        while self.clock() < until_s:
            self.cloud.advance(min(TICK_S, until_s - self.clock()))
            while self.events and self.events[0][0] <= self.clock():
                self.events.pop(0)[1]()
            self.hosts.tick(self.clock())

    def place(self, run: RunDir, facts: RunFacts, recipe: Recipe) -> Place:
        assert facts.order is not None
        return TpuPlace(run=run, recipe=recipe, order=facts.order, listings=self.listings)

    def supervisor(
        self,
        *,
        run: RunDir | None = None,
        wrap: Callable[[Place], Place] = lambda place: place,
        period_s: float = 30.0,
    ) -> Supervisor:
        one = supervised(run or self.run, self.place)
        one = dataclasses.replace(one, place=wrap(one.place))
        return _loop(one, self, period_s)

    def finish(self, supervisor: Supervisor, *, limit_s: float = 86400.0) -> Finish:
        """Supervised to the end."""
        until_s = self.clock() + limit_s
        while self.clock() < until_s:
            self.listings.forget()
            result = supervisor.step()
            if isinstance(result, Finish):
                return result
            if isinstance(result, Wait):
                supervisor.pause(result)
        raise AssertionError(f"not over after {limit_s:.0f} s: {self.said[-5:]}")

    def check_whole(self) -> None:
        """Nothing is left, nothing was doubled, and each record was seen once."""
        assert (self.cloud.queued_ids(), self.cloud.node_ids(), self.cloud.doubles) == ([], [], [])
        assert self.hosts.records == list(range(1, self.recipe.train.num_steps + 1))
        assert all(each.ended_s is not None for each in self.run.provisions())


def _loop(one: Supervised, world: World, period_s: float) -> Supervisor:
    return one.supervisor(
        say=world.said.append,
        may_act=lambda: None,
        now=world.clock,
        sleep=world.sleep,
        period_s=period_s,
    )
