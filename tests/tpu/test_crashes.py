"""The supervisor killed after every single thing it does, and two of them at once, in simulated time."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from grpc import StatusCode

from launcher.cli.supervising import held
from launcher.lease import LeaseHeld
from launcher.rundir import RunDir
from launcher.supervise.actions import Finish, Wait
from launcher.supervise.loop import Supervisor
from launcher.supervise.observation import Machines, Option
from launcher.supervise.place import Look, Place
from launcher.supervise.records import Provision, Trouble
from recipes.contract import ExitCode
from tests.tpu.cloud import ManualClock, TpuCloud
from tests.tpu.simulated import ZONE, World, tpu_recipe


class Killed(BaseException):
    """SIGKILL, as far as Python code can notice it."""


class Fuse:
    """Burns down with every thing that is done; then whoever does it is dead."""

    def __init__(self, left: int) -> None:
        self.left = left

    def burn(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise Killed


class DyingRun(RunDir):
    """Everything that a supervisor writes, and it may be its last."""

    def __init__(self, run: RunDir, fuse: Fuse) -> None:
        super().__init__(run.storage)
        self._fuse = fuse

    def claim_provision(self, provision: Provision) -> bool:
        done = super().claim_provision(provision)
        self._fuse.burn()
        return done

    def write_provision(self, provision: Provision) -> None:
        super().write_provision(provision)
        self._fuse.burn()

    def request_stop(self, now: float, by: str, *, resumes: bool = False) -> None:
        super().request_stop(now, by, resumes=resumes)
        self._fuse.burn()

    def clear_stop(self) -> None:
        super().clear_stop()
        self._fuse.burn()


class DyingPlace:
    """Everything that is asked of the cloud, and it may be the last."""

    def __init__(self, place: Place, fuse: Fuse) -> None:
        self._place, self._fuse = place, fuse

    def look(self) -> Look:
        return self._place.look()

    def words(self, machines: Machines) -> str:
        return self._place.words(machines)

    def name(self, option: Option, *, is_probe: bool) -> str:
        return self._place.name(option, is_probe=is_probe)

    def left_lease(self, provision: Provision) -> str:
        return self._place.left_lease(provision)

    def create(self, option: Option, number: int, *, is_probe: bool) -> None:
        self._place.create(option, number, is_probe=is_probe)
        self._fuse.burn()

    def delete(self, machines: Machines) -> None:
        self._place.delete(machines)
        self._fuse.burn()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def cloud(tmp_path: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> Iterator[TpuCloud]:
    with TpuCloud(tmp_path / "cloud", clock=clock, with_workers=False) as cloud:
        monkeypatch.setenv("MUSTER_TPU_ENDPOINT", cloud.endpoint)
        yield cloud


def make_world(folder: Path, cloud: TpuCloud, clock: ManualClock, *, elastic: bool = False) -> World:
    """One preemption, and with ``elastic`` a stock that shrinks to one slice for a while."""
    slices = {"min_slices": 1, "grow_after_s": 600.0} if elastic else {}
    recipe = tpu_recipe(folder, 240, multislice=slices, target={"fallback_after_s": 300.0})
    world = World(folder, cloud, clock, recipe)
    begin_s = clock()

    def preempt() -> None:
        if elastic:
            cloud.stock(ZONE, 1)
        nodes = cloud.node_ids()
        world.hosts.preempt(nodes[-1])

    world.events = [(begin_s + 900, preempt)]
    if elastic:
        world.events.append((begin_s + 1800, lambda: cloud.stock(ZONE, 2)))
    return world


def dying(world: World, left: int) -> tuple[Supervisor, Fuse]:
    fuse = Fuse(left)
    run = DyingRun(world.run, fuse)
    return world.supervisor(run=run, wrap=lambda place: DyingPlace(place, fuse)), fuse


@pytest.mark.parametrize(
    ("elastic", "stride"),
    [
        pytest.param(False, 1, id="preempted"),
        pytest.param(True, 7, id="fewer-and-back"),
        pytest.param(True, 1, id="fewer-and-back-all", marks=pytest.mark.long),
    ],
)
@pytest.mark.timeout(600)
def test_killed_after_everything_that_it_does(
    tmp_path: Path, cloud: TpuCloud, clock: ManualClock, elastic: bool, stride: int
) -> None:
    """Each time another supervisor goes on: no orphan, no second set, every record once."""
    for left in range(1, 200, stride):
        cloud.stock(ZONE, 1000)
        world = make_world(tmp_path / f"{left}", cloud, clock, elastic=elastic)
        supervisor, fuse = dying(world, left)
        try:
            finish = world.finish(supervisor)
        except Killed:
            finish = world.finish(world.supervisor())
        assert finish.exit_code is ExitCode.COMPLETE, world.said
        world.check_whole()
        if fuse.left > 0:
            break
    # Claim, ask, note twice, doom, remove, close, and all of it again; then the end.
    assert left > 12
    numbers = [each.num_slices for each in world.run.provisions() if not each.is_probe and each.ready_s]
    assert numbers == ([2, 1, 2] if elastic else [2, 2])


def test_preempted_again_and_again_by_killed_supervisors(
    tmp_path: Path, cloud: TpuCloud, clock: ManualClock
) -> None:
    """A supervisor that dies after every third thing gets there too."""
    world = make_world(tmp_path, cloud, clock, elastic=True)
    for _ in range(100):
        supervisor, _ = dying(world, 3)
        try:
            finish = world.finish(supervisor)
        except Killed:
            continue
        break
    assert finish.exit_code is ExitCode.COMPLETE
    world.check_whole()


@pytest.mark.parametrize("seed", range(3))
def test_two_at_once_without_a_lease_make_no_second_set(
    tmp_path: Path, cloud: TpuCloud, clock: ManualClock, seed: int
) -> None:
    """The lease keeps one away; where it failed, ledger and fixed ids would still."""
    world = make_world(tmp_path, cloud, clock)
    both, choice = [world.supervisor(), world.supervisor()], random.Random(seed)
    result: Finish | Wait | None = None
    for _ in range(2000):
        world.listings.forget()
        result = choice.choice(both).step()
        if isinstance(result, Finish):
            break
        if isinstance(result, Wait):
            world.sleep(choice.choice([1, 7, 30]))
    assert isinstance(result, Finish) and result.exit_code is ExitCode.COMPLETE
    world.check_whole()


def test_only_one_may_act(tmp_path: Path, cloud: TpuCloud, clock: ManualClock) -> None:
    world = make_world(tmp_path, cloud, clock)
    with (
        held(world.run, "muster supervise run"),
        pytest.raises(LeaseHeld) as caught,
        held(world.run, "another"),
    ):
        pass
    assert "is supervised by muster supervise run" in caught.value.message


REFUSALS = (
    (StatusCode.PERMISSION_DENIED, "no", Trouble.PERMISSION, "these credentials may not do it"),
    (StatusCode.INVALID_ARGUMENT, "bad type", Trouble.BAD_REQUEST, "does not take the request"),
    (StatusCode.NOT_FOUND, "reservation x not found", Trouble.RESERVATION, "the reservation cannot be used"),
)


@pytest.mark.parametrize(
    ("code", "text", "trouble", "sentence"), REFUSALS, ids=[str(row[2]) for row in REFUSALS]
)
def test_hopeless_refusals_end_the_run(
    tmp_path: Path,
    cloud: TpuCloud,
    clock: ManualClock,
    code: StatusCode,
    text: str,
    trouble: Trouble,
    sentence: str,
) -> None:
    world = make_world(tmp_path, cloud, clock)
    cloud.fault("CreateQueuedResource", code, text)
    finish = world.finish(world.supervisor())
    assert finish.exit_code is ExitCode.BAD_INPUT
    assert sentence in finish.reason and code.name in finish.reason and text in finish.reason
    assert [each.trouble for each in world.run.provisions()] == [trouble]


def test_quota_and_lost_answers_are_got_over(tmp_path: Path, cloud: TpuCloud, clock: ManualClock) -> None:
    world = make_world(tmp_path, cloud, clock)
    cloud.fault("CreateQueuedResource", StatusCode.RESOURCE_EXHAUSTED, "Quota 'x' exceeded.", times=2)
    cloud.fault("CreateQueuedResource", StatusCode.UNAVAILABLE, is_committed=True)
    cloud.fault("DeleteQueuedResource", StatusCode.INTERNAL, is_committed=True)
    assert world.finish(world.supervisor()).exit_code is ExitCode.COMPLETE
    world.check_whole()
    assert [each.trouble for each in world.run.provisions()][:2] == [Trouble.QUOTA, Trouble.QUOTA]


def test_an_unknown_state_is_waited_out(tmp_path: Path, cloud: TpuCloud, clock: ManualClock) -> None:
    world = make_world(tmp_path, cloud, clock)
    supervisor = world.supervisor()
    while not world.hosts.up:
        world.listings.forget()
        if isinstance(result := supervisor.step(), Wait):
            supervisor.pause(result)
    name = cloud.queued_ids()[0]
    cloud.put_state(name, 99)
    for _ in range(5):
        world.listings.forget()
        result = supervisor.step()
        assert isinstance(result, Wait) and "STATE_99" in result.why
        supervisor.pause(result)
    cloud.put_state(name, 6)
    assert world.finish(supervisor).exit_code is ExitCode.COMPLETE
    world.check_whole()


def test_the_deadline_ends_it_with_a_checkpoint(tmp_path: Path, cloud: TpuCloud, clock: ManualClock) -> None:
    recipe = tpu_recipe(tmp_path, 10_000, run={"deadline": "2027-01-15T09:00:00Z"})
    world = World(tmp_path, cloud, clock, recipe)
    finish = world.finish(world.supervisor())
    assert finish.exit_code is ExitCode.PREEMPTED
    assert "run.deadline=2027-01-15T09:00:00Z is reached" in finish.reason
    assert world.hosts.records == list(range(1, len(world.hosts.records) + 1)) and world.hosts.records
    assert cloud.queued_ids() == []


def test_the_budget_ends_it_with_a_checkpoint(tmp_path: Path, cloud: TpuCloud, clock: ManualClock) -> None:
    recipe = tpu_recipe(tmp_path, 10_000, run={"max_cost": 1.0})
    world = World(tmp_path, cloud, clock, recipe)
    finish = world.finish(world.supervisor())
    assert finish.exit_code is ExitCode.PREEMPTED and "of run.max_cost=1 are spent" in finish.reason
    assert world.hosts.records and cloud.queued_ids() == []
