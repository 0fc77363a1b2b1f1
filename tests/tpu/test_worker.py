"""Workers of two one-host slices as processes: attempts in the same VMs, notices, stops and reboots."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from launcher.supervise.records import Order
from recipes.contract import ExitCode
from tests.tpu.worker_vms import Slices


@pytest.fixture
def slices(tmp_path: Path) -> Iterator[Callable[..., Slices]]:
    made: list[Slices] = []

    def make(script: Mapping[str, Any] | None = None, **run: Any) -> Slices:
        made.append(Slices(tmp_path, script, **run))
        return made[0]

    yield make
    for each in made:
        each.close()


def faults(*found: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    return {"faults": list(found), "step_s": 0.05, **more}


def test_two_vms_complete_and_say_so(slices: Callable[..., Slices]) -> None:
    two = slices()
    two.boot(0)
    two.wait_for(lambda: "waiting for s1-h0" in two.vms[0].state(), "wait")
    assert two.vms[0].state() == "waiting for the other hosts: 1 of 2 hosts are here; waiting for s1-h0"
    assert two.run.attempts() == []
    two.boot(1)
    assert two.finish() == [0, 0], two.evidence()
    assert two.codes() == [0]
    for vm in two.vms:
        assert "attempt 1" in vm.metadata.states()
        assert vm.state() == "over: complete"
    start = two.run.attempt_start(1)
    assert start is not None
    assert start.lock == {
        "job": "order-1",
        "bundle": two.spec.bundle,
        "incarnation": "tpu-order-1-1",
        "provision": 1,
    }
    assert [record.hostname for record in two.run.hosts(1)] == ["tiny-0-w0", "tiny-1-w0"]


@pytest.mark.parametrize(
    "fault",
    [
        {"attempt": 1, "step": 13, "host": "s1-h0", "do": "exit 75"},
        {"attempt": 1, "step": 13, "host": "s0-h0", "do": "signal 9"},
    ],
)
def test_a_failure_is_counted_and_the_hosts_meet_again(
    slices: Callable[..., Slices], fault: Mapping[str, Any]
) -> None:
    peer = "s0-h0" if fault["host"] == "s1-h0" else "s1-h0"
    two = slices(faults(fault, {"attempt": 1, "step": 15, "host": peer, "do": "peer-lost"}))
    two.boot()
    assert two.finish() == [0, 0], two.evidence()
    assert two.codes() == [75, 0]
    assert two.end(1).first_failing_host == fault["host"]
    assert two.end(2).from_step == 10
    assert not (Path(two.spec.run_dir) / "TWO-WRITERS").exists()
    # What the first attempt left on the disk is gone.
    assert [path.name for path in (two.vms[1].home / ".muster-vm/scratch").iterdir()] == ["0002"]


def test_failures_beyond_the_limit_end_the_run_for_all(slices: Callable[..., Slices]) -> None:
    script = faults(
        *({"attempt": number, "step": 10 * number + 1, "do": "exit 75"} for number in range(1, 9))
    )
    two = slices(script, max_restarts=1)
    two.boot()
    assert two.finish() == [ExitCode.INFRASTRUCTURE, 0], two.evidence()
    assert two.codes() == [75, 75]
    for vm in two.vms:
        assert vm.state().startswith("over: 2 attempts failed (run.max_restarts=1); the last: s"), vm.state()


def test_a_crash_loop_and_a_users_error_end_it(slices: Callable[..., Slices]) -> None:
    two = slices(faults({"attempt": 1, "step": 3, "host": "s1-h0", "do": "exit 1"},
                        {"attempt": 1, "step": 4, "host": "s0-h0", "do": "peer-lost"}))  # fmt: skip
    two.boot()
    assert two.finish() == [ExitCode.EXPERIMENT_FAILED, 0], two.evidence()
    assert two.codes() == [1]
    assert [vm.state() for vm in two.vms] == ["over: s1-h0: the loss is NaN"] * 2
    # At the next boot nothing is done again.
    two.boot()
    assert two.finish() == [ExitCode.EXPERIMENT_FAILED, 0]
    assert two.run.attempts() == [1]


def test_a_killed_worker_comes_back_into_the_next_attempt(slices: Callable[..., Slices]) -> None:
    """Its trainer dies with it; the peer notices later. The new process is no part of the old attempt."""
    two = slices(faults({"attempt": 1, "step": 40, "host": "s0-h0", "do": "peer-lost"}))
    two.boot()
    two.wait_for_step(12)
    two.vms[1].kill()
    two.boot(1)
    two.wait_for(lambda: "under way without this pod" in two.vms[1].state(), "refusal")
    assert two.finish() == [0, 0], two.evidence()
    assert two.codes() == [75, 0]
    assert two.end(1).first_failing_host == "s1-h0"


def test_a_rebooted_process_0_settles_what_it_left(slices: Callable[..., Slices]) -> None:
    two = slices(faults({"attempt": 1, "step": 20, "host": "s1-h0", "do": "peer-lost"}))
    two.boot()
    two.wait_for_step(12)
    two.vms[0].kill()
    two.wait_for(lambda: "process 0 does not answer" in two.vms[1].state(), "wait of the other host")
    began_s = time.monotonic()
    two.boot(0)
    assert two.finish() == [0, 0], two.evidence()
    assert time.monotonic() - began_s < 30, "it waited for its own lease to expire"
    assert two.codes() == [75, 0]


@pytest.mark.parametrize(
    ("path", "value"),
    [("instance/preempted", "TRUE"), ("instance/maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE")],
)
def test_a_notice_saves_and_leaves(slices: Callable[..., Slices], path: str, value: str) -> None:
    two = slices(faults({"attempt": 1, "step": 30, "host": "s0-h0", "do": "exit 42"}))
    two.boot()
    two.wait_for_step(12)
    two.vms[1].metadata.values[path] = value
    assert two.vms[1].wait() == ExitCode.PREEMPTED
    assert two.vms[1].state().startswith("left after attempt 1: stopped cleanly")
    two.wait_for(lambda: "waiting for s1-h0" in two.vms[0].state(), "wait of the other host")
    assert two.codes() == [42]
    # After maintenance the VM boots again.
    two.vms[1].metadata.values |= {"instance/preempted": "FALSE", "instance/maintenance-event": "NONE"}
    two.boot(1)
    assert two.finish() == [0, 0], two.evidence()
    assert two.codes() == [42, 0]
    assert two.end(2).from_step >= 12


def test_a_stop_request_saves_and_ends_it_for_all(slices: Callable[..., Slices]) -> None:
    # Process 0 looks for a stop once a second, and the stand-in does not tell its peers of it.
    two = slices(faults({"attempt": 1, "step": 35, "host": "s1-h0", "do": "exit 42"}, save_s=2.0))
    two.boot()
    two.wait_for_step(5)
    two.run.request_stop(time.time(), "ada@laptop")
    assert two.finish() == [ExitCode.PREEMPTED, 0], two.evidence()
    assert [vm.state() for vm in two.vms] == ["over: stopped as asked by ada@laptop"] * 2
    assert two.codes() == [42]


def test_vms_of_a_launch_that_was_replaced_do_nothing(slices: Callable[..., Slices]) -> None:
    two = slices()
    two.run.write_order(Order(id="order-2", recipe="r", bundle=None, launched_s=1.0, by="bob@desk"))
    two.boot()
    assert two.finish() == [ExitCode.PREEMPTED, 0]
    assert two.vms[1].state() == "over: launched again by bob@desk"
    assert two.run.attempts() == []


def test_sigterm_while_waiting_is_heeded(slices: Callable[..., Slices]) -> None:
    two = slices()
    two.boot()
    two.wait_for_step(1)
    two.vms[0].kill()
    two.vms[1].kill()
    two.boot(1)
    two.wait_for(lambda: "process 0 does not answer" in two.vms[1].state(), "wait")
    assert two.vms[1].process is not None
    two.vms[1].process.send_signal(signal.SIGTERM)
    assert two.vms[1].wait() == ExitCode.PREEMPTED
    assert two.vms[1].state() == "left before the attempt began"


def test_a_vm_without_guest_attributes_works_all_the_same(slices: Callable[..., Slices]) -> None:
    two = slices()
    for vm in two.vms:
        vm.metadata.guest_status = 403
    two.boot()
    assert two.finish() == [0, 0], two.evidence()
    assert not any(vm.metadata.states() for vm in two.vms)


def test_a_run_directory_without_its_recipe_is_said(slices: Callable[..., Slices]) -> None:
    two = slices()
    (Path(two.spec.run_dir) / two.spec.recipe).unlink()
    two.boot()
    assert two.vms[0].wait() == ExitCode.BAD_INPUT
    assert two.vms[0].state().startswith("failed: ")
    assert "Traceback" not in two.vms[0].console()
