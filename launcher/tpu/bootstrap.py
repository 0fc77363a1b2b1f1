#!/usr/bin/env python3
"""Startup script of a TPU VM: fetches the code that was launched, makes an interpreter, runs the worker.

It runs at each boot, as a single file, on whatever Python 3.10 or later the machine has: standard library
only, and nothing of this project. What to run comes from the metadata server. What is there already is not
made again: a folder is made beside its place and then renamed, or gets its marker last.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import http.client
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import traceback
import urllib.error
import urllib.parse
import urllib.request
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")

SPEC = "muster-vm"
GUEST_STATE = "instance/guest-attributes/muster/state"
PYTHON = "3.12"
UV_VERSION = "0.13.9"
UV_WHEEL = (
    f"uv=={UV_VERSION} --hash=sha256:d7f459fe4fd247d830351c75686d3996ace3c6f3f728eb0e85a30b7ada0cef19\n"
)
"""For Linux on x86-64, as all TPU VMs are."""
BUILD_LOCK = "requirements-build.lock"
"""What source packages of the other locks are built with, where the launched code has it."""
PACKAGES = ("launcher", "recipes", "trainer")
ARCHIVE_LIMIT_BYTES = 2**30
TIMEOUT_S, TELL_TIMEOUT_S = 60.0, 3.0
TELL_CHARACTERS = 500
WAITS_S = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 30.0, 30.0)
"""Between tries: two minutes in all."""
INSTALL_S = 1800.0
TAIL_LINES = 5
QUICK_DEATH_S = 60.0
MAX_QUICK_DEATHS = 5
"""In a row, before the worker is given up until the next boot."""


class Failure(Exception):
    """Nothing more can be done until the next boot; the message is one line for people."""


def main() -> int:
    state = state_folder()
    state.mkdir(parents=True, exist_ok=True)
    lock = take_lock(state / "lock")
    if lock is None:
        log("already running on this machine")
        return 0
    try:
        spec = read_spec()
        os.environ.update(spec["env"])
        code = code_of(spec, state)
        python = interpreter(spec, code, state)
        return Keeper(python, code, lock).keep()
    except Failure as failure:
        return give_up(str(failure))
    except OSError as error:
        return give_up(f"{type(error).__name__}: {error}")
    except Exception as error:
        traceback.print_exc(file=sys.stdout)
        return give_up(f"the startup script itself failed: {type(error).__name__}: {error}")


def give_up(why: str) -> int:
    """Says why, where the supervisor looks."""
    say(f"failed: {' '.join(why.split())}")
    return 1


def state_folder() -> Path:
    """Where this VM keeps what outlives a boot."""
    # A rehearsal plays many VMs on one machine; each has a home of its own.
    if os.geteuid() == 0 and "GCE_METADATA_HOST" not in os.environ:
        return Path("/var/lib/muster")
    return Path.home() / ".muster-vm"


def take_lock(path: Path) -> int | None:
    """A file descriptor that locks this machine, with this process's number in the file; None: taken."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    os.ftruncate(lock, 0)
    os.write(lock, b"%d\n" % os.getpid())
    return lock


def log(text: str) -> None:
    """One line for the serial console."""
    print(f"muster: {text}", flush=True)


def say(text: str) -> None:
    """The same, and for the supervisor."""
    log(text)
    tell(text)


# The metadata server


def metadata_request(path: str, data: bytes | None = None) -> urllib.request.Request:
    """A request to this VM's metadata server, or to the stand-in that Google's own variable names."""
    host = os.environ.get("GCE_METADATA_HOST") or "metadata.google.internal"
    return urllib.request.Request(
        f"http://{host}/computeMetadata/v1/{path}",
        data=data,
        headers={"Metadata-Flavor": "Google"},
        method="GET" if data is None else "PUT",
    )


DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""The metadata server is never behind a proxy."""


def ask(path: str, *, timeout_s: float = TIMEOUT_S) -> str:
    """One value of the metadata server.

    Raises:
      urllib.error.HTTPError: there is none.
      OSError: it does not answer.
    """
    with DIRECT.open(metadata_request(path), timeout=timeout_s) as reply:
        body: bytes = reply.read()
    return body.decode(errors="replace")


def tell(text: str) -> None:
    """Sets the guest attribute that the supervisor reads; it is news, so its loss is no error."""
    request = metadata_request(GUEST_STATE, " ".join(text.split())[:TELL_CHARACTERS].encode())
    with contextlib.suppress(OSError, http.client.HTTPException):
        DIRECT.open(request, timeout=TELL_TIMEOUT_S).close()


def patiently(  # noqa: UP047 - the new syntax is not Python 3.10
    what: str, do: Callable[[], T], *, sleep: Callable[[float], None] = time.sleep
) -> T:
    """The result of ``do``, tried again for a while when trying again may help.

    Raises:
      Failure: it did not help; the message begins with ``what``.
    """
    for wait_s in (*WAITS_S, None):
        try:
            return do()
        except urllib.error.HTTPError as error:
            error.close()
            why = f"HTTP {error.code}"
            if error.code not in (408, 429) and error.code < 500:
                raise Failure(f"{what}: {why}{MEANING.get(error.code, '')}") from error
        except (OSError, http.client.HTTPException) as error:
            why = str(error) or type(error).__name__
        if wait_s is None:
            break
        log(f"{what}: {why}; again in {wait_s:.0f} s")
        sleep(wait_s)
    raise Failure(f"{what}: {why}, after {len(WAITS_S) + 1} tries")


MEANING = {
    401: " (the VM's service account is not accepted)",
    403: " (the VM's service account may not read it: give it roles/storage.objectUser on the bucket)",
    404: " (it is not there: launch again)",
}


def spec_text() -> str:
    """What this VM was made for: ``launcher.tpu.vm.VmSpec`` as JSON."""
    return patiently("asking the metadata server what to run", lambda: ask(f"instance/attributes/{SPEC}"))


def read_spec() -> Mapping[str, Any]:
    """The part of it that is needed here."""
    try:
        spec = json.loads(spec_text())
    except ValueError as error:
        raise Failure(f"the metadata {SPEC} is no JSON: {error}") from error
    expected = {"run_dir": str, "bundle": str, "env": dict, "requirements": list}
    if not isinstance(spec, dict) or any(
        not isinstance(spec.get(key), kind) for key, kind in expected.items()
    ):
        raise Failure(f"the metadata {SPEC} is not what `muster launch` writes")
    return spec


# The code


def code_of(spec: Mapping[str, Any], state: Path) -> Path:
    """The folder with the launched code, verified and whole."""
    match = re.fullmatch(r"sha256:([0-9a-f]{64})", spec["bundle"])
    if match is None:
        raise Failure(f"{spec['bundle'][:100]!r} is not the digest of a bundle")
    target = state / "code" / match[1]
    if not target.is_dir():
        say("fetching the code")
        archive = fetch_bundle(spec["run_dir"], match[1])
        with beside(target) as folder:
            unpack(archive, folder)
    if missing := [f"{name}/" for name in PACKAGES if not (target / name).is_dir()]:
        raise Failure(
            f"the launched code has no {', '.join(missing)}: TPU VMs run Muster from the launched tree,"
            " so launch from a checkout of Muster that has your changes"
        )
    return target


def fetch_bundle(run_dir: str, digest: str) -> bytes:
    """The verified tar archive of the code.

    Raises:
      Failure: it cannot be had, or is not what the digest says.
    """
    match = re.fullmatch(r"gs://([^/]+)/(?:(.+)/)?[^/]+", run_dir)
    if match is None:
        raise Failure(f"{run_dir} is not in a bucket: TPU VMs need run.root=gs://BUCKET/...")
    bucket, name = match[1], "/".join(filter(None, (match[2], ".bundles", f"{digest}.tar.gz")))
    where = f"gs://{bucket}/{name}"
    packed = patiently(f"fetching {where}", lambda: read_object(bucket, name))
    archive = unzip(packed, where)
    if hashlib.sha256(archive).hexdigest() != digest:
        raise Failure(f"{where} was replaced: its content has another digest; delete it and launch again")
    return archive


def read_object(bucket: str, name: str) -> bytes:
    """One object of Cloud Storage, or of the stand-in that Google's own variable names."""
    emulator = os.environ.get("STORAGE_EMULATOR_HOST", "")
    headers = {} if emulator else {"Authorization": f"Bearer {token()}"}
    base = emulator or "https://storage.googleapis.com"
    base = base if "://" in base else f"http://{base}"
    quoted = urllib.parse.quote(name, safe="")
    url = (
        f"{base.rstrip('/')}/download/storage/v1/b/{urllib.parse.quote(bucket, safe='')}/o/{quoted}?alt=media"
    )
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=TIMEOUT_S) as reply:
        body: bytes = reply.read(ARCHIVE_LIMIT_BYTES + 1)
        expected = reply.headers.get("Content-Length")
    if expected is not None and len(body) < int(expected):
        raise OSError(f"only {len(body)} of {expected} bytes came")
    return body


def token() -> str:
    """Of the VM's service account."""
    found = json.loads(ask("instance/service-accounts/default/token"))
    return str(found["access_token"])


def unzip(packed: bytes, where: str) -> bytes:
    stream = zlib.decompressobj(16 + zlib.MAX_WBITS)
    try:
        archive = stream.decompress(packed, ARCHIVE_LIMIT_BYTES)
    except zlib.error as error:
        raise Failure(f"{where} is damaged: not gzip ({error}); delete it and launch again") from error
    if not stream.eof or stream.unused_data:
        raise Failure(f"{where} is damaged: cut off, too large or with something behind it; delete it")
    return archive


def unpack(archive: bytes, folder: Path) -> None:
    """Plain files and links that stay inside, each once, none behind another: what a launch packs."""
    try:
        with tarfile.open(fileobj=io.BytesIO(archive), mode="r:", errors="surrogateescape") as tar:
            members = tar.getmembers()
            check_members(members, len(archive))
            for member in members:
                path = folder / member.name
                path.parent.mkdir(parents=True, exist_ok=True)
                if member.issym():
                    path.symlink_to(member.linkname)
                else:
                    file = tar.extractfile(member)
                    assert file is not None
                    path.write_bytes(file.read())
                    path.chmod(0o755 if member.mode & 0o100 else 0o644)
        for member in members:
            real = (folder / member.name).resolve()
            if member.issym() and not real.is_relative_to(folder.resolve()):
                raise ValueError(f"{member.name!r} leads out of the folder")
    except (tarfile.TarError, ValueError, RecursionError, OverflowError) as error:
        raise Failure(f"the launched code is damaged: {error}; delete the bundle and launch again") from error


def check_members(members: Sequence[tarfile.TarInfo], size_bytes: int) -> None:
    names = {member.name for member in members}
    if len(names) < len(members):
        raise ValueError("an entry is there twice")
    for member in members:
        parts = member.name.split("/")
        if not {"", ".", ".."}.isdisjoint(parts) or "\0" in member.name:
            raise ValueError(f"{member.name!r} is not a plain relative name")
        is_file = member.type in (tarfile.REGTYPE, tarfile.AREGTYPE) and member.sparse is None
        if not is_file and not member.issym():
            raise ValueError(f"{member.name!r} is neither a file nor a symbolic link")
        if any("/".join(parts[:count]) in names for count in range(1, len(parts))):
            raise ValueError(f"{member.name!r} is behind another entry")
    if sum(member.size for member in members) > size_bytes:
        raise ValueError("its files are larger than the archive")


class beside:
    """A context manager: a folder to fill that gets its real name once it is whole and on the disk."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __enter__(self) -> Path:
        parent = self.target.parent
        parent.mkdir(parents=True, exist_ok=True)
        for left in parent.glob(".new-*"):
            # Of a run that was interrupted; nobody else is here, by the lock.
            shutil.rmtree(left, ignore_errors=True)
        self.folder = Path(tempfile.mkdtemp(prefix=".new-", dir=parent))
        return self.folder

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.folder.chmod(0o755)
            # A VM may lose its power at any moment, with the name on the disk and the content not yet.
            os.sync()
            self.folder.rename(self.target)
        else:
            shutil.rmtree(self.folder, ignore_errors=True)


# The interpreter


def interpreter(spec: Mapping[str, Any], code: Path, state: Path) -> Path:
    """A Python with everything that the launched code needs."""
    if spec.get("python"):
        return given_interpreter(str(spec["python"]))
    tools = [BUILD_LOCK] if (code / BUILD_LOCK).is_file() else []
    locks = [lock_file(code, str(name)) for name in (*tools, *spec["requirements"])]
    key = hashlib.sha256(json.dumps([UV_WHEEL, PYTHON]).encode())
    for lock in locks:
        key.update(hashlib.sha256(lock.read_bytes()).digest())
    venv = state / "venvs" / key.hexdigest()[:16]
    marker = venv / "complete"
    if not marker.exists():
        say("installing")
        shutil.rmtree(venv, ignore_errors=True)
        install(venv, locks, state)
        os.sync()
        marker.touch()
    return venv / "bin" / "python"


def given_interpreter(python: str) -> Path:
    try:
        found = subprocess.run(
            [python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"],
            capture_output=True, text=True, timeout=TIMEOUT_S, check=True,
        ).stdout.strip()  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        raise Failure(f"target.python={python} does not run on this VM: {error}") from error
    if tuple(map(int, found.split("."))) < tuple(map(int, PYTHON.split("."))):
        raise Failure(f"target.python={python} is Python {found}; Muster needs {PYTHON} or later")
    return Path(python)


def lock_file(code: Path, name: str) -> Path:
    path = (code / name).resolve()
    if not path.is_relative_to(code.resolve()) or not path.is_file():
        raise Failure(f"target.requirements names {name}, which is not in the launched code")
    return path


def install(venv: Path, locks: Sequence[Path], state: Path) -> None:
    uv = str(uv_of(state))
    env = {
        **os.environ,
        "UV_CACHE_DIR": str(state / "uv-cache"),
        "UV_PYTHON_INSTALL_DIR": str(state / "python"),
        "UV_NO_PROGRESS": "1",
    }
    run([uv, "venv", "--quiet", "--no-project", "--clear", "--python", PYTHON, str(venv)], env)
    command = [uv, "pip", "install", "--quiet", "--python", str(venv / "bin" / "python"), "--require-hashes"]
    if locks and locks[0].name == BUILD_LOCK:
        # An isolated build fetches tools that no hash names.
        command += ["--no-build-isolation"]
    for lock in locks:
        run([*command, "-r", str(lock)], env)


def uv_of(state: Path) -> Path:
    """The pinned uv, installed by the pip of the machine."""
    target = state / "uv" / UV_VERSION
    if not target.is_dir():
        with beside(target) as folder:
            wanted = folder / "requirements.txt"
            wanted.write_text(UV_WHEEL)
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
            only = ["--no-deps", "--only-binary", ":all:", "--require-hashes"]
            run([*pip, *only, "--target", str(folder), "-r", str(wanted)], dict(os.environ))
    return target / "bin" / "uv"


def run(argv: Sequence[str], env: Mapping[str, str]) -> None:
    """A command that may need the network; its output goes to the console, the end of it into the failure."""

    def once() -> None:
        process = subprocess.run(
            argv, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            timeout=INSTALL_S, check=False, preexec_fn=die_with_parent,
        )  # fmt: skip
        lines = process.stdout.decode(errors="replace").splitlines()
        for line in lines:
            print(line, flush=True)
        if process.returncode != 0:
            raise OSError(
                " / ".join(deque(filter(str.strip, lines), TAIL_LINES)) or f"exit {process.returncode}"
            )

    try:
        patiently(" ".join([Path(argv[0]).name, *argv[1:3]]), once)
    except subprocess.TimeoutExpired as error:
        raise Failure(f"{' '.join(argv[:3])} took longer than {INSTALL_S:.0f} s") from error


def die_with_parent() -> None:
    """Or it would go on writing beside the next run."""
    ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))


# The worker


class Keeper:
    """Runs the worker; one that died of a signal is started again, and meets the other hosts again."""

    def __init__(self, python: Path, code: Path, lock: int) -> None:
        self.argv = [str(python), "-P", "-m", "launcher.tpu.worker"]
        path = os.pathsep.join(filter(None, [str(code), os.environ.get("PYTHONPATH")]))
        self.code, self.env, self.lock = code, {**os.environ, "PYTHONPATH": path}, lock
        self.worker: subprocess.Popen[bytes] | None = None
        self.stopping = threading.Event()

    def keep(self, sleep: Callable[[float], None] = time.sleep) -> int:
        """The worker's exit code, once it has ended by itself.

        Raises:
          Failure: it keeps dying.
        """
        signal.signal(signal.SIGTERM, self.stop)
        quick_deaths = 0
        while True:
            began_s = time.monotonic()
            status = self.run_once()
            if status >= 0 or self.stopping.is_set():
                return status if status >= 0 else 128 - status
            quick_deaths = quick_deaths + 1 if time.monotonic() - began_s < QUICK_DEATH_S else 1
            if quick_deaths > MAX_QUICK_DEATHS:
                raise Failure(f"the worker died of signal {-status}, {quick_deaths} times in a row")
            say(f"the worker died of signal {-status}; starting it again")
            sleep(min(2.0 ** (quick_deaths - 1), 30.0))

    def run_once(self) -> int:
        if self.stopping.is_set():
            return 128 + signal.SIGTERM
        # The worker holds the lock too: it may outlive this process.
        self.worker = subprocess.Popen(
            self.argv, cwd=self.code, env=self.env, stdin=subprocess.DEVNULL, pass_fds=(self.lock,)
        )
        if self.stopping.is_set():
            self.worker.send_signal(signal.SIGTERM)
        return self.worker.wait()

    def stop(self, _number: int, _frame: FrameType | None) -> None:
        self.stopping.set()
        if self.worker is not None:
            self.worker.send_signal(signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
