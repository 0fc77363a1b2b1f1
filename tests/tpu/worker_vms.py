"""TPU VMs without a TPU API: a metadata server for each, and its worker as a process group.

For tests of what runs on the VM. The run directory is a local folder, and the trainer is the stand-in.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher import ledger
from launcher.ledger import AttemptEnd
from launcher.rundir import RunDir, create_or_open, launched_recipe
from launcher.storage import open_storage
from launcher.tpu.vm import SPEC, VmSpec
from recipes.contract import host_name
from recipes.load import recipe_from_dict, recipe_to_dict
from recipes.schema import Recipe
from tests.local.launching import REPO, STAND_IN
from tests.unit.rundir_support import make_recipe

TIMEOUT_S = 60.0
GUEST = "instance/guest-attributes/"


class MetadataServer:
    """Answers with what ``values`` holds by path; keeps guest attributes, unless the VM may have none."""

    def __init__(self, values: Mapping[str, str] | None = None, *, guest_status: int = 200) -> None:
        self.values = dict(values or {})
        self.guest: dict[str, list[str]] = {}
        """Everything that was ever set, by path."""
        self.asked: list[str] = []
        self.failures: list[int] = []
        """Statuses of the next answers."""
        self.guest_status = guest_status
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                path = self.path.removeprefix("/computeMetadata/v1/").partition("?")[0]
                outer.asked.append(self.path)
                self.answer(200, outer.values[path]) if path in outer.values else self.answer(404, "")

            def do_PUT(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"])).decode()
                path = self.path.removeprefix(f"/computeMetadata/v1/{GUEST}")
                if outer.guest_status == 200:
                    outer.guest.setdefault(path, []).append(body)
                self.answer(outer.guest_status, "")

            def answer(self, status: int, text: str) -> None:
                if self.headers.get("Metadata-Flavor") != "Google":
                    status, text = 403, ""
                elif outer.failures and self.command == "GET":
                    status, text = outer.failures.pop(0), ""
                self.send_response(status)
                self.send_header("Content-Length", str(len(text.encode())))
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()
        self.host = f"127.0.0.1:{self._server.server_port}"

    def states(self) -> Sequence[str]:
        """Every line that was reported, oldest first."""
        return self.guest.get("muster/state", [])

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def small_recipe(root: Path, **run: Any) -> Recipe:
    """60 steps on two slices of one host, for the stand-in trainer."""
    data = recipe_to_dict(make_recipe(num_steps=60))
    data["multislice"]["num_slices"] = 2
    data["target"]["grace_period_s"] = 10.0
    data["checkpoint"]["save_interval_steps"] = 10
    data["run"] |= {"root": str(root), "peer_timeout_s": 5.0} | run
    return recipe_from_dict(data)


def addresses(root: Path, count: int = 2) -> Sequence[str]:
    """Loopback addresses that no other test has."""
    digest = hashlib.sha256(str(root).encode()).digest()
    return [f"127.{1 + digest[0] % 254}.{digest[1]}.{1 + index}" for index in range(count)]


def attributes(spec: VmSpec, slice_id: int, leader: str, own: str) -> Mapping[str, str]:
    """What the metadata server of a slice's only host says."""
    env = {"NODE_ID": f"tiny-{slice_id}", "WORKER_ID": "0", "ACCELERATOR_TYPE": "cpu-1x1"}
    if spec.num_slices > 1:
        env |= {"MEGASCALE_COORDINATOR_ADDRESS": leader, "MEGASCALE_SLICE_ID": str(slice_id)}
    return {
        f"instance/attributes/{SPEC}": json.dumps(dataclasses.asdict(spec)),
        "instance/attributes/agent-worker-number": "0",
        "instance/attributes/worker-network-endpoints": f"unknown:unknown:{own}",
        "instance/attributes/tpu-env": "".join(f"{key}: '{value}'\n" for key, value in env.items()),
        "instance/preempted": "FALSE",
        "instance/maintenance-event": "NONE",
    }


class Vm:
    """One VM and the process that its boot starts."""

    def __init__(self, home: Path, metadata: MetadataServer) -> None:
        self.home, self.metadata = home, metadata
        home.mkdir(parents=True, exist_ok=True)
        self.process: subprocess.Popen[bytes] | None = None

    def boot(self, argv: Sequence[str], **env: str) -> None:
        with (self.home / "console").open("ab") as console:
            self.process = subprocess.Popen(
                argv,
                cwd=self.home,
                env={
                    "PATH": os.environ["PATH"],
                    "HOME": str(self.home),
                    "GCE_METADATA_HOST": self.metadata.host,
                    **env,
                },
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self) -> int:
        assert self.process is not None
        return self.process.wait(TIMEOUT_S)

    def kill(self) -> None:
        """All of it, as when its power fails."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def state(self) -> str:
        return self.metadata.states()[-1] if self.metadata.states() else ""

    def console(self) -> str:
        path = self.home / "console"
        return path.read_text(errors="replace") if path.exists() else ""


class Slices:
    """Two slices of one VM each, on which a run of the stand-in trainer goes."""

    def __init__(self, root: Path, script: Mapping[str, Any] | None = None, **run: Any) -> None:
        self.root, self.script = root, dict(script or {})
        self.recipe = small_recipe(root, **run)
        storage = open_storage(self.recipe.run_dir)
        self.run: RunDir = create_or_open(storage, self.recipe, {}).run
        path, body = launched_recipe(self.recipe)
        storage.replace(path, body)
        self.spec = VmSpec(
            run_dir=self.recipe.run_dir,
            recipe=path,
            order="order-1",
            provision=1,
            bundle="sha256:" + "0" * 64,
            num_slices=2,
            hosts_per_slice=1,
            devices_per_host=1,
            is_cpu=True,
            grace_period_s=10.0,
            max_restarts=self.recipe.run.max_restarts,
            python=sys.executable,
            requirements=(),
            env={"STAND_IN": json.dumps(self.script)},
        )
        own = addresses(root)
        self.vms = [
            Vm(root / f"vm-{index}", MetadataServer(attributes(self.spec, index, own[0], own[index])))
            for index in range(2)
        ]

    def boot(self, *slices: int) -> None:
        """Starts workers; both if none is named."""
        for index in slices or (0, 1):
            self.vms[index].boot(
                [sys.executable, "-P", "-m", "launcher.tpu.worker"],
                PYTHONPATH=f"{STAND_IN}{os.pathsep}{REPO}",
            )

    def finish(self) -> list[int]:
        return [vm.wait() for vm in self.vms]

    def close(self) -> None:
        for vm in self.vms:
            vm.kill()
            vm.metadata.close()

    def wait_for(self, condition: Callable[[], object], what: str) -> None:
        deadline_s = time.monotonic() + TIMEOUT_S
        while not condition():
            assert time.monotonic() < deadline_s, f"no {what}: {self.evidence()}"
            time.sleep(0.05)

    def wait_for_step(self, step: int, attempt: int = 1) -> None:
        def all_there() -> bool:
            beats = [beat for beat in self.run.heartbeats() if beat.attempt == attempt]
            return len(beats) == 2 and min(beat.progress.step for beat in beats) >= step

        self.wait_for(all_there, f"step {step} of attempt {attempt}")

    def end(self, attempt: int) -> AttemptEnd:
        end = self.run.attempt_end(attempt)
        assert end is not None, self.evidence()
        return end

    def codes(self) -> list[int | None]:
        """Exit codes of all attempts."""
        ends = [self.run.attempt_end(number) for number in self.run.attempts()]
        return [end.exit_code if end else None for end in ends]

    def evidence(self) -> str:
        return "\n".join(f"--- {vm.home.name}: {vm.state()}\n{vm.console()[-3000:]}" for vm in self.vms)

    def trainer(self, index: int) -> int:
        """Process id of the trainer on one VM."""
        attempt = max(self.run.attempts())
        log = self.run.storage.read(self.run.log_path(attempt, host_name(index, 0))).decode()
        return int(log.partition(" pid ")[2].split()[0])


def read_spec(vm: Vm) -> VmSpec:
    """What a VM was told."""
    return ledger.decode(vm.metadata.values[f"instance/attributes/{SPEC}"].encode(), VmSpec, "spec")
