"""How hosts meet: the answers of process 0 as a table, waiting with a fake clock, and real sockets."""

from __future__ import annotations

import dataclasses
import socket
import threading
from collections.abc import Iterator

import pytest

from launcher.backends.local import free_port
from launcher.exits import HostEnd
from launcher.gang import (
    GATHER_TIMEOUT_S,
    Answer,
    Call,
    Gang,
    GangServer,
    NeverMet,
    RunOver,
    call,
    gather,
    join,
)

HOSTS = ("s0-h0", "s0-h1", "s1-h0", "s1-h1")
OTHERS = HOSTS[1:]


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def hello(host: str, *, pod: str = "a", incarnation: str = "i.0", attempt: int = 0) -> Call:
    return Call(incarnation=incarnation, host=host, pod=f"{host}-{pod}", attempt=attempt)


def farewell(host: str, attempt: int, *, pod: str = "a") -> Call:
    end = HostEnd(host=host, exit_code=75, reason=f"end of {attempt}", time_s=5.0)
    return dataclasses.replace(hello(host, pod=pod, attempt=attempt), end=end)


def gang_of(*here: str, attempt: int = 0) -> Gang:
    members = Gang("i.0", HOSTS, own="s0-h0")
    for host in here:
        members.answer(hello(host))
    if attempt:
        members.open(attempt)
    return members


@pytest.mark.parametrize(
    ("members", "caller", "attempt", "refused"),
    [
        (gang_of(), hello("s1-h0"), 0, ""),
        (gang_of(*OTHERS, attempt=7), hello("s1-h0"), 7, ""),
        (gang_of(), hello("s1-h0", incarnation="i.1"), 0, "another incarnation"),
        (gang_of(), hello("s9-h9"), 0, "s9-h9 is not one of"),
        (gang_of(), hello("s0-h0"), 0, "s0-h0 is not one of"),
        (gang_of(*OTHERS, attempt=7), hello("s1-h0", pod="b"), 0, "attempt 7 is under way without this pod"),
        (gang_of("s0-h1"), hello("s0-h1", pod="b"), 0, ""),
        # The hosts outlive the attempt: one is back before process 0 is, and is not sent into the old one.
        (gang_of(*OTHERS, attempt=7), hello("s1-h0", attempt=7), 0, ""),
        (gang_of(*OTHERS, attempt=7), hello("s1-h0", attempt=6), 7, ""),
        (gang_of(), hello("s1-h0", attempt=7), 0, ""),
        (gang_of(), hello("s1-h0", attempt=7, pod="rebooted"), 0, ""),
        (gang_of(*OTHERS, attempt=7), farewell("s1-h0", 7), 7, ""),
        (gang_of(*OTHERS, attempt=8), farewell("s1-h0", 7), 0, "attempt 7 is not under way"),
        (gang_of(*OTHERS), farewell("s1-h0", 7), 0, "attempt 7 is not under way"),
        (gang_of(*OTHERS, attempt=7), farewell("s1-h0", 7, pod="b"), 0, "attempt 7 is not under way"),
    ],
)
def test_answers(members: Gang, caller: Call, attempt: int, refused: str) -> None:
    answer = members.answer(caller)
    assert answer.attempt == attempt
    assert refused in answer.refused
    assert bool(refused) == bool(answer.refused)


def test_a_pod_that_was_replaced_before_the_attempt_counts_once() -> None:
    members = gang_of("s0-h1")
    members.answer(hello("s0-h1", pod="b"))
    assert members.missing() == ["s1-h0", "s1-h1"]
    members.open(3)
    assert members.answer(hello("s0-h1", pod="b")).attempt == 3
    assert members.answer(hello("s0-h1", pod="a")).refused


def test_an_end_counts_in_its_own_attempt_only() -> None:
    first = gang_of(*OTHERS, attempt=7)
    first.answer(farewell("s1-h0", 7))
    assert {host: end.reason for host, end in first.ends().items()} == {"s1-h0": "end of 7"}
    second = gang_of("s0-h1")
    second.answer(farewell("s1-h0", 7))
    assert (second.ends(), second.missing()) == ({}, ["s1-h0", "s1-h1"])
    second = gang_of(*OTHERS, attempt=8)
    second.answer(farewell("s1-h0", 7))
    assert second.ends() == {}


def test_hosts_meet_again_in_a_new_gang() -> None:
    """One is back, one was rebooted meanwhile, and one had not noticed the end of the attempt yet."""
    first = gang_of(*OTHERS, attempt=7)
    assert first.answer(hello("s0-h1", attempt=7)) == Answer()
    assert first.answer(hello("s1-h0", pod="rebooted")).refused
    second = gang_of()
    for caller in (hello("s0-h1", attempt=7), hello("s1-h0", pod="rebooted"), farewell("s1-h1", 7)):
        second.answer(caller)
    assert second.missing() == ["s1-h1"]
    second.answer(hello("s1-h1", attempt=7))
    second.open(8)
    assert second.answer(hello("s0-h1", attempt=7)).attempt == 8
    assert second.answer(hello("s1-h0", pod="rebooted")).attempt == 8
    assert second.answer(hello("s1-h0", pod="a", attempt=7)).refused


def test_everybody_is_told_that_it_is_over() -> None:
    members = gang_of(*OTHERS, attempt=7)
    members.end("5 attempts failed")
    assert members.untold() == 3
    assert members.answer(farewell("s1-h0", 7)).attempt == 7
    assert members.answer(hello("s1-h0", attempt=7)) == Answer(over="5 attempts failed")
    assert members.answer(hello("s1-h0", pod="b")) == Answer(over="5 attempts failed")
    assert members.untold() == 2
    assert list(members.ends()) == ["s1-h0"]


def test_gather_waits_for_everybody_and_says_for_whom() -> None:
    members, clock, said = gang_of("s0-h1"), Clock(), list[str]()

    def sleep(seconds: float) -> None:
        clock.sleep(seconds)
        if clock.now_s > 10:
            members.answer(hello("s1-h0"))
        if clock.now_s > 20:
            members.answer(hello("s1-h1"))

    assert gather(members, 4, stopping=lambda: False, say=said.append, monotonic=clock.monotonic, sleep=sleep)
    assert said == [
        "2 of 4 hosts are here; waiting for s1-h0, s1-h1",
        "3 of 4 hosts are here; waiting for s1-h1",
    ]


def test_gather_names_who_never_came() -> None:
    clock = Clock()
    with pytest.raises(NeverMet, match="s1-h0, s1-h1 did not come within 1800 s"):
        gather(
            gang_of("s0-h1"),
            4,
            stopping=lambda: False,
            say=lambda _: None,
            monotonic=clock.monotonic,
            sleep=clock.sleep,
        )
    assert clock.now_s == pytest.approx(GATHER_TIMEOUT_S, abs=1)


def test_a_stop_ends_the_wait_on_both_sides() -> None:
    assert not gather(gang_of(), 4, stopping=lambda: True, say=lambda _: None)
    assert join(lambda: Answer(attempt=1), 4, stopping=lambda: True, say=lambda _: None) == 0


def test_join_goes_on_through_refusals_and_silence() -> None:
    clock, said = Clock(), list[str]()
    answers: Iterator[OSError | Answer] = iter(
        [OSError("no route"), Answer(refused="not yet"), Answer(), Answer(), Answer(attempt=5)]
    )

    def ask() -> Answer:
        found = next(answers)
        if isinstance(found, OSError):
            raise found
        return found

    found = join(
        ask, 4, stopping=lambda: False, say=said.append, monotonic=clock.monotonic, sleep=clock.sleep
    )
    assert found == 5
    assert [line.partition(": ")[2] for line in said] == [
        "process 0 does not answer (no route)",
        "not yet",
        "the other hosts are not all here yet",
    ]


def test_join_passes_over_the_attempt_it_comes_from() -> None:
    clock, answers = Clock(), iter([Answer(attempt=4), Answer(attempt=4), Answer(), Answer(attempt=6)])
    found = join(
        lambda: next(answers),
        4,
        stopping=lambda: False,
        say=lambda _: None,
        after=4,
        monotonic=clock.monotonic,
        sleep=clock.sleep,
    )
    assert found == 6


def test_join_ends_with_the_run() -> None:
    with pytest.raises(RunOver, match="complete"):
        join(lambda: Answer(over="complete"), 4, stopping=lambda: False, say=lambda _: None)


def test_join_gives_up() -> None:
    clock = Clock()
    with pytest.raises(NeverMet, match="no attempt began within 1800 s"):
        join(
            Answer,
            4,
            stopping=lambda: False,
            say=lambda _: None,
            monotonic=clock.monotonic,
            sleep=clock.sleep,
        )


def test_many_hosts_ask_less_often() -> None:
    clock, asked = Clock(), list[float]()

    def ask() -> Answer:
        asked.append(clock.now_s)
        return Answer(attempt=1 if len(asked) == 3 else 0)

    join(
        ask,
        12_736,
        stopping=lambda: False,
        say=lambda _: None,
        monotonic=clock.monotonic,
        sleep=clock.sleep,
    )
    assert asked[1] - asked[0] == pytest.approx(12.736)


def test_over_sockets() -> None:
    members, port = gang_of(), free_port()
    server = GangServer(members, "127.0.0.1", port)
    server.start()
    found: dict[str, int] = {}

    def follow(host: str) -> None:
        ask = lambda: call("127.0.0.1", port, hello(host))  # noqa: E731
        found[host] = join(ask, 4, stopping=lambda: False, say=lambda _: None)

    threads = [threading.Thread(target=follow, args=(host,)) for host in OTHERS]
    for thread in threads:
        thread.start()
    assert gather(members, 4, stopping=lambda: False, say=lambda _: None)
    members.open(12)
    for thread in threads:
        thread.join(10)
    assert found == dict.fromkeys(OTHERS, 12)
    assert call("127.0.0.1", port, farewell("s1-h1", 12)).attempt == 12
    assert list(members.ends()) == ["s1-h1"]
    server.gang = gang_of()
    assert call("127.0.0.1", port, hello("s1-h1", attempt=12)) == Answer()
    server.gang.open(13)
    assert call("127.0.0.1", port, hello("s1-h1", attempt=12)).attempt == 13


@pytest.mark.parametrize(
    "line",
    [
        b"\n",
        b"{}\n",
        b"[1]\n",
        b'{"incarnation": 1}\n',
        b"\xff\xfe\n",
        b"x" * 40_000 + b"\n",
        b"GET / HTTP/1.1\r\n",
    ],
)
def test_a_stranger_changes_nothing(line: bytes) -> None:
    members, port = gang_of(), free_port()
    GangServer(members, "127.0.0.1", port).start()
    with socket.create_connection(("127.0.0.1", port), timeout=5) as stranger:
        stranger.sendall(line)
        reply = stranger.makefile("rb").readline()
    assert b'"attempt": 0' in reply or reply == b""
    assert members.missing() == list(OTHERS)
    assert call("127.0.0.1", port, hello("s1-h0")) == Answer()


def test_what_is_no_gang_is_an_os_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            connection.recv(4096)
            connection.sendall(b"SSH-2.0-OpenSSH\r\n")
            connection.close()

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(OSError, match="is damaged"):
            call("127.0.0.1", server.getsockname()[1], hello("s1-h0"))
        thread.join(5)


def test_a_port_in_use_is_reported() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        pytest.raises(OSError, match="address already in use"),
    ):
        GangServer(gang_of(), "127.0.0.1", server.getsockname()[1]).start()
