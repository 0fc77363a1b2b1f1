"""A worker on a TPU VM: meets the other hosts for one attempt after another, until the run is over.

    python -P -m launcher.tpu.worker       # started by bootstrap.py; everything else comes from metadata

VMs outlive attempts: after a failure the hosts meet again in the same VMs, and process 0 counts failures.
A host that gets a notice saves, leaves, and waits for nobody: its VM is about to go, or to boot again.
"""

from __future__ import annotations

import os
import secrets
import shutil
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from launcher import attempts, lease, ledger, member
from launcher.budget import Verdict
from launcher.exits import HostEnd
from launcher.gang import NeverMet, RunOver
from launcher.lookout import Lookout
from launcher.member import Leader, Member, Notice
from launcher.rundir import RunDir, read_recipe
from launcher.storage import Unavailable, open_storage
from launcher.tpu import bootstrap
from launcher.tpu.metadata import HostFacts, Watch, host_facts
from launcher.tpu.vm import SPEC, VmSpec, lease_owner
from recipes.contract import COORDINATOR_PORT, MEGASCALE_PORT, ExitCode, HostContext, PodEnv
from recipes.errors import UserError

BACK_OFF_S = 2.0
"""Between the end of an attempt and the next one."""
AWAY_S = 10.0
"""Between tries while the run directory cannot be reached."""


@dataclass(frozen=True, kw_only=True, slots=True)
class End:
    """How a worker ends."""

    exit_code: int
    words: str
    """For the supervisor."""


def main() -> int:
    notice = Notice()
    notice.listen()
    try:
        end = _run(notice)
    except UserError as error:
        # The supervisor takes no notice for a failure of the machines.
        left = "left after a notice" if notice.came else "failed"
        end = End(exit_code=error.exit_code, words=f"{left}: {error.message}; {error.hint}")
    except (OSError, bootstrap.Failure) as error:
        end = End(exit_code=ExitCode.INFRASTRUCTURE, words=f"failed: {error}")
    except Exception as error:
        traceback.print_exc()
        words = f"failed: the worker itself failed: {type(error).__name__}: {error}"
        end = End(exit_code=ExitCode.INFRASTRUCTURE, words=words)
    report(end.words)
    return end.exit_code


def report(text: str) -> None:
    """One line for the console and for the supervisor."""
    line = " ".join(text.split())
    member.say(line)
    bootstrap.tell(line)


def _run(notice: Notice) -> End:
    spec = ledger.decode(bootstrap.spec_text().encode(), VmSpec, f"the metadata {SPEC}")
    facts = host_facts(spec)
    state = bootstrap.state_folder()
    os.environ.update(environment(spec, facts, state))
    Watch(notice, member.say).start()
    host = member_of(spec, facts, state)
    return _lead(spec, host, notice) if host.leads else _follow(host, notice)


def environment(spec: VmSpec, facts: HostFacts, state: Path) -> Mapping[str, str]:
    """What agent and trainer get beside the contract; the recipe's own variables win."""
    found = {
        PodEnv.NODE_NAME.value: facts.name,
        "PYTHONUNBUFFERED": "1",
        "XDG_CACHE_HOME": str(state / "cache"),
        # By default JAX's coordinator listens on every address, and a second one on the port starts silently.
        "JAX_COORDINATOR_BIND_ADDRESS": f"{facts.address}:{COORDINATOR_PORT}",
        "JAX_PLATFORMS": "cpu" if spec.is_cpu else "tpu,cpu",
    }
    if spec.is_cpu:
        found["JAX_NUM_CPU_DEVICES"] = str(spec.devices_per_host)
    elif spec.num_slices > 1:
        # On one slice they must not be set.
        found |= {
            "MEGASCALE_NUM_SLICES": str(spec.num_slices),
            "MEGASCALE_SLICE_ID": str(facts.slice_id),
            "MEGASCALE_COORDINATOR_ADDRESS": facts.leader,
            "MEGASCALE_PORT": str(MEGASCALE_PORT),
        }
    return {**found, **spec.env}


def member_of(spec: VmSpec, facts: HostFacts, state: Path) -> Member:
    """This VM among the hosts of its provision."""
    context = HostContext(
        run_dir=spec.run_dir,
        attempt=0,
        slice_id=facts.slice_id,
        num_slices=spec.num_slices,
        host_id=facts.host_id,
        hosts_per_slice=spec.hosts_per_slice,
        coordinator=f"{facts.leader}:{COORDINATOR_PORT}",
        grace_period_s=spec.grace_period_s,
        scratch_dir=str(state / "scratch"),
    )
    owner_id = lease_owner(spec.order, spec.provision)
    return Member(
        context=context,
        recipe_path=spec.recipe,
        job=spec.order,
        incarnation=owner_id,
        # Another process, also of the same boot, is no part of the attempt that is under way.
        uid=secrets.token_hex(8),
        address=facts.address,
        bundle=spec.bundle,
        # Whoever led these VMs before certainly runs no more: there is one process 0 of a provision.
        owner=lease.this_process(f"TPU VMs of {spec.run_dir.rpartition('/')[2]}", owner_id=owner_id),
    )


def _follow(host: Member, notice: Notice) -> End:
    """Any process but 0."""
    attempt = 0
    while True:
        try:
            ended = member.follow(
                host, notice, after=attempt, say=_waiting, began=lambda number: _began(host, number)
            )
        except NeverMet as error:
            _waiting(str(error))
            continue
        except RunOver as over:
            return End(exit_code=ExitCode.COMPLETE, words=f"over: {over}")
        except Unavailable as error:
            _pause(f"{error.message}; trying again", AWAY_S, notice)
            continue
        if ended is None:
            return _left("before the attempt began")
        attempt = ended.attempt
        if leaves(ended.own, notice):
            return _left(f"after attempt {attempt}: {ended.own.reason}")
        _pause(_ended(attempt, ended.own), BACK_OFF_S, notice)


def _lead(spec: VmSpec, host: Member, notice: Notice) -> End:
    """Process 0."""
    run = RunDir(open_storage(host.context.run_dir))
    leader = Leader(host, notice, say=_waiting)
    leader.start()
    while True:
        try:
            if not leader.meet():
                return _left("before the attempt began")
            end = _one_attempt(spec, host, run, leader, notice)
        except NeverMet as error:
            _waiting(str(error))
            continue
        except Unavailable as error:
            _pause(f"{error.message}; trying again", AWAY_S, notice)
            end = None
        if end is not None:
            return end
        leader.meet_again()


def _one_attempt(spec: VmSpec, host: Member, run: RunDir, leader: Leader, notice: Notice) -> End | None:
    """Opens an attempt, sees it through and judges the run; None: the hosts meet again."""
    with member.hold(run, host.owner, notice, say=report) as keeper, Lookout(run) as lookout:
        if why := _not_wanted(spec, run):
            return _dismissed(leader, ExitCode.PREEMPTED, why)
        attempts.close_last(run, time.time())
        recipe = read_recipe(run.storage, host.recipe_path)
        if verdict := attempts.verdict(run, recipe, host.job):
            return _over(leader, verdict)
        opening = attempts.Opening(
            recipe=recipe,
            hosts=host.hosts,
            job=host.job,
            lock={"bundle": host.bundle, "incarnation": host.incarnation, "provision": spec.provision},
        )
        attempt = attempts.number_attempt(run, opening, time.time())
        _began(host, attempt)
        ended = leader.lead(run, attempt, keeper, lookout)
        if verdict := attempts.verdict(run, recipe, host.job):
            return _over(leader, verdict)
        if why := _not_wanted(spec, run):
            return _dismissed(leader, ExitCode.PREEMPTED, why)
    if leaves(ended.own, notice):
        return _left(f"after attempt {attempt}: {ended.own.reason}")
    _pause(_ended(attempt, ended.own), BACK_OFF_S, notice)
    return None


def _not_wanted(spec: VmSpec, run: RunDir) -> str:
    """Why no other attempt may begin on these VMs; empty: it may."""
    if stop := run.stop_request():
        return "to go on with other machines" if stop.resumes else f"stopped as asked by {stop.by}"
    order = run.order()
    if order is not None and order.id != spec.order:
        return f"launched again by {order.by}"
    return ""


def leaves(own: HostEnd, notice: Notice) -> bool:
    """Whether this host is going away, so that it may not promise to take part in another attempt."""
    return notice.came or (own.exit_code == ExitCode.PREEMPTED and not own.collateral)


def _over(leader: Leader, verdict: Verdict) -> End:
    return _dismissed(leader, verdict.exit_code, verdict.reason)


def _dismissed(leader: Leader, code: ExitCode, why: str) -> End:
    report(f"over: {why}")
    leader.dismiss(why)
    return End(exit_code=code, words=f"over: {why}")


def _left(when: str) -> End:
    return End(exit_code=ExitCode.PREEMPTED, words=f"left {when}")


def _ended(attempt: int, own: HostEnd) -> str:
    return f"attempt {attempt} ended: {own.reason}"


def _began(host: Member, attempt: int) -> None:
    # What earlier attempts left there is shipped; a disk lasts for many.
    shutil.rmtree(host.context.scratch_dir, ignore_errors=True)
    report(f"attempt {attempt}")


def _waiting(text: str) -> None:
    report(f"waiting for the other hosts: {text}")


def _pause(text: str, seconds: float, notice: Notice) -> None:
    """Says why, then waits; not after a notice. Listens to signals again, which the agent had taken."""
    notice.listen()
    report(text)
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s and not notice.came:
        time.sleep(0.05)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # A storage client may still wait for an answer in its thread; nothing is left to be done.
    os._exit(code)
