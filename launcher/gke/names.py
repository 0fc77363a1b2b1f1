"""Names that a JobSet of Muster's carries: what it is recognised and owned by."""

from __future__ import annotations

import hashlib

GROUP, VERSION, PLURAL = "jobset.x-k8s.io", "v1alpha2", "jobsets"
FIELD_MANAGER = "muster"
MANAGED_BY = "app.kubernetes.io/managed-by"
OWNER = "muster"
"""Value of MANAGED_BY on everything that Muster creates."""
RUN = "muster.tpu/run"
FINGERPRINT = "muster.tpu/fingerprint"
"""First characters of the recipe's fingerprint."""
SPEC = "muster.tpu/spec"
"""First characters of the sha256 of the manifest without this label: whether two JobSets are the same."""
RUN_DIR = "muster.tpu/run-dir"
"""Annotation: the run directory. A label cannot hold an address."""
DIGEST_CHARS = 16
QUEUE = "kueue.x-k8s.io/queue-name"
"""Kueue's label: in which LocalQueue a JobSet waits."""

CONTAINER = "trainer"
SLICE_JOB = "slice"
"""Name of the replicated job: one Job a slice."""


def subdomain(namespace: str, run: str) -> str:
    """The headless service of a run: 12 characters, because the coordinator's label holds 63 with it in.

    JobSet's default is the JobSet's own name, which would count twice (sigs.k8s.io/jobset v0.11.1,
    pkg/webhooks/jobset_webhook.go).
    """
    return "m" + hashlib.sha256(f"{namespace}/{run}".encode()).hexdigest()[:11]
