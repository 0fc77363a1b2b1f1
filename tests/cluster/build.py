"""The programs of the control plane, built from Go modules and kept outside the repository.

    python -m tests.cluster.build           # what `make control-plane` runs; seconds when all is there

Each component has a folder of its own, named by its version, below ~/.cache/muster/control-plane, and appears
there whole or not at all; a build that was interrupted is simply started again, and Go's own cache makes the
second time short. A first build takes some 20 minutes on 2 cores. KUBEBUILDER_ASSETS is respected: a program
found there is taken as it is.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from recipes.contract import cache_dir

MINIMUM_GO = (1, 25)
KUBERNETES, STAGING = "v1.34.3", "v0.34.3"
GO_ENV = {"CGO_ENABLED": "0", "GOFLAGS": "-trimpath -buildvcs=false"}
REQUIRE = "MUSTER_REQUIRE_CLUSTER"
"""Environment: where this is 1, a control plane that cannot be had is a failure."""
TELL_S = 30.0
"""How often a build says that it is still going on."""
PATCHES = {
    "kueue": ("cmd/kueue/main.go", '"/etc/kueue/metrics/certs"', 'os.Getenv("KUEUE_METRICS_CERTS")'),
}
"""A main file, what is replaced in it and by what: no test may have to write to /etc."""


PROGRAMS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "jobset")
"""Of a control plane without Kueue."""


class Unavailable(Exception):
    """There is no control plane on this machine, and why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Component:
    """What is built from one Go module."""

    name: str
    version: str
    module: str
    programs: dict[str, str]
    """Package within the module -> name of the program."""
    link: str = ""
    manifests: str = ""
    """Folder within the module that holds the definitions of its API."""

    @property
    def folder(self) -> Path:
        machine = f"{sys.platform}-{platform.machine()}"
        return cache_dir(os.environ) / "control-plane" / machine / f"{self.name}-{self.version}"


_VERSION = "k8s.io/component-base/version"
COMPONENTS = (
    Component(name="etcd", version="v3.6.13", module="go.etcd.io/etcd/server/v3", programs={"": "etcd"}),
    Component(
        name="kubernetes",
        version=KUBERNETES,
        module="k8s.io/kubernetes",
        programs={
            f"cmd/{name}": name for name in ("kube-apiserver", "kube-controller-manager", "kube-scheduler")
        },
        link=f"-X {_VERSION}.gitVersion={KUBERNETES} -X {_VERSION}.gitMajor=1 -X {_VERSION}.gitMinor=34",
    ),
    Component(
        name="jobset",
        version="v0.11.1",
        module="sigs.k8s.io/jobset",
        programs={"": "jobset"},
        manifests="config/components",
    ),
    Component(
        name="kueue",
        version="v0.17.0",
        module="sigs.k8s.io/kueue",
        programs={"cmd/kueue": "kueue"},
        manifests="config/components",
    ),
)
"""In the order in which they are built: the ones that others can be tried with come first."""


def find_program(name: str) -> Path:
    """Where a program is.

    Raises:
      Unavailable: it is not built.
    """
    given = Path(os.environ.get("KUBEBUILDER_ASSETS", "/nonexistent")) / name
    if given.is_file():
        return given
    found = _component(name).folder / name
    if not found.is_file():
        raise Unavailable(f"{name} is not built: run `make control-plane` (needs Go >= {_go_text()})")
    return found


def find_manifests(name: str) -> Path:
    """The folder with ``crd/bases`` and ``webhook`` of a component.

    Raises:
      Unavailable: it is not there.
    """
    found = _component(name).folder / "manifests"
    if not found.is_dir():
        raise Unavailable(f"{name} is not built: run `make control-plane` (needs Go >= {_go_text()})")
    return found


def lacking(*programs: str) -> str:
    """Why a control plane of these programs cannot be had here; empty when it can."""
    if sys.platform != "linux":
        return "the process kubelet needs Linux (/proc, a loopback network)"
    if shutil.which("openssl") is None:
        return "there is no `openssl` on the PATH"
    try:
        for program in programs:
            find_program(program)
        find_manifests(programs[-1])
    except Unavailable as error:
        return str(error)
    return ""


def _component(program: str) -> Component:
    return next(component for component in COMPONENTS if program in component.programs.values())


def build_all() -> None:
    """Builds what is missing.

    Raises:
      Unavailable: Go is missing or too old, or a build failed.
    """
    missing = [component for component in COMPONENTS if not component.folder.is_dir()]
    if not missing:
        return
    check_go()
    root = missing[0].folder.parent
    root.mkdir(parents=True, exist_ok=True)
    with (root / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for number, component in enumerate(missing, start=1):
            if not component.folder.is_dir():
                _build(component, f"{component.name} {component.version} ({number} of {len(missing)})")


def check_go() -> None:
    """Raises Unavailable unless there is a Go that can build all of it."""
    text = f"the test control plane needs Go >= {_go_text()} (https://go.dev/dl)"
    if shutil.which("go") is None:
        raise Unavailable(f"{text}; there is no `go` on the PATH")
    version = _output(["go", "env", "GOVERSION"], Path.cwd())
    numbers = re.match(r"go(\d+)\.(\d+)", version)
    if numbers is None or (int(numbers[1]), int(numbers[2])) < MINIMUM_GO:
        raise Unavailable(f"{text}; this is {version.strip()}")


def _go_text() -> str:
    return ".".join(map(str, MINIMUM_GO))


def _build(component: Component, title: str) -> None:
    root = component.folder.parent
    for stale in root.glob(f".{component.name}-*"):
        shutil.rmtree(stale)
    with tempfile.TemporaryDirectory(prefix=f".{component.name}-", dir=root) as name:
        work, result = Path(name) / "src", Path(name) / "result"
        work.mkdir()
        result.mkdir()
        start_s = time.monotonic()
        log = root / f"{component.name}.log"
        log.unlink(missing_ok=True)
        print(f"control plane: building {title}; log: {log}", flush=True)
        _prepare(component, work, log)
        for package, program in component.programs.items():
            link = f"-ldflags=-s -w {component.link}"
            target = "." if component.name in PATCHES else f"{component.module}/{package}".rstrip("/")
            _run(["go", "build", link, "-o", str(result / program), target], work, log)
        if component.manifests:
            for part in ("crd", "webhook"):
                # Module caches are read-only; what is copied from them has to be removable.
                shutil.copytree(
                    Path(_module(component, work)["Dir"]) / component.manifests / part,
                    result / "manifests" / part,
                    copy_function=shutil.copyfile,
                )
        result.rename(component.folder)
        print(f"control plane: built {title} in {time.monotonic() - start_s:.0f} s", flush=True)


def _prepare(component: Component, work: Path, log: Path) -> None:
    """A module that names the programs as its tools, so that all their versions are the released ones."""
    (work / "go.mod").write_text(f"module {component.name}\n\ngo {_go_text()}.0\n")
    if component.name == "kubernetes":
        # It names its own staging modules at v0.0.0; the published ones have the same content.
        text = Path(_module(component, work)["GoMod"]).read_text()
        for name in re.findall(r"(?m)^\s*(?:replace )?(\S+) => \./staging", text):
            _run(["go", "mod", "edit", "-replace", f"{name}={name}@{STAGING}"], work, log)
    tools = [f"{component.module}/{package}".rstrip("/") for package in component.programs]
    _run(["go", "get", "-tool", *(f"{tool}@{component.version}" for tool in tools)], work, log)
    if component.name in PATCHES:
        file, old, new = PATCHES[component.name]
        before, *after = (Path(_module(component, work)["Dir"]) / file).read_text().split(old)
        if len(after) != 1:
            raise Unavailable(f"{component.module} {component.version}: {file} no longer has one {old}")
        (work / "main.go").write_text(before + new + after[0])


def _module(component: Component, work: Path) -> dict[str, str]:
    """Where Go keeps the module's files."""
    argv = ["go", "mod", "download", "-json", f"{component.module}@{component.version}"]
    answer: dict[str, str] = json.loads(_output(argv, work))
    return answer


def _output(argv: Sequence[str], folder: Path) -> str:
    done = subprocess.run(argv, cwd=folder, env={**os.environ, **GO_ENV}, capture_output=True, text=True)
    if done.returncode:
        raise Unavailable(f"{' '.join(argv)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def _run(argv: Sequence[str], folder: Path, log: Path) -> None:
    """Runs a command with its output in ``log``; says now and then that it still runs."""
    start_s = time.monotonic()
    with log.open("ab") as output:
        process = subprocess.Popen(
            argv, cwd=folder, env={**os.environ, **GO_ENV}, stdout=output, stderr=subprocess.STDOUT
        )
        while True:
            try:
                status = process.wait(TELL_S)
                break
            except subprocess.TimeoutExpired:
                elapsed_s = time.monotonic() - start_s
                print(f"control plane: {' '.join(argv[:2])} has run for {elapsed_s:.0f} s", flush=True)
            except BaseException:
                process.kill()
                raise
    if status:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
        raise Unavailable(f"{' '.join(argv)} ended with {status}; {log} ends with:\n{tail}")


def main() -> int:
    try:
        build_all()
    except Unavailable as error:
        required = os.environ.get(REQUIRE) == "1"
        print(f"control plane: {'failed' if required else 'skipped'}: {error}", file=sys.stderr)
        return int(required)
    print(f"control plane: ready below {COMPONENTS[0].folder.parent}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
