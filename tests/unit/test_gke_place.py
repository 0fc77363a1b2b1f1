"""What a cluster says, in the supervisor's words."""

from __future__ import annotations

import pytest

from launcher.gke.api_errors import ClusterError, Conflicting, Denied, Missing, Refused, Unreachable
from launcher.gke.objects import created_s
from launcher.gke.observe import JobState
from launcher.gke.of_run import num_slices
from launcher.gke.place import PHASES, fault_of
from launcher.supervise.observation import Phase
from launcher.supervise.records import Trouble
from recipes.errors import UserError


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (Denied("ada may not patch jobsets"), Trouble.PERMISSION),
        (Refused("is refused: exceeded quota: tpus"), Trouble.QUOTA),
        (Refused("is refused: spec.x is wrong"), Trouble.BAD_REQUEST),
        (Missing("there is no namespace x"), Trouble.BAD_REQUEST),
        (Conflicting("the object has been modified"), Trouble.UNAVAILABLE),
        (Unreachable("does not answer", exit_code=75), Trouble.UNAVAILABLE),
        (ClusterError("a webhook is not up", exit_code=75), Trouble.UNAVAILABLE),
        (UserError("JobSet run was not made by Muster for this run"), Trouble.BAD_REQUEST),
    ],
)
def test_refusals(error: UserError, expected: Trouble) -> None:
    fault = fault_of(error)
    assert (fault.trouble, fault.message) == (expected, error.message)


def test_every_state_but_absent_and_suspended_has_a_phase() -> None:
    assert set(JobState) - set(PHASES) == {JobState.ABSENT, JobState.SUSPENDED}
    over = {state for state, phase in PHASES.items() if phase is Phase.OVER}
    assert over == {JobState.COMPLETED, JobState.FAILED}


def test_slices_and_age_of_a_jobset() -> None:
    jobs = [{"name": "head", "replicas": 1}, {"name": "slice", "replicas": 3}, {"replicas": "many"}]
    jobset = {
        "metadata": {"creationTimestamp": "2026-12-01T00:00:00Z"},
        "spec": {"replicatedJobs": jobs},
    }
    assert (num_slices(jobset), created_s(jobset)) == (3, 1796083200.0)
    assert (num_slices({}), created_s({"metadata": {"creationTimestamp": 5}})) == (0, 0.0)
