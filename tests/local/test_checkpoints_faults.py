"""A save that fails is loud at once: full disks, folders and buckets that cannot be written to."""

from __future__ import annotations

import http.server
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.local.checkpoint_lab import Nursery, nursery_in, storage_of


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    with nursery_in(tmp_path_factory.mktemp("nursery")) as nursery:
        yield nursery


def test_a_full_disk_stops_the_run_within_a_step(nursery: Nursery, tmp_path: Path) -> None:
    job = nursery.start(devices=2)
    (worker,) = job.children
    job.one("open", run=str(tmp_path), save_interval_steps=3)
    assert job.one("train", begin=1, end=3, last=True)["committed"] == 3
    job.one("limit_file_size", size_bytes=1000)
    worker.send("train", begin=4, end=20, step_s=1.0)
    steps = []
    while "event" in (line := worker.read()):
        steps.append(line["step"]) if line["event"] == "step" else None
    # The save of step 6 fails in the background; the first look after that ends the run.
    assert steps == [4, 5, 6]
    assert line["type"] == "SaveFailed" and line["code"] == 2
    assert "disk full" in line["error"] and "checkpoints/6" in line["error"] and line["hint"]
    assert not (tmp_path / "checkpoints" / "6").exists()
    job.kill()
    # With space again the run goes on from what is committed, over the remains.
    job = nursery.start(devices=2)
    job.one("open", run=str(tmp_path), attempt=2)
    answer = job.one("restore")
    assert (answer["step"], answer["exact"]) == (3, True)
    assert job.one("train", begin=4, end=6, last=True)["committed"] == 6
    job.kill()


@pytest.mark.parametrize("ending", ["last", "close"])
def test_the_last_save_cannot_be_lost_in_silence(nursery: Nursery, tmp_path: Path, ending: str) -> None:
    job = nursery.start(devices=2)
    job.one("open", run=str(tmp_path))
    job.one("limit_file_size", size_bytes=1000)
    answer = job.one("train", begin=1, end=1, last=ending == "last")
    if ending == "close":
        assert answer["committed"] == -1
        answer = job.one("wait")
    assert answer["type"] == "SaveFailed" and answer["code"] == 2 and "disk full" in answer["error"]
    job.kill()


def test_after_a_notice_a_failed_save_is_not_the_users_error(nursery: Nursery, tmp_path: Path) -> None:
    """A suspended job whose trainer exits 2 would be failed for good."""
    job = nursery.start(devices=2)
    job.one("open", run=str(tmp_path), save_interval_steps=1000)
    job.one("limit_file_size", size_bytes=1000)
    (worker,) = job.children
    worker.send("train", begin=1, end=200, step_s=0.1)
    worker.read()
    worker.kill(15)
    answer = worker.answer()
    assert answer["type"] == "SaveFailed" and answer["code"] == 75 and "disk full" in answer["error"]
    job.kill()


def test_a_device_without_space_says_so(nursery: Nursery, tmp_path: Path) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("may not mount a small tmpfs here")
    try:
        job = nursery.start(devices=2)
        job.one("open", run=str(tmp_path))
        answer = job.one("train", begin=1, end=1, last=True)
        assert answer["type"] == "SaveFailed" and answer["code"] == 2 and "disk full" in answer["error"]
        job.kill()
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_a_folder_that_cannot_be_written_is_refused_before_training(nursery: Nursery, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    job = nursery.start(2)
    for answer in job.ask("open", run=str(tmp_path / "file" / "run")):
        assert answer["code"] == 2 and "cannot write to" in answer["error"] and answer["hint"]
    job.kill()


def test_a_bucket_that_is_not_there_is_refused_before_training(nursery: Nursery, tmp_path: Path) -> None:
    with storage_of("gs", tmp_path) as storage:
        job = nursery.start(2, env=storage.env)
        for answer in job.ask("open", run="gs://no-such-bucket/run"):
            assert answer["code"] == 2 and "cannot write to" in answer["error"] and answer["hint"]
        job.kill()


class _Forbid(http.server.BaseHTTPRequestHandler):
    """A bucket to which this identity has no access."""

    def _refuse(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = b'{"error": {"code": 403, "message": "caller does not have storage.objects.create access"}}'
        self.send_response(403)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = do_PUT = do_DELETE = _refuse

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_a_bucket_without_permission_is_refused_quickly(nursery: Nursery) -> None:
    pytest.importorskip("gcsfs", reason="the trainer reaches gs:// through gcsfs")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Forbid) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        job = nursery.start(env={"STORAGE_EMULATOR_HOST": url, "TENSORSTORE_GCS_HTTP_URL": url})
        begin_s = time.monotonic()
        answer = job.one("open", run="gs://bucket/run")
        assert answer["code"] == 2 and "permission denied" in answer["error"] and answer["hint"]
        assert time.monotonic() - begin_s < 10.0
        job.kill()
        server.shutdown()
