"""What Kubernetes and container registries accept as a name, and which names tell of a secret.

ASCII only: no look-alike passes.

The rules are those of k8s.io/apimachinery/pkg/util/validation and github.com/distribution/reference.
"""

from __future__ import annotations

import re

MAX_LABEL, MAX_SUBDOMAIN = 63, 253
MAX_REPOSITORY = 255

ACCELERATOR, TOPOLOGY = "cloud.google.com/gke-tpu-accelerator", "cloud.google.com/gke-tpu-topology"
SPOT, FLEX_START = "cloud.google.com/gke-spot", "cloud.google.com/gke-flex-start"
RESERVATION = "cloud.google.com/reservation-name"
"""Labels that GKE gives to nodes; those of the capacity are keys of taints too."""

_DNS_LABEL = r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?"
_LABEL = re.compile(_DNS_LABEL)
_SUBDOMAIN = re.compile(rf"{_DNS_LABEL}(?:\.{_DNS_LABEL})*")
_QUALIFIED = re.compile(r"[A-Za-z0-9](?:[-A-Za-z0-9_.]*[A-Za-z0-9])?")
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET_KEY = re.compile(r"[-._A-Za-z0-9]+")
_COMPONENT = r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*"
_HOST = r"[A-Za-z0-9](?:[-.A-Za-z0-9]*[A-Za-z0-9])?(?::[0-9]{1,5})?"
_TAG = r"[A-Za-z0-9_][-.A-Za-z0-9_]{0,127}"
_IMAGE = re.compile(
    rf"(?P<repository>(?:{_HOST}/)?{_COMPONENT}(?:/{_COMPONENT})*)(?::{_TAG})?@sha256:[0-9a-f]{{64}}"
)
_SECRET = re.compile(
    r"(^|_)TOKEN(_|$)|TOKEN$|SECRET|PASSWO?R?D|PASSPHRASE|CREDENTIAL|(API|ACCESS|PRIVATE|AUTH)_?KEY"
    r"|(?<![A-Za-z0-9])(KEY|PAT)S?$",
    re.IGNORECASE,
)
_URL_PASSWORD = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^/?#@:\s]*:[^/?#@\s]+@")


def looks_secret(name: str) -> bool:
    """Whether a variable of this name holds what must be in no manifest, log or message."""
    return _SECRET.search(name) is not None


def holds_password(value: str) -> bool:
    """Whether there is an address ``scheme://user:password@host`` in it."""
    return _URL_PASSWORD.search(value) is not None


def is_dns_label(name: str) -> bool:
    """A namespace, or a reservation."""
    return len(name) <= MAX_LABEL and _LABEL.fullmatch(name) is not None


def is_dns_subdomain(name: str, limit: int = MAX_SUBDOMAIN) -> bool:
    """A service account, a secret, a queue."""
    return len(name) <= limit and _SUBDOMAIN.fullmatch(name) is not None


def is_cluster(name: str) -> bool:
    """A context of a kubeconfig, which may be nearly anything, or the name of a cluster."""
    return 0 < len(name) <= MAX_SUBDOMAIN and name.strip() == name and name.isprintable()


def is_label_key(key: str) -> bool:
    """``NAME`` or ``DOMAIN/NAME``."""
    domain, slash, name = key.rpartition("/")
    return (not slash or is_dns_subdomain(domain)) and _is_qualified(name)


def is_label_value(value: str) -> bool:
    """May be empty."""
    return value == "" or _is_qualified(value)


def is_env_name(name: str) -> bool:
    """What every shell and program can read; Kubernetes itself would allow more."""
    return len(name) <= MAX_SUBDOMAIN and _ENV_NAME.fullmatch(name) is not None


def is_secret_key(key: str) -> bool:
    """A key within a Secret."""
    return (
        len(key) <= MAX_SUBDOMAIN
        and not key.startswith("..")
        and key != "."
        and bool(_SECRET_KEY.fullmatch(key))
    )


def is_image_by_digest(image: str) -> bool:
    """``REPOSITORY@sha256:<64 hex>``, with or without a tag, which registries ignore beside a digest."""
    found = _IMAGE.fullmatch(image) if len(image) <= 2 * MAX_REPOSITORY else None
    return found is not None and len(found["repository"]) <= MAX_REPOSITORY


def _is_qualified(name: str) -> bool:
    return len(name) <= MAX_LABEL and _QUALIFIED.fullmatch(name) is not None
