"""The startup script for real: alone in a folder, against a bucket server and a metadata server."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from launcher.bundle import bundle_path, make_bundle, upload
from launcher.rundir import RunDir, create_or_open, launched_recipe
from launcher.storage import open_storage
from launcher.tpu import bootstrap
from launcher.tpu.vm import SPEC, VmSpec
from tests.local.gcs_server import GcsServer, close_clients, running_gcs_server
from tests.local.launching import REPO, STAND_IN
from tests.tpu.worker_vms import MetadataServer, Vm, addresses, attributes, small_recipe

SHUTDOWN = Path(bootstrap.__file__).with_name("shutdown.sh")
WORKER = """#!/bin/sh
case "$1" in -c) echo 3.12; exit ;; esac
echo "$PWD $*" >>"$HOME/worker"
%s
"""
"""A Python that notes how it was started, and then does something."""


@pytest.fixture(scope="module")
def gcs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GcsServer]:
    with running_gcs_server(tmp_path_factory.mktemp("gcs")) as server:
        server.make_bucket("bucket")
        yield server


@pytest.fixture(autouse=True)
def _closed_clients(gcs: GcsServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", gcs.url)
    yield
    close_clients()


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working tree whose trainer is the stand-in."""
    folder = tmp_path_factory.mktemp("tree")
    for package in ("launcher", "recipes"):
        shutil.copytree(REPO / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(STAND_IN / "trainer", folder / "trainer", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


class Machine:
    """One VM whose startup script is the real one, and whose worker is a shell script."""

    def __init__(self, root: Path, gcs: GcsServer, bucket_folder: str, tree: Path) -> None:
        self.gcs, self.tree = gcs, tree
        self.storage = open_storage(f"gs://bucket/{bucket_folder}")
        self.bundle = make_bundle(tree)
        upload(self.storage, self.bundle)
        self.vm = Vm(root / "vm", MetadataServer())
        self.folder = self.vm.home / ".muster-vm"
        self.code = self.folder / "code" / self.bundle.sha256
        # Exactly one file reaches a VM.
        self.script = self.vm.home / "startup-script"
        shutil.copy(bootstrap.__file__, self.script)
        self.python = self.vm.home / "python"
        self.worker("exit 0")
        self.spec(python=str(self.python))

    def spec(self, **changes: object) -> None:
        spec = VmSpec(
            run_dir=f"{self.storage.url}/tiny",
            recipe="launches/x.yaml",
            order="order-1",
            provision=1,
            bundle=self.bundle.digest,
            num_slices=1,
            hosts_per_slice=1,
            devices_per_host=1,
            is_cpu=True,
            grace_period_s=10.0,
            max_restarts=3,
            python=None,
            requirements=(),
            env={},
        )
        found = {**dataclasses.asdict(spec), **changes}
        self.vm.metadata.values[f"instance/attributes/{SPEC}"] = json.dumps(found)

    def worker(self, does: str) -> None:
        self.python.write_text(WORKER % does)
        self.python.chmod(0o755)

    def boot(self) -> None:
        # uv finds the Python of the tests, and need not fetch one.
        path = os.pathsep.join([f"{sys.base_prefix}/bin", os.environ["PATH"]])
        self.vm.boot([sys.executable, str(self.script)], **self.gcs.env, PATH=path)

    def run(self) -> int:
        self.boot()
        return self.vm.wait()

    def started(self) -> list[str]:
        path = self.vm.home / "worker"
        return path.read_text().splitlines() if path.exists() else []

    def wait_for_worker(self) -> None:
        deadline_s = time.monotonic() + 30
        while not self.started():
            assert time.monotonic() < deadline_s, self.vm.console()
            time.sleep(0.02)


@pytest.fixture
def machine(tmp_path: Path, gcs: GcsServer, tree: Path) -> Iterator[Machine]:
    made = Machine(tmp_path, gcs, f"{tmp_path.name}/team runs", tree)
    yield made
    made.vm.kill()
    made.vm.metadata.close()


def test_it_fetches_once_and_runs_the_worker_from_there(machine: Machine, tree: Path) -> None:
    machine.vm.metadata.failures = [503, 500]
    for boot in range(1, 3):
        assert machine.run() == 0, machine.vm.console()
        assert machine.started() == [f"{machine.code} -P -m launcher.tpu.worker"] * boot
    assert machine.vm.metadata.states() == ["fetching the code"]
    assert (machine.code / "launcher/pod.py").read_bytes() == (tree / "launcher/pod.py").read_bytes()
    assert "asking the metadata server what to run: HTTP 503; again in 1 s" in machine.vm.console()


def test_the_workers_exit_code_and_the_recipes_variables_are_passed_on(machine: Machine) -> None:
    machine.worker('[ "$MINE" = "a b" ] && [ "${PYTHONPATH#*code/}" != "$PYTHONPATH" ] && exit 42')
    machine.spec(python=str(machine.python), env={"MINE": "a b"})
    assert machine.run() == 42, machine.vm.console()


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda packed: packed[: len(packed) // 2], "is damaged: cut off"),
        (lambda packed: packed + b"x", "is damaged: cut off, too large or with something behind it"),
        (lambda _: gzip.compress(b"evil"), "was replaced: its content has another digest"),
        (lambda _: b"", "is damaged: cut off"),
        (lambda _: None, "HTTP 404 (it is not there: launch again)"),
    ],
)
def test_a_bundle_that_is_not_what_was_launched(
    machine: Machine, damage: Callable[[bytes], bytes | None], why: str
) -> None:
    path = bundle_path(machine.bundle.digest)
    packed = machine.storage.read(path)
    damaged = damage(packed)
    machine.storage.delete(path)
    if damaged is not None:
        machine.storage.replace(path, damaged)
    assert machine.run() == 1
    assert machine.vm.state().startswith("failed: "), machine.vm.console()
    assert why in machine.vm.state()
    assert machine.vm.state() in machine.vm.console()
    assert "Traceback" not in machine.vm.console()
    assert not machine.code.exists()
    assert machine.started() == []
    machine.storage.replace(path, packed)
    assert machine.run() == 0, machine.vm.console()
    assert len(machine.started()) == 1


def test_a_second_run_on_the_machine_leaves_at_once(machine: Machine) -> None:
    machine.worker("exec sleep 60")
    machine.boot()
    machine.wait_for_worker()
    second = subprocess.run(
        [sys.executable, str(machine.script)],
        env={"HOME": str(machine.vm.home), "GCE_METADATA_HOST": machine.vm.metadata.host},
        capture_output=True, text=True, timeout=20, check=False,
    )  # fmt: skip
    assert (second.returncode, second.stdout) == (0, "muster: already running on this machine\n")
    assert len(machine.started()) == 1
    # Also when only the worker is left.
    assert machine.vm.process is not None
    machine.vm.process.kill()
    machine.vm.process.wait()
    assert bootstrap.take_lock(machine.folder / "lock") is None


def test_the_shutdown_script_asks_the_worker_and_waits_for_it(machine: Machine) -> None:
    machine.worker(
        'trap "sleep 1; echo saved >>worker; exit 42" TERM; cd "$HOME"; while :; do sleep 0.1; done'
    )
    machine.boot()
    machine.wait_for_worker()
    env = {"PATH": os.environ["PATH"], "HOME": str(machine.vm.home), "GCE_METADATA_HOST": "x"}
    began_s = time.monotonic()
    subprocess.run(["/bin/sh", str(SHUTDOWN)], env=env, timeout=20, check=True)
    assert 1 <= time.monotonic() - began_s < 15
    assert machine.started()[1] == "saved"
    assert machine.vm.wait() == 42
    # A number of a run that is over says nothing.
    subprocess.run(["/bin/sh", str(SHUTDOWN)], env=env, timeout=5, check=True)


def test_killed_anywhere_it_goes_on_at_the_next_boot(machine: Machine) -> None:
    for delay_s in (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5):
        machine.boot()
        time.sleep(delay_s)
        machine.vm.kill()
        if machine.code.exists():
            assert (machine.code / "recipes/errors.py").is_file()
            shutil.rmtree(machine.code)
    assert machine.run() == 0, machine.vm.console()
    assert [path.name for path in machine.code.parent.iterdir()] == [machine.code.name]
    assert "Traceback" not in machine.vm.console()


def test_two_vms_from_nothing_to_a_finished_run(tmp_path: Path, gcs: GcsServer, tree: Path) -> None:
    """Bundle, startup script, worker, agent and the stand-in trainer; one worker is killed on the way."""
    root = f"gs://bucket/{tmp_path.name}"
    recipe = small_recipe(Path("/x"))
    recipe = dataclasses.replace(recipe, run=dataclasses.replace(recipe.run, root=root))
    run = create_or_open(open_storage(recipe.run_dir), recipe, {}).run
    path, body = launched_recipe(recipe)
    run.storage.replace(path, body)
    machine_bundle = make_bundle(tree)
    upload(open_storage(root), machine_bundle)
    script = {"step_s": 0.1, "faults": [{"attempt": 1, "step": 40, "host": "s0-h0", "do": "peer-lost"}]}
    spec = VmSpec(
        run_dir=recipe.run_dir, recipe=path, order="o", provision=1, bundle=machine_bundle.digest,
        num_slices=2, hosts_per_slice=1, devices_per_host=1, is_cpu=True, grace_period_s=10.0, max_restarts=3,
        python=sys.executable, requirements=(), env={"STAND_IN": json.dumps(script)},
    )  # fmt: skip
    own = addresses(tmp_path)
    vms = [
        Vm(tmp_path / f"vm-{index}", MetadataServer(attributes(spec, index, own[0], own[index])))
        for index in range(2)
    ]
    try:
        for vm in vms:
            shutil.copy(bootstrap.__file__, vm.home / "startup-script")
            vm.boot([sys.executable, str(vm.home / "startup-script")], **gcs.env)
        kill_worker_at_step(run, vms[1], 12)
        assert [vm.wait() for vm in vms] == [0, 0], vms[0].console() + vms[1].console()
    finally:
        for vm in vms:
            vm.kill()
            vm.metadata.close()
    ends = [run.attempt_end(number) for number in run.attempts()]
    assert [end.exit_code if end else None for end in ends] == [75, 0]
    assert "the worker died of signal 9; starting it again" in vms[1].metadata.states()
    assert vms[1].state() == "over: complete"


def kill_worker_at_step(run: RunDir, vm: Vm, step: int) -> None:
    deadline_s = time.monotonic() + 60
    while not (beats := run.heartbeats()) or beats[-1].progress.step < step:
        assert time.monotonic() < deadline_s, vm.console()
        time.sleep(0.1)
    assert vm.process is not None
    (worker,) = psutil.Process(vm.process.pid).children()
    worker.send_signal(signal.SIGKILL)


LOCK = """iniconfig==2.1.0 \\
    --hash=sha256:9deba5723312380e77435581c6bf4935c94cbfab9b1ed33ef8d238ea168eb760
"""


@pytest.mark.long
def test_a_lock_file_is_installed_for_real(tmp_path: Path, gcs: GcsServer) -> None:
    """pip, then uv, then a package, from the package index; a second boot installs nothing."""
    tree = tmp_path / "tree"
    for package in ("launcher/tpu", "recipes", "trainer"):
        (tree / package).mkdir(parents=True)
        (tree / package / "__init__.py").touch()
    (tree / "launcher/__init__.py").touch()
    (tree / "launcher/tpu/worker.py").write_text(
        "import iniconfig, sys; print(sys.version_info[:2], 'ran')\n"
    )
    (tree / "my.lock").write_text(LOCK)
    machine = Machine(tmp_path, gcs, tmp_path.name, tree)
    try:
        # Where the package index has a certificate of its own, target.env says so.
        env = {name: os.environ[name] for name in ("SSL_CERT_FILE",) if name in os.environ}
        machine.spec(requirements=["my.lock"], env=env)
        assert machine.run() == 0, machine.vm.console()
        assert machine.run() == 0, machine.vm.console()
        assert machine.vm.metadata.states() == ["fetching the code", "installing"]
        assert machine.vm.console().count("(3, 12) ran") == 2
        (tree / "my.lock").write_text(LOCK.replace("9deba", "00000"))
        machine.bundle = make_bundle(tree)
        upload(machine.storage, machine.bundle)
        machine.spec(requirements=["my.lock"], env=env)
        impatient = machine.script.read_text().replace("WAITS_S = (1.0, 2.0,", "WAITS_S = () and (")
        machine.script.write_text(impatient)
        assert machine.run() == 1
        assert "Hash mismatch" in machine.vm.state(), machine.vm.console()
    finally:
        machine.vm.kill()
        machine.vm.metadata.close()
