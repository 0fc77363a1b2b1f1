"""The books at the end of a set of machines: its provision, its attempt, and the lease its hosts held."""

from __future__ import annotations

import dataclasses

from launcher import lease
from launcher.attempts import close_attempt
from launcher.ledger import AttemptEnd
from launcher.rundir import RunDir, committed_step
from launcher.supervise.actions import Delete
from launcher.supervise.observation import Fault, Observation, Wanted
from launcher.supervise.place import Place
from launcher.supervise.records import Provision, Trouble
from recipes.contract import ExitCode

FORGIVE_S = 600.0
"""An attempt that failed so shortly before its machines were taken away died of that: slices do not die at
the same moment, and the hosts of the others fail first."""
NOT_COUNTED = (Trouble.PREEMPTED, Trouble.REPLACED)


def created(provision: Provision) -> Provision:
    """The service has taken the request."""
    return dataclasses.replace(provision, is_created=True)


def refused(provision: Provision, fault: Fault, now: float) -> Provision:
    """The service has not: nothing of it is there."""
    return dataclasses.replace(
        provision, ended_s=now, trouble=fault.trouble, code=fault.code, why=fault.sentence
    )


def doomed(provision: Provision, action: Delete) -> Provision:
    """It is being removed: why is written before it is done."""
    return dataclasses.replace(provision, trouble=action.trouble, code=action.code, why=action.why)


def close(run: RunDir, wanted: Wanted, place: Place, seen: Observation, provision: Provision) -> None:
    """Writes that nothing of a provision is left; done last, so that it is done again after a kill."""
    if not provision.is_probe and not wanted.restarts_itself:
        # Machines that are gone hold nothing.
        lease.release_of(run.storage, place.left_lease(provision))
        assert provision.ended_s is not None
        _end_attempt(run, seen, provision, provision.ended_s)
    run.write_provision(provision)


def _end_attempt(run: RunDir, seen: Observation, provision: Provision, now: float) -> None:
    """Ends the attempt that died with the machines, and calls a preemption what was one."""
    if seen.attempt is not None:
        if provision.trouble in NOT_COUNTED:
            run.write_attempt_end(
                seen.attempt.attempt, _preempted(run, provision, seen.attempt.from_step, now)
            )
        else:
            close_attempt(run, seen.attempt.attempt, {}, now=now)
        return
    numbers = run.attempts()
    last = run.attempt_end(numbers[-1]) if numbers else None
    if (
        last is not None
        and provision.trouble is Trouble.PREEMPTED
        and last.exit_code == ExitCode.INFRASTRUCTURE
        and last.end_s >= max(now - FORGIVE_S, provision.requested_s)
    ):
        run.write_attempt_end(numbers[-1], _preempted(run, provision, last.from_step, last.end_s))


def _preempted(run: RunDir, provision: Provision, from_step: int, end_s: float) -> AttemptEnd:
    return AttemptEnd(
        end_s=end_s,
        exit_code=int(ExitCode.PREEMPTED),
        first_failing_host=None,
        message=provision.why,
        hint="",
        from_step=from_step,
        to_step=committed_step(run.storage),
    )
