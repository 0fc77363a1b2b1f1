"""Stacks of trainers: how they are read, asked for, grouped and shown."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from launcher import lease
from launcher.cli import main
from launcher.cli import stacks as verb
from launcher.ledger import AttemptEnd, HostRecord, HostStacks, StacksRequest
from launcher.rundir import RunDir
from launcher.shipping import OnceCargo
from launcher.stack_groups import StackGroups
from launcher.stacks import HANG, STACKS_S, StackDumps, is_request_id, parse_threads, poll_s
from launcher.storage import open_storage
from recipes.contract import STACKS_FILE, HostContext, Phase, Progress, RunPath
from recipes.errors import UserError
from tests.unit.rundir_support import make_recipe, make_run

DUMP = """Thread 0x00007f1c2a7fc640 (most recent call first):
  File "/usr/lib/python3.12/threading.py", line 359 in wait
  File "/usr/lib/python3.12/threading.py", line 1012 in _bootstrap

Current thread 0x00007f1c3b5d1740 (most recent call first):
  File "/code/trainer/train.py", line 70 in train
  File "<frozen runpy>", line 88 in _run_code
"""
THREADS = [
    [
        'File "/usr/lib/python3.12/threading.py", line 359 in wait',
        'File "/usr/lib/python3.12/threading.py", line 1012 in _bootstrap',
    ],
    [
        'File "/code/trainer/train.py", line 70 in train',
        'File "<frozen runpy>", line 88 in _run_code',
    ],
]
PROGRESS = Progress(phase=Phase.TRAINING, step=7, num_steps=20, committed_step=5, time_s=0.0, metrics={})


@pytest.mark.parametrize(
    ("text", "threads"),
    [
        (DUMP, THREADS),
        (DUMP.replace("1740 (most", "1740 [MainThread] (most"), THREADS),
        ("", []),
        ("Segmentation fault\n  File\n", []),
        ("Thread 0x0f (most recent call first):\n  <no Python frame>\n", [["<no Python frame>"]]),
        ("Thread 0x0f (most recent call first):\n  File a\n\n  File b\nnoise\n  File c\n", [["File a"]]),
    ],
)
def test_what_faulthandler_writes_is_read(text: str, threads: list[list[str]]) -> None:
    assert parse_threads(text) == threads


@pytest.mark.parametrize(
    ("url", "num_hosts", "seconds"),
    [("/runs/a", 64, 1.0), ("gs://b/a", 64, 10.0), ("gs://b/a", 12_736, 12.736)],
)
def test_a_large_run_looks_no_more_often_than_a_bucket_bears(
    url: str, num_hosts: int, seconds: float
) -> None:
    assert poll_s(url, num_hosts) == seconds


@pytest.mark.parametrize(
    ("text", "is_valid"),
    [
        ("hang", True),
        ("0a" * 8, True),
        ("", False),
        ("../x", False),
        ("a/b", False),
        ("A", False),
        ("a\n", False),
    ],
)
def test_ids_of_requests(text: str, is_valid: bool) -> None:
    assert is_request_id(text) is is_valid


class Host:
    """One agent's stacks with a clock, and a trainer that writes a dump when told."""

    def __init__(self, root: Path, host_id: int = 0) -> None:
        self.run = (
            make_run(root / f"runs-{host_id}")
            if host_id == 0
            else RunDir(open_storage(str(root / "runs-0/tiny")))
        )
        self.scratch = root / f"scratch-{host_id}"
        self.scratch.mkdir()
        self.now_s, self.signals, self.said = 100.0, 0, list[str]()
        context = HostContext(
            run_dir=self.run.url,
            attempt=3,
            slice_id=0,
            num_slices=1,
            host_id=host_id,
            hosts_per_slice=2,
            coordinator="",
            grace_period_s=10.0,
            scratch_dir=str(self.scratch),
        )
        self.dumps = StackDumps(
            context, self.run, signal=self._signal, say=self.said.append, monotonic=lambda: self.now_s
        )
        self.dump = DUMP

    def begin(self) -> None:
        (self.scratch / STACKS_FILE).touch()

    def request(self, request: str, *, attempt: int = 3, hosts: Sequence[str] = ()) -> None:
        self.run.request_stacks(
            StacksRequest(id=request, attempt=attempt, hosts=hosts, requested_s=1.0, by="somebody")
        )

    def pass_time(self, seconds: float) -> None:
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self.now_s += 0.1
            self.dumps.tick(PROGRESS)
            self.dumps.ship(final=False)

    def answer(self, request: str, host: str = "s0-h0") -> HostStacks | None:
        return next(iter(self.run.stacks(3, request, only=[host])), None)

    def _signal(self) -> None:
        self.signals += 1
        with (self.scratch / STACKS_FILE).open("a") as file:
            file.write(self.dump)


def test_a_request_is_answered_once(tmp_path: Path) -> None:
    host = Host(tmp_path)
    host.begin()
    host.request("first")
    host.pass_time(5.0)
    answer = host.answer("first")
    assert answer is not None
    assert (answer.phase, answer.step, answer.problem) == ("training", 7, "")
    assert [list(frames) for frames in answer.threads] == THREADS
    assert (host.signals, len(host.said)) == (1, 1)
    assert "line 70 in train" in host.said[0]
    host.request("second")
    host.pass_time(5.0)
    second = host.answer("second")
    assert second is not None
    assert [list(frames) for frames in second.threads] == THREADS
    assert host.signals == 2


@pytest.mark.parametrize(
    "request_of",
    [
        {"request": "other", "attempt": 2},
        {"request": "other", "hosts": ["s0-h1"]},
        {"request": "../../../../outside"},
        {"request": "x" * 33},
    ],
    ids=["another attempt", "another host", "a path", "too long"],
)
def test_what_is_not_for_this_host_is_not_heeded(tmp_path: Path, request_of: dict[str, object]) -> None:
    host = Host(tmp_path)
    host.begin()
    host.request(**request_of)  # type: ignore[arg-type]
    before = host.run.storage.list()
    host.pass_time(5.0)
    assert host.signals == 0
    assert host.run.storage.list() == before


def test_a_damaged_request_is_said_once_and_stops_nothing(tmp_path: Path) -> None:
    host = Host(tmp_path)
    host.begin()
    host.run.storage.replace(RunPath.STACKS, b"nonsense")
    host.pass_time(5.0)
    assert len(host.said) == 1
    assert "stacks.json is damaged" in host.said[0]
    host.request("later")
    host.pass_time(5.0)
    assert host.answer("later") is not None


def test_a_trainer_that_has_just_begun_is_not_killed_by_the_signal(tmp_path: Path) -> None:
    host = Host(tmp_path)
    host.request("early")
    host.pass_time(3.0)
    answer = host.answer("early")
    assert host.signals == 0
    assert answer is not None
    assert "cannot be asked yet" in answer.problem


def test_a_trainer_that_writes_nothing_or_nonsense_is_told_of(tmp_path: Path) -> None:
    host = Host(tmp_path)
    host.begin()
    for dump, problem in (("", f"no stacks within {STACKS_S:g} s"), ("what?\n", "holds no stacks")):
        host.dump = dump
        host.request(f"r{len(dump)}")
        host.pass_time(5.0)
        answer = host.answer(f"r{len(dump)}")
        assert answer is not None
        assert problem in answer.problem


def test_a_dump_is_taken_when_it_has_stopped_growing(tmp_path: Path) -> None:
    host = Host(tmp_path)
    host.begin()
    first, rest = DUMP.split("\n\n")
    host.dump = f"{first}\n\n"
    host.request("slow")
    # Asked in the second tick, it has been quiet for less than QUIET_S in the fourth.
    host.pass_time(0.35)
    assert host.signals == 1
    with (host.scratch / STACKS_FILE).open("a") as file:
        file.write(rest)
    host.pass_time(2.0)
    answer = host.answer("slow")
    assert answer is not None
    assert [list(frames) for frames in answer.threads] == THREADS


def test_who_waits_when_the_trainer_ends_is_answered(tmp_path: Path) -> None:
    host = Host(tmp_path)
    host.begin()
    host.dump = ""
    host.request("last")
    host.pass_time(1.5)
    host.dumps.close(PROGRESS)
    host.dumps.ship(final=True)
    answer = host.answer("last")
    assert answer is not None
    assert "ended before" in answer.problem


def test_a_hang_asks_every_host_and_only_one_has_to(tmp_path: Path) -> None:
    first, second = Host(tmp_path), Host(tmp_path, host_id=1)
    for host in (first, second):
        host.begin()
    first.dumps.hang()
    first.pass_time(0.5)
    request = first.run.stacks_request()
    assert request is not None
    assert (request.id, request.attempt, request.by) == (HANG, 3, "s0-h0")
    second.pass_time(2.0)
    # By then it has seen what the first one asked for.
    second.dumps.hang()
    second.pass_time(2.0)
    assert second.run.stacks_request() == request
    assert first.run.stacks_hosts(3, HANG) == ["s0-h0", "s0-h1"]
    assert first.dumps.hang_patience_s > STACKS_S + poll_s(first.run.url, 2)


def _stacks(host: str, main_frame: str, *others: str, step: int = 7, problem: str = "") -> HostStacks:
    threads = [[other] for other in others] + [[main_frame, "in main"]]
    return HostStacks(
        host=host,
        time_s=0.0,
        phase="training",
        step=step,
        threads=() if problem else threads,
        problem=problem,
    )


def test_hosts_that_do_the_same_are_one_group_and_the_rarest_come_first() -> None:
    groups = StackGroups()
    for number in reversed(range(12)):
        groups.add(_stacks(f"s0-h{number}", "in wait", *["idle"] * number, step=number))
    groups.add(_stacks("s1-h0", "in read"))
    groups.add(_stacks("s1-h2", "in wait", "idle", "writer"))
    groups.add(_stacks("s1-h10", "", problem="no time"))
    groups.add(_stacks("s1-h11", "", problem="no time"))
    silent, strange, others = groups.sorted()
    assert (silent.hosts, silent.problem, silent.frames) == (["s1-h10", "s1-h11"], "no time", ())
    assert (strange.hosts, strange.frames) == (["s1-h0"], ("in read", "in main"))
    assert others.hosts == [*(f"s0-h{number}" for number in range(12)), "s1-h2"]
    # How many idle workers a host has says nothing; that it has one that others have not, does.
    writer, idle = others.sorted_others().items()
    assert writer == (("writer",), ["s1-h2"])
    assert (idle[0], len(idle[1])) == (("idle",), 12)


def test_of_equally_many_the_ones_that_got_least_far_come_first() -> None:
    groups = StackGroups()
    for host, step in (("s0-h0", 9), ("s0-h1", 8), ("s0-h2", 7)):
        groups.add(_stacks(host, f"in {host}", step=step))
    assert [group.hosts for group in groups.sorted()] == [["s0-h2"], ["s0-h1"], ["s0-h0"]]


def test_the_trainer_writes_its_stacks_where_the_agent_looks(tmp_path: Path) -> None:
    script = (
        "import sys, trainer.__main__ as it\n"
        "it._write_stacks_on_signal(sys.argv[1])\n"
        "print('ready', flush=True)\n"
        "sys.stdin.read()\n"
    )
    argv = [sys.executable, "-c", script, str(tmp_path)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        file = tmp_path / STACKS_FILE
        assert file.read_bytes() == b""
        for times in (1, 2):
            process.send_signal(signal.SIGUSR1)
            deadline_s = time.monotonic() + 20.0
            while len(found := parse_threads(file.read_text())) < times and time.monotonic() < deadline_s:
                time.sleep(0.01)
            assert len(found) == times
        process.communicate()
    assert process.returncode == 0
    assert found[0][-1].endswith("in <module>")


def test_a_thread_that_only_some_have_is_shown_with_their_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path)
    run.next_attempt(1.0, recipe=make_recipe(), hosts=["s0-h0", "s0-h1"])
    run.write_stacks(1, HANG, _stacks("s0-h0", "in wait", "idle", "writer", step=6))
    run.write_stacks(1, HANG, _stacks("s0-h1", "in wait", "idle"))
    assert main(["stacks", run.url, "--attempt", "1"]) == 0
    assert (
        capsys.readouterr().out
        == """tiny, attempt 1: 2 hosts in 1 group

2 hosts (training, steps 6 to 7): s0-h0, s0-h1
  main thread
    in wait
    in main
  other thread of s0-h0
    writer
  other thread
    idle
"""
    )


@pytest.fixture
def running(tmp_path: Path) -> Iterator[RunDir]:
    """A run that this process holds, in its first attempt, on three hosts."""
    run = make_run(tmp_path)
    held = run.acquire(lease.this_process("test"), time.time())
    run.next_attempt(time.time(), recipe=make_recipe(), hosts=["s0-h0", "s0-h1", "s0-h2", "../x"])
    yield run
    run.release(held)


class Answering:
    """Sleeping is when hosts answer."""

    def __init__(self, run: RunDir, *rounds: Sequence[HostStacks]) -> None:
        self.run, self.rounds, self.now_s = run, list(rounds), time.time()

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        request = self.run.stacks_request()
        assert request is not None
        for stacks in self.rounds.pop(0) if self.rounds else ():
            self.run.write_stacks(1, request.id, stacks)

    def ask(self, *hosts: str, timeout_s: float | None = 5.0) -> verb.Answers:
        return verb.Asking(self.run, hosts, self.sleep, lambda: self.now_s).ask(timeout_s)


def test_all_hosts_answer(running: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    world = Answering(
        running,
        [_stacks("s0-h1", "b")],
        [_stacks("s0-h0", "a"), _stacks("s0-h2", "a"), _stacks("s9-h9", "a")],
    )
    answers = world.ask()
    assert [group.hosts for group in answers.groups] == [["s0-h1"], ["s0-h0", "s0-h2"]]
    assert answers.missing == {}
    said = capsys.readouterr().err
    assert "asked 3 hosts of attempt 1" in said
    assert "1 of 3 hosts" in said
    request = running.stacks_request()
    assert request is not None
    assert (request.attempt, request.hosts) == (1, ())


def test_only_chosen_hosts_are_asked(running: RunDir) -> None:
    answers = Answering(running, [_stacks("s0-h2", "a")]).ask("0/2", "s0-h2")
    request = running.stacks_request()
    assert request is not None
    assert request.hosts == ("s0-h2",)
    assert [group.hosts for group in answers.groups] == [["s0-h2"]]


def test_who_does_not_answer_is_named_with_what_is_known(running: RunDir) -> None:
    running.write_host(
        1, HostRecord(host="s0-h1", hostname="m", pid=1, start_s=0.0, exit_code=75, reason="a peer was lost")
    )
    world = Answering(running, [_stacks("s0-h0", "a")])
    began_s = world.now_s
    answers = world.ask()
    assert answers.missing == {
        "s0-h1": "it ended: a peer was lost",
        "s0-h2": "no answer; last heartbeat: never",
    }
    assert world.now_s - began_s == pytest.approx(5.0, abs=0.6)


def test_an_attempt_that_ends_is_not_waited_for(running: RunDir) -> None:
    now = [time.time()]

    def end(seconds: float) -> None:
        now[0] += seconds
        ended = AttemptEnd(
            end_s=1.0, exit_code=75, first_failing_host=None, message="", hint="", from_step=-1, to_step=-1
        )
        running.write_attempt_end(1, ended)

    began_s = now[0]
    assert len(verb.Asking(running, (), end, lambda: now[0]).ask(600.0).missing) == 3
    assert now[0] - began_s < 2.0


def test_the_answers_to_another_request_count_too(running: RunDir) -> None:
    world = Answering(running, [_stacks("s0-h0", "a")])
    answer, sleep = _stacks("s0-h1", "b"), world.sleep

    def hang(seconds: float) -> None:
        sleep(seconds)
        for host in ("s0-h1", "s0-h2"):
            running.write_stacks(1, HANG, dataclasses.replace(answer, host=host))
        running.request_stacks(StacksRequest(id=HANG, attempt=1, hosts=(), requested_s=1.0, by="s0-h1"))

    answers = verb.Asking(running, (), hang, lambda: world.now_s).ask(5.0)
    assert [group.hosts for group in answers.groups] == [["s0-h0"], ["s0-h1", "s0-h2"]]


@pytest.mark.parametrize(
    ("hosts", "message", "hint"),
    [
        (["s0-h7"], "there is no host s0-h7", "did you mean s0-h"),
        (["1/0"], "there is no host 1/0", "s0-h"),
        (["../x"], "there is no host ../x", "it has s0-h0 to s0-h2"),
    ],
)
def test_hosts_that_are_not_there(running: RunDir, hosts: list[str], message: str, hint: str) -> None:
    with pytest.raises(UserError, match=message) as raised:
        Answering(running).ask(*hosts)
    assert hint in raised.value.hint
    assert running.stacks_request() is None


def test_a_damaged_answer_is_named_and_hostile_text_is_shown_as_text(
    running: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    evil = _stacks("s0-h0", "in \x1b[2Jwait\nERROR")
    folder = f"attempts/0001/stacks/{HANG}"
    running.storage.replace(f"{folder}/s0-h1.json", b"{}")
    running.storage.replace(f"{folder}/s0-h9.json", b"{}")
    running.write_stacks(1, HANG, evil)
    assert main(["stacks", running.url, "--attempt", "1"]) == 1
    out = capsys.readouterr().out
    assert "unreadable: " in out
    assert "s0-h1.json is damaged" in out
    assert "s0-h9" not in out
    assert "    in \\x1b[2Jwait ERROR\n" in out
    assert main(["stacks", running.url, "--attempt", "1", "--host", "s0-h0", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["groups"][0]["hosts"] == ["s0-h0"]
    assert document["groups"][0]["main_thread"][1] == "in main"


def test_a_run_that_is_not_running(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path)
    assert main(["stacks", run.url]) == 2
    assert "error: tiny is not running: it is created" in capsys.readouterr().err
    run.next_attempt(1.0, recipe=make_recipe(), hosts=["s0-h0"])
    run.write_stacks(1, HANG, _stacks("s0-h0", "a"))
    assert main(["stacks", run.url]) == 2
    assert "--attempt 1` shows what it did when it hung" in capsys.readouterr().err
    assert main(["stacks", run.url, "--attempt", "2"]) == 2
    assert "it has attempts 1 to 1" in capsys.readouterr().err


def test_between_two_attempts_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path)
    run.acquire(lease.this_process("test"), time.time())
    assert main(["stacks", run.url]) == 75
    assert "no attempt of tiny is under way" in capsys.readouterr().err


def test_traces_are_brought_once_when_they_are_complete(tmp_path: Path) -> None:
    folder, store = tmp_path / "profiles", open_storage(str(tmp_path / "run"))
    cargo = OnceCargo(folder, store, RunPath.PROFILES)
    cargo.ship(final=False)
    hidden, trace = folder / "attempt-0001/.step-00000003", folder / "attempt-0001/step-00000003"
    (hidden / "plugins/profile/x").mkdir(parents=True)
    (hidden / "plugins/profile/x/s0-h0.xplane.pb").write_bytes(b"\0\1")
    cargo.ship(final=True)
    assert store.list() == []
    os.rename(hidden, trace)
    cargo.ship(final=False)
    path = "profiles/attempt-0001/step-00000003/plugins/profile/x/s0-h0.xplane.pb"
    assert store.list() == [path]
    assert store.read(path) == b"\0\1"
    store.delete(path)
    cargo.ship(final=True)
    assert store.list() == []
