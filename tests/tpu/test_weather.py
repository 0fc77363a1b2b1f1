"""A day of Spot weather in simulated time: preemptions, stock-outs, and every 20th call of the API fails.

The scale: a preemption comes every 60 to 160 minutes, which is every 3 to 8 minutes of a run at a twentieth
of real speed; with the delays of a real start (90 s of queueing and provisioning, 60 s to the first step) a
preemption every few minutes would leave no day to speak of. Stock-outs of 10 minutes come every 4 to 6 hours.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.supervise.records import Trouble
from recipes.contract import ExitCode
from tests.tpu.cloud import ManualClock, TpuCloud, Ways
from tests.tpu.simulated import STEP_S, ZONE, World, tpu_recipe
from tests.tpu.vocabulary import Weather

DAY_S = 86_400.0
MINUTE_S = 60.0
NUM_STEPS = 7900
"""Of ten seconds: a little more than 0.9 of a day."""


def times(dice: random.Random, least_s: float, most_s: float) -> list[float]:
    """Moments of a day, so far apart."""
    found, now = [], 0.0
    while (now := now + dice.uniform(least_s, most_s)) < DAY_S:
        found.append(now)
    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 5))])
def test_a_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    dice, clock = random.Random(seed), ManualClock()
    ways = Ways(stays_active=seed % 2 == 1, lists_nodes_after_suspension=seed % 3 != 2)
    with TpuCloud(tmp_path / "cloud", clock=clock, ways=ways, with_workers=False) as cloud:
        monkeypatch.setenv("MUSTER_TPU_ENDPOINT", cloud.endpoint)
        cloud.weather = Weather(random=dice, rate=0.05)
        world = World(tmp_path, cloud, clock, tpu_recipe(tmp_path, NUM_STEPS))
        begin_s, num_preempted = clock(), 0

        def preempt() -> None:
            nonlocal num_preempted
            if up := sorted(world.hosts.up):
                num_preempted += 1
                world.hosts.preempt(dice.choice(up))

        def stock(slices: int) -> Callable[[], None]:
            return lambda: cloud.stock(ZONE, slices)

        events = [(begin_s + at_s, preempt) for at_s in times(dice, 60 * MINUTE_S, 160 * MINUTE_S)]
        for at_s in times(dice, 240 * MINUTE_S, 360 * MINUTE_S):
            events += [(begin_s + at_s, stock(0)), (begin_s + at_s + 10 * MINUTE_S, stock(1000))]
        world.events = sorted(events, key=lambda event: event[0])
        finish = world.finish(world.supervisor(), limit_s=2 * DAY_S)
        wall_s = clock() - begin_s
        assert finish.exit_code is ExitCode.COMPLETE
        cloud.weather = None
        world.check_whole()
        ends = [world.run.attempt_end(number) for number in world.run.attempts()]
        steps = sum(end.to_step - max(0, end.from_step) for end in ends if end is not None)
        goodput = steps * STEP_S / wall_s
        print(f"seed {seed}: {num_preempted} preemptions, {len(ends)} attempts, goodput {goodput:.3f}")
        assert steps == NUM_STEPS
        assert goodput >= 0.90
        assert num_preempted >= 8
        # Preemptions are not counted: the run has its failures still to spend.
        assert all(end is not None and end.exit_code in (0, ExitCode.PREEMPTED) for end in ends)
        troubles = {each.trouble for each in world.run.provisions()}
        assert troubles <= {Trouble.PREEMPTED, Trouble.REPLACED, Trouble.NO_CAPACITY, Trouble.UNAVAILABLE}
