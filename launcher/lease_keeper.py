"""Renews a held lease in the background and tells when it was lost."""

from __future__ import annotations

import threading
import time

from launcher.lease import LEASE_S, Held, LeaseLost, Owner
from launcher.rundir import RunDir
from recipes.contract import RunPath
from recipes.errors import UserError

RENEWALS_A_LEASE = 4


class LeaseKeeper:
    """A context manager: holds the lease inside, releases it at the end; ``take`` may come earlier."""

    def __init__(self, run: RunDir, owner: Owner, path: str = RunPath.LEASE) -> None:
        self._run, self._owner, self._path = run, owner, path
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)
        self._held: Held | None = None
        self.lost: LeaseLost | None = None
        """Set once another process has taken the run over."""

    def take(self) -> None:
        """Takes the lease.

        Raises:
          LeaseHeld: somebody else has it.
        """
        if self._held is None:
            self._held = self._run.acquire(self._owner, time.time(), self._path)
            self._thread.start()

    def __enter__(self) -> LeaseKeeper:
        self.take()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        if self._held is not None and self.lost is None:
            self._run.release(self._held)

    def _renew(self) -> None:
        while not self._done.wait(LEASE_S / RENEWALS_A_LEASE):
            assert self._held is not None
            try:
                self._held = self._run.renew(self._held, time.time())
            except LeaseLost as error:
                self.lost = error
                return
            except UserError:
                # The store is away: train on. Whoever took the run over meanwhile shows at the next renewal.
                continue
