"""The kubelet's HTTPS endpoint for logs, which the API server's pod log requests end at.

Serves ``/containerLogs/NAMESPACE/POD/CONTAINER`` with follow, tailLines, timestamps, sinceSeconds,
sinceTime, limitBytes and previous. Log files have the time of each line before it, as
`containers.Container` writes them.
"""

from __future__ import annotations

import datetime
import re
import ssl
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

POLL_S = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class LogSource:
    """The log of one container."""

    path: Path
    is_ended: Callable[[], bool]


class LogServer:
    """Serves until it is closed. ``find(namespace, pod, container)`` gives the log, or None."""

    def __init__(
        self, find: Callable[[str, str, str], LogSource | None], *, certificate: Path, key: Path
    ) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        self.closing = threading.Event()
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.find, self._server.closing = find, self.closing
        # The handshake belongs to the connection's own thread: a silent client must not stop the others.
        self._server.socket = context.wrap_socket(
            self._server.socket, server_side=True, do_handshake_on_connect=False
        )
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": POLL_S}, daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    find: Callable[[str, str, str], LogSource | None]
    closing: threading.Event
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients hang up in the middle of a followed log: that is how following ends."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        url = urllib.parse.urlsplit(self.path)
        query = {name: values[-1] for name, values in urllib.parse.parse_qs(url.query).items()}
        match = re.fullmatch(r"/containerLogs/([^/]+)/([^/]+)/([^/]+)", url.path)
        source = self.server.find(*match.groups()) if match else None
        if match is None or source is None:
            self._refuse(404, f"no such container: {url.path}")
        elif query.get("previous") == "true":
            self._refuse(400, f'previous terminated container "{match[3]}" in pod "{match[2]}" not found')
        else:
            self._serve(source, query)

    def _serve(self, source: LogSource, query: dict[str, str]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/plain")
        self.end_headers()
        left = int(query.get("limitBytes", 1 << 62))
        for line in self._lines(source, query):
            text = line if query.get("timestamps") == "true" else line.partition(b" ")[2]
            self.wfile.write(text[:left])
            left -= len(text)
            if left <= 0:
                return

    def _lines(self, source: LogSource, query: dict[str, str]) -> Iterator[bytes]:
        with source.path.open("rb") as file:
            lines = [line for line in file if line.partition(b" ")[0].decode() >= _since(query)]
            count = int(query.get("tailLines", len(lines)))
            yield from lines[len(lines) - count if count < len(lines) else 0 :]
            if query.get("follow") != "true":
                return
            while not self.server.closing.is_set():
                ended = source.is_ended()
                yield from file
                if ended:
                    return
                time.sleep(POLL_S)

    def _refuse(self, status: int, message: str) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(message.encode())

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: each request would be a line on the terminal."""


def _since(query: dict[str, str]) -> str:
    """The earliest time wanted, as lines begin with it."""
    if "sinceSeconds" in query:
        earliest = datetime.datetime.now(datetime.UTC) - datetime.timedelta(
            seconds=int(query["sinceSeconds"])
        )
        return earliest.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    if "sinceTime" in query:
        earliest = datetime.datetime.fromisoformat(query["sinceTime"])
        return earliest.astimezone(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    return ""
