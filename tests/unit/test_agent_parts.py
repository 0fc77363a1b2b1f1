"""The agent's parts: output, shipping, the environment of a local agent, and what is shown meanwhile."""

from __future__ import annotations

import io
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launcher import processes
from launcher.agent import shipping_reserve_s
from launcher.backends.local import LocalShape, agent_env
from launcher.display import PlainDisplay, StepClock, progress_text
from launcher.exits import FATAL_LINE
from launcher.ledger import Heartbeat
from launcher.shipping import FolderCargo, LatestCargo, LogCargo, Seldom, Shipper
from launcher.storage import open_storage
from launcher.tee import Tee
from recipes.contract import HostContext, Phase, Progress

STAMP = "2026-11-30T21:00:00.123Z "
NOW_S = 1796072400.1239


def stored_and_echoed(folder: Path, *chunks: bytes) -> tuple[str, bytes]:
    echo = io.BytesIO()
    tee = Tee(folder / "log", echo, clock=lambda: NOW_S)
    for chunk in chunks:
        tee.take(chunk)
    tee.close()
    return (folder / "log").read_text(), echo.getvalue()


def test_tee_sees_the_fatal_line_in_pieces(tmp_path: Path) -> None:
    echo = io.BytesIO()
    tee = Tee(tmp_path / "log", echo, clock=lambda: NOW_S)
    for byte in f"hello\nF1130 client.h:86] {FATAL_LINE}.\nlast".encode():
        tee.take(bytes([byte]))
    assert tee.fatal_line
    assert tee.tail()[0] == "hello"
    assert tee.tail()[-1] == "last"
    tee.say("news")
    tee.close()
    assert echo.getvalue().decode().endswith("\nlast\n[muster 2026-11-30T21:00:00Z] news\n")
    stored = (tmp_path / "log").read_text()
    assert stored.replace(STAMP, "") == echo.getvalue().decode()
    assert [line[: len(STAMP)] for line in stored.splitlines()] == [STAMP] * 4


@pytest.mark.parametrize(
    ("chunks", "stored"),
    [
        ([b"a\n", b"b\n"], f"{STAMP}a\n{STAMP}b\n"),
        ([b"a\nb\n\nc"], f"{STAMP}a\n{STAMP}b\n{STAMP}\n{STAMP}c"),
        ([b"a", b"b", b"\n", b"\n"], f"{STAMP}ab\n{STAMP}\n"),
        ([b"10%\r", b"20%\r", b"done\n"], f"{STAMP}10%\r20%\rdone\n"),
        ([b"caf\xc3", b"\xa9\n"], f"{STAMP}caf\u00e9\n"),
        ([b"", b"\n"], f"{STAMP}\n"),
        ([], ""),
    ],
)
def test_each_stored_line_begins_with_its_time_and_no_echo_does(
    chunks: list[bytes], stored: str, tmp_path: Path
) -> None:
    text, echoed = stored_and_echoed(tmp_path, *chunks)
    with (tmp_path / "log").open(newline="") as file:
        assert file.read() == stored
    assert text.count(STAMP) == stored.count(STAMP)
    assert echoed == b"".join(chunks)


def test_part_of_a_line_is_stored_at_once(tmp_path: Path) -> None:
    tee = Tee(tmp_path / "log", clock=lambda: NOW_S)
    tee.take(b"compiling ...")
    assert (tmp_path / "log").read_text() == f"{STAMP}compiling ..."
    tee.close()


def test_the_agents_word_cuts_a_line_of_any_length(tmp_path: Path) -> None:
    tee = Tee(tmp_path / "log", clock=lambda: NOW_S)
    tee.take(b"x" * 5000)
    tee.say("one\ntwo")
    tee.take(b"rest\n")
    tee.close()
    lines = (tmp_path / "log").read_text().splitlines()
    date = "[muster 2026-11-30T21:00:00Z]"
    assert lines == [f"{STAMP}{text}" for text in ("x" * 5000, f"{date} one", "two", "rest")]


def test_after_a_full_disk_lines_are_whole_again(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    echo = io.BytesIO()
    tee = Tee(tmp_path / "log", echo, clock=lambda: NOW_S)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (40, before[1]))
        tee.take(b"a long line that does not fit\n")
        tee.take(b"lost, ")
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        tee.take(b"kept\nmore\n")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
        tee.close()
    assert (tmp_path / "log").read_text() == f"{STAMP}a long line tha\n{STAMP}kept\n{STAMP}more\n"
    assert echo.getvalue() == b"a long line that does not fit\nlost, kept\nmore\n"


def test_tee_keeps_its_size_without_line_ends(tmp_path: Path) -> None:
    tee = Tee(tmp_path / "log")
    for _ in range(100):
        tee.take(b"x" * 1000)
    assert sum(map(len, tee.tail())) < 90_000
    assert not tee.fatal_line
    tee.close()


def test_a_healthy_gloo_line_is_not_fatal(tmp_path: Path) -> None:
    tee = Tee(tmp_path / "log")
    tee.take(b"[Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1\n")
    tee.close()
    assert not tee.fatal_line


def test_a_log_is_shipped_piece_by_piece(tmp_path: Path) -> None:
    source, store = tmp_path / "source", open_storage(str(tmp_path / "run"))
    cargo = LogCargo(source, store, "logs/a.log")
    for text in ("one\n", "two\n", ""):
        with source.open("a") as file:
            file.write(text)
        cargo.ship(final=False)
        assert store.read_log("logs/a.log") == source.read_bytes()


def test_only_changes_are_shipped(tmp_path: Path) -> None:
    store, bodies = open_storage(str(tmp_path)), [None, b"1", b"1", b"2"]
    cargo = LatestCargo(lambda: bodies.pop(0), store, "beat.json")
    cargo.ship(final=False)
    assert store.children() == []
    cargo.ship(final=False)
    _, version = store.read_versioned("beat.json")
    cargo.ship(final=False)
    assert store.read_versioned("beat.json") == (b"1", version)
    cargo.ship(final=True)
    assert store.read("beat.json") == b"2"


def test_a_folder_is_shipped_with_its_names(tmp_path: Path) -> None:
    folder, store = tmp_path / "metrics", open_storage(str(tmp_path / "run"))
    cargo = FolderCargo(folder, store, "metrics")
    cargo.ship(final=False)
    (folder / "sub").mkdir(parents=True)
    (folder / "0001.jsonl").write_text("{}\n")
    (folder / "sub" / "events").write_bytes(b"\0\1")
    (folder / ".hidden").write_text("x")
    cargo.ship(final=True)
    assert store.list() == ["metrics/0001.jsonl", "metrics/sub/events"]


def test_seldom_keeps_its_period_but_not_at_the_end(tmp_path: Path) -> None:
    now, bodies = [0.0], iter([b"1", b"2", b"3"])
    store = open_storage(str(tmp_path))
    cargo = Seldom(LatestCargo(lambda: next(bodies), store, "x"), 30.0, lambda: now[0])
    cargo.ship(final=False)
    now[0] = 29.0
    cargo.ship(final=False)
    assert store.read("x") == b"1"
    cargo.ship(final=True)
    assert store.read("x") == b"2"


def test_a_store_that_is_away_is_tried_again(tmp_path: Path) -> None:
    source, said = tmp_path / "log", list[str]()
    source.write_text("text")
    (tmp_path / "run").write_text("a file in the way")
    store = open_storage(str(tmp_path / "run"))
    shipper = Shipper([LogCargo(source, store, "logs/a")], period_s=0.01, say=said.append)
    shipper.start()
    deadline_s = time.monotonic() + 10
    while not said and time.monotonic() < deadline_s:
        time.sleep(0.01)
    (tmp_path / "run").unlink()
    assert shipper.finish(10.0)
    assert store.read_log("logs/a") == b"text"
    assert said[0].startswith("storage: ")
    assert said[-1] == "storage: works again"


def test_finish_says_when_not_all_arrived(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file in the way")
    (tmp_path / "log").write_text("text")
    cargo = LogCargo(tmp_path / "log", open_storage(str(tmp_path / "run")), "logs/a")
    shipper = Shipper([cargo], period_s=60.0, say=lambda _: None)
    shipper.start()
    assert not shipper.finish(0.2)


@pytest.mark.parametrize(("grace_s", "reserve_s"), [(5, 1.25), (10, 2.5), (30, 5), (3600, 5)])
def test_the_trainer_gets_most_of_the_grace(grace_s: float, reserve_s: float) -> None:
    assert shipping_reserve_s(grace_s) == reserve_s


CONTEXT = HostContext(
    run_dir="/runs/a",
    attempt=3,
    slice_id=1,
    num_slices=2,
    host_id=0,
    hosts_per_slice=1,
    coordinator="127.0.0.1:1234",
    grace_period_s=30.0,
    scratch_dir="/scratch",
)


def test_the_environment_of_an_attempt_is_its_own() -> None:
    stale = {
        "MUSTER_ATTEMPT": "1",
        "MUSTER_OTHER": "x",
        "MEGASCALE_NUM_SLICES": "9",
        "TPU_WORKER_ID": "9",
        "JAX_COORDINATOR_ADDRESS": "old:1",
        "JAX_PLATFORMS": "tpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=64 --xla_dump_to=/x",
        "HOME": "/home/a",
        "PATH": "/bin",
        "JAX_ENABLE_X64": "1",
    }
    env = agent_env(stale, CONTEXT, 4)
    assert HostContext.from_env(env) == CONTEXT
    assert not {"MUSTER_OTHER", "MEGASCALE_NUM_SLICES", "TPU_WORKER_ID", "JAX_COORDINATOR_ADDRESS"} & set(env)
    assert env["JAX_PLATFORMS"] == "cpu"
    assert env["JAX_NUM_CPU_DEVICES"] == "4"
    assert env["JAX_COORDINATOR_BIND_ADDRESS"] == "127.0.0.1:1234"
    assert env["XLA_FLAGS"] == "--xla_dump_to=/x"
    assert env["PATH"] == "/bin"
    assert env["JAX_ENABLE_X64"] == "1"


def test_flags_that_only_counted_devices_are_dropped() -> None:
    env = agent_env({"XLA_FLAGS": "--xla_force_host_platform_device_count=64"}, CONTEXT, 4)
    assert "XLA_FLAGS" not in env


def test_the_compilation_cache_is_kept_or_chosen() -> None:
    assert agent_env({"XDG_CACHE_HOME": "/c"}, CONTEXT, 1)["JAX_COMPILATION_CACHE_DIR"] == "/c/muster/xla"
    chosen = agent_env({"JAX_COMPILATION_CACHE_DIR": "/mine"}, CONTEXT, 1)
    assert chosen["JAX_COMPILATION_CACHE_DIR"] == "/mine"


def test_hosts_of_a_shape() -> None:
    shape = LocalShape(num_slices=2, hosts_per_slice=2, devices_per_host=1, grace_period_s=30.0)
    assert shape.hosts == ("s0-h0", "s0-h1", "s1-h0", "s1-h1")


def _beat(
    host: str, step: int, phase: Phase = Phase.TRAINING, time_s: float = 0.0, **metrics: float
) -> Heartbeat:
    named = {name.replace("__", "/"): value for name, value in metrics.items()}
    progress = Progress(
        phase=phase, step=step, num_steps=200, committed_step=50, time_s=time_s, metrics=named
    )
    return Heartbeat(host=host, attempt=1, progress=progress)


@pytest.mark.parametrize(
    ("beats", "step_time_s", "text"),
    [
        ([], None, "starting"),
        (
            [_beat("s0-h0", 7, train__loss=2.5), _beat("s1-h0", 6)],
            None,
            "training  step 6/200  loss 2.500  saved 50",
        ),
        (
            [_beat("s0-h0", 100, train__loss=2.5, eval__loss=2.25, perf__tokens_per_s=41234.0)],
            0.5,
            "training  step 100/200  loss 2.500  held-out 2.250  41,234 tokens/s  saved 50  0:50 left",
        ),
        ([_beat("s0-h0", 0, Phase.COMPILING)], 1.0, "compiling  saved 50"),
        ([_beat("s0-h0", 9), _beat("s1-h0", 9, Phase.RESTORING)], None, "restoring  saved 50"),
        (
            [_beat("s0-h0", 0, Phase.RESTORING), _beat("s1-h0", 0, Phase.COMPILING)],
            None,
            "compiling  saved 50",
        ),
        ([_beat("s0-h0", 0)], 60.0, "training  step 0/200  saved 50  3:20:00 left"),
    ],
)
def test_progress_text(beats: list[Heartbeat], step_time_s: float | None, text: str) -> None:
    assert progress_text(beats, step_time_s=step_time_s) == text


def test_step_time_starts_again_with_each_attempt() -> None:
    clock = StepClock()
    assert clock.step_time_s(1, [_beat("s0-h0", 10, time_s=100.0, x=1.0)]) is None
    assert clock.step_time_s(1, [_beat("s0-h0", 30, time_s=110.0, x=1.0)]) == 0.5
    assert clock.step_time_s(2, [_beat("s0-h0", 20, time_s=200.0, x=1.0)]) is None


def test_plain_lines_come_with_phases_and_seldom(capsys: pytest.CaptureFixture[str]) -> None:
    now = [100.0]
    display = PlainDisplay(lambda: now[0])
    for second, step, phase in [(0, 0, Phase.COMPILING), (1, 0, Phase.COMPILING), (2, 1, Phase.TRAINING)]:
        now[0] = 100.0 + second
        display.show(1, [_beat("s0-h0", step, phase)])
    for second in (3, 11, 12, 13):
        now[0] = 100.0 + second
        display.show(1, [_beat("s0-h0", second)])
    lines = [line.partition("  saved")[0].strip() for line in capsys.readouterr().err.splitlines()]
    assert lines == ["compiling", "training  step 1/200", "training  step 12/200"]


def test_plain_lines_without_news_are_rare(capsys: pytest.CaptureFixture[str]) -> None:
    now = [100.0]
    display = PlainDisplay(lambda: now[0])
    for second in range(0, 70, 5):
        now[0] = 100.0 + second
        display.show(1, [])
    assert capsys.readouterr().err == "  starting\n" * 2


def test_a_process_is_told_from_a_later_one_with_its_number() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        known = processes.process_id(child.pid)
        assert known is not None
        assert processes.is_running(known)
        assert not processes.is_running(processes.ProcessId(pid=child.pid, started="another"))
        child.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        # A zombie has ended.
        assert not processes.is_running(known)
        assert processes.wait_until_gone([known], 0.0) == []
    finally:
        child.kill()
        child.communicate()


def test_waiting_for_a_process_gives_up() -> None:
    own = processes.process_id(os.getpid())
    assert own is not None
    now, slept = [0.0], list[float]()

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += 1.0

    assert processes.wait_until_gone([own], 3.0, monotonic=lambda: now[0], sleep=sleep) == [own]
    assert len(slept) == 3
