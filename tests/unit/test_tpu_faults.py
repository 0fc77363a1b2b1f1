"""What the Cloud TPU API's errors mean, row by row."""

from __future__ import annotations

import pytest

from launcher.supervise.observation import MEANING
from launcher.supervise.records import Trouble
from launcher.tpu.faults import classify, classify_end

CAPACITY, QUOTA, PERMISSION = Trouble.NO_CAPACITY, Trouble.QUOTA, Trouble.PERMISSION
RESERVATION, BAD, AWAY = Trouble.RESERVATION, Trouble.BAD_REQUEST, Trouble.UNAVAILABLE
QUOTA_TEXT = "Quota limit 'TPUV5sPreemptibleLitepodPerProjectPerZoneForTPUAPI' has been exceeded. Limit: 16."
NO_CHIPS = 'There is no more capacity in the zone "us-east5-a"; you can try in another zone'
ROWS = [
    ("RESOURCE_EXHAUSTED", "", NO_CHIPS, CAPACITY),
    ("RESOURCE_EXHAUSTED", "", "There is currently insufficient capacity. You can try again later", CAPACITY),
    ("RESOURCE_EXHAUSTED", "", "stockout", CAPACITY),
    ("RESOURCE_EXHAUSTED", "", "The zone does not have enough resources available", CAPACITY),
    ("RESOURCE_EXHAUSTED", "", "", CAPACITY),
    ("RESOURCE_EXHAUSTED", "", QUOTA_TEXT, QUOTA),
    ("RESOURCE_EXHAUSTED", "RESOURCE_QUOTA_EXCEEDED", "Limit: 4 in zone us-east5-b.", QUOTA),
    ("RESOURCE_EXHAUSTED", "RATE_LIMIT_EXCEEDED", "Quota exceeded for quota metric 'Requests'", QUOTA),
    ("RESOURCE_EXHAUSTED", "", "quota: you can try again later", QUOTA),
    ("RESOURCE_EXHAUSTED", "", "Not enough capacity in reservation training", RESERVATION),
    ("FAILED_PRECONDITION", "", "Reservation training is not found", RESERVATION),
    ("NOT_FOUND", "", "Reservation 'projects/p/locations/z/reservations/r' not found", RESERVATION),
    ("INVALID_ARGUMENT", "", "reservation_name is of another zone", RESERVATION),
    ("FAILED_PRECONDITION", "", "Insufficient capacity for v6e-256", CAPACITY),
    ("FAILED_PRECONDITION", "", "Quota exceeded", QUOTA),
    ("FAILED_PRECONDITION", "", "Billing must be enabled for project p", PERMISSION),
    ("FAILED_PRECONDITION", "", "Queued resource is being deleted.", BAD),
    ("NOT_FOUND", "", "Resource 'projects/p/locations/z/nodes/n' was not found.", BAD),
    ("NOT_FOUND", "", "The network research was not found", BAD),
    ("INVALID_ARGUMENT", "", "Invalid accelerator type v6e-7", BAD),
    ("INVALID_ARGUMENT", "", "Runtime version v9 does not exist", BAD),
    ("INVALID_ARGUMENT", "BAD_LABEL", "Label value is malformed", BAD),
    ("OUT_OF_RANGE", "", "page_size is too large", BAD),
    ("UNIMPLEMENTED", "", "Method is not implemented", BAD),
    ("ALREADY_EXISTS", "", "Resource already exists.", BAD),
    ("PERMISSION_DENIED", "", "user is not authorized", PERMISSION),
    ("PERMISSION_DENIED", "SERVICE_DISABLED", "Cloud TPU API has not been used in project 1", PERMISSION),
    ("PERMISSION_DENIED", "IAM_PERMISSION_DENIED", "Permission 'tpu.nodes.create' denied", PERMISSION),
    ("PERMISSION_DENIED", "", "", PERMISSION),
    ("UNAUTHENTICATED", "ACCESS_TOKEN_EXPIRED", "Request had invalid credentials", PERMISSION),
    ("UNAVAILABLE", "", "failed to connect to all addresses", AWAY),
    ("UNAVAILABLE", "", "quota server is away", AWAY),
    ("DEADLINE_EXCEEDED", "", "Deadline Exceeded", AWAY),
    ("ABORTED", "", "concurrent change", AWAY),
    ("CANCELLED", "", "", AWAY),
    ("INTERNAL", "", "an internal error has occurred", AWAY),
    ("INTERNAL", "", "There is no more capacity in the zone", CAPACITY),
    ("UNKNOWN", "", "", AWAY),
    ("UNKNOWN", "", "Quota limit exceeded", QUOTA),
    ("DATA_LOSS", "", "", AWAY),
    ("SOMETHING_NEW", "", "of a later year", AWAY),
    ("99", "", "", AWAY),
]
ENDS = [
    ("DEADLINE_EXCEEDED", "The request was not fulfilled before valid_until.", CAPACITY),
    ("CANCELLED", "", CAPACITY),
    ("ABORTED", "", CAPACITY),
    ("UNAVAILABLE", "", CAPACITY),
    ("OK", "", CAPACITY),
    ("RESOURCE_EXHAUSTED", QUOTA_TEXT, QUOTA),
    ("RESOURCE_EXHAUSTED", NO_CHIPS, CAPACITY),
    ("PERMISSION_DENIED", "no", PERMISSION),
    ("INVALID_ARGUMENT", "Invalid accelerator type", BAD),
    ("INTERNAL", "an internal error", AWAY),
]


@pytest.mark.parametrize(("code", "reason", "text", "trouble"), ROWS)
def test_an_error_of_a_call(code: str, reason: str, text: str, trouble: Trouble) -> None:
    fault = classify(code, reason, text)
    assert fault.trouble is trouble
    assert fault.code == (f"{code}/{reason}" if reason else code)
    assert fault.sentence == f"{MEANING[trouble]} ({fault.code}: {text})"


@pytest.mark.parametrize(("code", "text", "trouble"), ENDS)
def test_the_error_of_a_failed_queued_resource(code: str, text: str, trouble: Trouble) -> None:
    fault = classify_end(code, "", text)
    assert (fault.trouble, fault.code) == (trouble, code)
    assert fault.message


def test_texts_of_the_service_are_made_harmless() -> None:
    fault = classify("INTERNAL", "", "a\nb\x1b[31m" + 1000 * "c")
    assert "\n" not in fault.message
    assert "\x1b" not in fault.message
    assert len(fault.message) <= 300
