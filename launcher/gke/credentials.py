"""What a kubeconfig gives to log in with: certificates, and plugins that are asked for a token.

The Kubernetes client starts a plugin (``exec``) through a module that it calls ``subprocess``, waits for it
without end, and only logs that it failed. :data:`SUBPROCESS` takes that module's place.
"""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
import types
from collections.abc import Iterator
from typing import Any

from launcher import waiting
from launcher.text import one_line
from recipes.contract import ExitCode
from recipes.errors import UserError

LIMIT_S = 60.0
"""A plugin may ask its user something."""


class _Plugin(subprocess.Popen[str]):
    """One call of a plugin, with an end."""

    def communicate(self, input: str | None = None, timeout: float | None = None) -> tuple[str, str]:
        command = str(self.args[0] if isinstance(self.args, list) else self.args)
        with waiting.named(f"the credential plugin {command}"):
            try:
                return super().communicate(input, LIMIT_S if timeout is None else timeout)
            except subprocess.TimeoutExpired:
                self._end()
                raise UserError(
                    f"the credential plugin {command} gave no credentials within {LIMIT_S:.0f} s",
                    hint="run that command by hand: it may wait for a login, or for the network",
                    exit_code=ExitCode.INFRASTRUCTURE,
                ) from None

    def _end(self) -> None:
        self.kill()
        self.wait()
        for pipe in (self.stdin, self.stdout, self.stderr):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()


SUBPROCESS: Any = types.SimpleNamespace(Popen=_Plugin, PIPE=subprocess.PIPE)


def check_certificates(trusted: str | None, own: str | None, key: str | None) -> None:
    """Raises ValueError for files that a connection would only call an SSL error."""
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    what = "certificate authority"
    try:
        if trusted:
            context.load_verify_locations(trusted)
        what = "client certificate"
        if own:
            # An empty passphrase: the library would ask for one on the terminal.
            context.load_cert_chain(own, key, "")
    except OSError as error:
        raise ValueError(f"the {what} of its context cannot be read: {error}") from error


@contextlib.contextmanager
def credential_errors(context: str) -> Iterator[None]:
    """The client only logs that a credential plugin failed, and goes on without credentials."""
    said: list[str] = []
    ours: list[UserError] = []

    def emit(record: logging.LogRecord) -> None:
        said.append(record.getMessage())
        cause = sys.exception()
        ours.extend([cause] if isinstance(cause, UserError) else [])

    handler = logging.Handler(logging.ERROR)
    handler.emit = emit  # type: ignore[method-assign]
    handler.addFilter(lambda record: record.name == "root")
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
    if ours:
        raise ours[0]
    if said:
        raise UserError(
            f"no credentials for context {context}: {one_line(said[0])}",
            hint="log in again; GKE contexts need `gcloud components install gke-gcloud-auth-plugin`",
        )
