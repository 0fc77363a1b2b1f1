"""Bad weather in front of a GCS stand-in: a proxy that answers some requests with a planned fault.

with faulty_gcs(server.url) as weather:
    weather.plan(503, Fault.LOST_ANSWER)   # for the next requests; afterwards all is well
    subprocess.run(argv, env={**os.environ, **weather.env})
"""

from __future__ import annotations

import contextlib
import enum
import gc
import http.client
import http.server
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from urllib.parse import unquote, urlsplit

import pytest

leaves_sockets = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
"""Of tests with faults: the client does not close what it has no use for."""


class Fault(enum.Enum):
    """Faults that are not a status code."""

    LOST_ANSWER = "the request is carried out, then the connection drops"
    OTHER_BYTES = "the answer is one byte off, with the headers of the right one"


class Weather:
    """The plan, and a count of what came by."""

    def __init__(self) -> None:
        self.url = ""
        self.requests = 0
        self.damaged = ""
        """Answers for objects whose name has this arrive with another first byte."""
        self._faults: deque[int | Fault] = deque()
        self._lock = threading.Lock()

    @property
    def env(self) -> Mapping[str, str]:
        return {"STORAGE_EMULATOR_HOST": self.url, "TENSORSTORE_GCS_HTTP_URL": self.url}

    def plan(self, *faults: int | Fault) -> None:
        """The next requests get these, in order."""
        self._faults.extend(faults)

    def next_fault(self) -> int | Fault | None:
        with self._lock:
            self.requests += 1
            return self._faults.popleft() if self._faults else None


@contextlib.contextmanager
def faulty_gcs(upstream_url: str) -> Iterator[Weather]:
    """Starts the proxy on 127.0.0.1 and a free port."""
    weather = Weather()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _handler(weather, upstream_url))
    server.daemon_threads = True
    weather.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield weather
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
        # What the client left of its failed requests goes now, and not in the middle of another test.
        gc.collect()


def _handler(weather: Weather, upstream_url: str) -> type[http.server.BaseHTTPRequestHandler]:
    upstream = urlsplit(upstream_url)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_any(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            fault = weather.next_fault()
            if isinstance(fault, int):
                return self._answer(fault, {}, b'{"error": {"message": "planned fault"}}')
            answer = self._forward(body)
            if fault is Fault.LOST_ANSWER:
                self.close_connection = True
                return None
            status, headers, data = answer
            is_damaged = (
                bool(weather.damaged) and weather.damaged in unquote(self.path) and self.command == "GET"
            )
            if data and (fault is Fault.OTHER_BYTES or is_damaged):
                data = bytes([data[0] ^ 1]) + data[1:]
            return self._answer(status, headers, data)

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = do_any

        def _forward(self, body: bytes) -> tuple[int, Mapping[str, str], bytes]:
            connection = http.client.HTTPConnection(upstream.hostname or "", upstream.port, timeout=30)
            with contextlib.closing(connection):
                connection.request(self.command, self.path, body, dict(self.headers))
                response = connection.getresponse()
                return response.status, dict(response.getheaders()), response.read()

        def _answer(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
            self.send_response(status)
            for name, value in headers.items():
                if name.lower() not in (
                    "content-length",
                    "transfer-encoding",
                    "connection",
                    "server",
                    "date",
                ):
                    self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

    return Handler
