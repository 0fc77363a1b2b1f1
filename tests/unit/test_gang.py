"""How hosts meet: the answers of process 0 as a table, waiting with a fake clock, and real sockets."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from launcher.backends.local import free_port
from launcher.exits import HostEnd
from launcher.gang import GATHER_TIMEOUT_S, Answer, Call, Gang, GangServer, NeverMet, call, gather, join

HOSTS = ("s0-h0", "s0-h1", "s1-h0", "s1-h1")
OTHERS = HOSTS[1:]


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def hello(host: str, *, pod: str = "a", incarnation: str = "i.0", end: HostEnd | None = None) -> Call:
    return Call(incarnation=incarnation, host=host, pod=f"{host}-{pod}", end=end)


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
    GangServer(members, "127.0.0.1", port).start()
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
    end = HostEnd(host="s1-h1", exit_code=1, reason="loss is NaN", time_s=5.0)
    assert call("127.0.0.1", port, hello("s1-h1", end=end)).attempt == 12
    assert members.ends() == {"s1-h1": end}


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
