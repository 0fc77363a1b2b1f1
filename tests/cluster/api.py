"""The Kubernetes API as JSON over kept-alive connections: what the harness itself speaks.

    api = Api("https://127.0.0.1:20443", token="...", authority=Path("ca.crt"))
    api.get("/api/v1/nodes")["items"]

Separate from the client under test, so that a fault in that one cannot hide in both. Thread-safe.
"""

from __future__ import annotations

import collections
import contextlib
import http.client
import json
import socket
import ssl
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Json = dict[str, Any]
TIMEOUT_S = 30.0
WATCH_S = 300


class ApiError(Exception):
    """The API server answered with an error."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"{status} {reason}: {message}")
        self.status, self.reason = status, reason


class Api:
    """One user's connection to one API server."""

    def __init__(self, server: str, *, token: str, authority: Path) -> None:
        self._address = urllib.parse.urlsplit(server).netloc
        self._token = token
        self._context = ssl.create_default_context(cafile=authority)
        self._kept: collections.deque[http.client.HTTPSConnection] = collections.deque()
        self._watched: list[socket.socket] = []

    def close(self) -> None:
        """Closes what is kept open and ends every watch; the object can still be used."""
        for watched in self._watched:
            with contextlib.suppress(OSError):
                # Below TLS, whose object the watching thread is in.
                socket.socket.shutdown(watched, socket.SHUT_RDWR)
        with contextlib.suppress(IndexError):
            while True:
                self._kept.pop().close()

    def get(self, path: str, **query: str) -> Json:
        return self.request("GET", path, query=query)

    def create(self, path: str, body: Json) -> Json:
        return self.request("POST", path, body)

    def apply(self, path: str, body: Json | bytes) -> Json:
        """Server-side apply of one object (or its YAML) at its own address."""
        query = {"fieldManager": "harness", "force": "true"}
        return self.request("PATCH", path, body, query=query, content_type="application/apply-patch+yaml")

    def patch(self, path: str, body: Json, *, strategic: bool = False) -> Json:
        kind = "strategic-merge-patch" if strategic else "merge-patch"
        return self.request("PATCH", path, body, content_type=f"application/{kind}+json")

    def delete(self, path: str, body: Json | None = None) -> Json:
        return self.request("DELETE", path, body)

    def text(self, path: str, **query: str) -> str:
        """The answer as it is, for logs."""
        return self._send("GET", path, None, query, "application/json").decode()

    def request(
        self,
        method: str,
        path: str,
        body: Json | bytes | None = None,
        *,
        query: dict[str, str] | None = None,
        content_type: str = "application/json",
    ) -> Json:
        """One request.

        Raises:
          ApiError: the server refused it.
          OSError, http.client.HTTPException: there is no answer.
        """
        answer: Json = json.loads(self._send(method, path, body, query or {}, content_type))
        return answer

    def watch(self, path: str, **query: str) -> Iterator[Json]:
        """Events until the server ends the watch or the connection breaks."""
        query |= {"watch": "true", "timeoutSeconds": str(WATCH_S)}
        connection = self._connect(timeout_s=WATCH_S + TIMEOUT_S)
        connection.connect()
        watched: socket.socket = connection.sock
        self._watched.append(watched)
        try:
            connection.request("GET", _target(path, query), headers=self._headers("application/json"))
            response = connection.getresponse()
            if response.status != 200:
                raise _error(response.status, response.read())
            for line in response:
                yield json.loads(line)
        finally:
            self._watched.remove(watched)
            connection.close()

    def _send(
        self, method: str, path: str, body: Json | bytes | None, query: dict[str, str], content_type: str
    ) -> bytes:
        data = json.dumps(body).encode() if isinstance(body, dict) else body
        headers = self._headers(content_type)
        target = _target(path, query)
        with contextlib.suppress(IndexError, OSError, http.client.HTTPException):
            # A kept connection may have been closed by the server meanwhile.
            return self._exchange(self._kept.pop(), method, target, data, headers)
        return self._exchange(self._connect(timeout_s=TIMEOUT_S), method, target, data, headers)

    def _exchange(
        self,
        connection: http.client.HTTPSConnection,
        method: str,
        target: str,
        data: bytes | None,
        headers: dict[str, str],
    ) -> bytes:
        try:
            connection.request(method, target, body=data, headers=headers)
            response = connection.getresponse()
            content = response.read()
        except BaseException:
            connection.close()
            raise
        self._kept.append(connection)
        if response.status >= 400:
            raise _error(response.status, content)
        return content

    def _connect(self, *, timeout_s: float) -> http.client.HTTPSConnection:
        return http.client.HTTPSConnection(self._address, context=self._context, timeout=timeout_s)

    def _headers(self, content_type: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._token}", "Content-Type": content_type}


def _target(path: str, query: dict[str, str]) -> str:
    return f"{path}?{urllib.parse.urlencode(query)}" if query else path


def _error(status: int, content: bytes) -> ApiError:
    try:
        answer = json.loads(content)
        return ApiError(status, answer.get("reason", ""), answer.get("message", ""))
    except ValueError:
        return ApiError(status, "", content.decode(errors="replace"))
