"""A socket that is passed on, and what is said to whoever passed it."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from lqs.config import Config
from lqs.errors import StartError
from lqs.parent import RESTART, SUCCESSOR, ask_restart, ask_successor, notify
from lqs.sockets import take_socket, with_address


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


def passed(**more: str) -> dict[str, str]:
    return {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1", "LISTEN_FDNAMES": "http"} | more


def test_a_socket_that_is_meant_for_this_process_is_taken(listening: socket.socket) -> None:
    environ = passed(OTHER="x")
    fd = os.dup(listening.fileno())
    with_it = take_socket(environ, fd)
    assert with_it is not None
    with with_it:
        assert with_it.getsockname() == listening.getsockname()
        assert not os.get_inheritable(fd)
        assert environ == {"OTHER": "x"}
        server = with_address(Config(), with_it).server
    assert (server.host, server.port) == listening.getsockname()


def test_one_that_is_meant_for_another_process_is_left_alone() -> None:
    environ = passed(LISTEN_PID="1")
    assert take_socket(environ) is None
    assert environ == {}
    assert take_socket({}) is None
    assert with_address(Config(), None) == Config()


def test_more_than_one_is_refused() -> None:
    with pytest.raises(StartError, match="one socket"):
        take_socket(passed(LISTEN_FDS="2"))


def test_what_does_not_listen_is_refused(listening: socket.socket) -> None:
    with socket.socket() as silent, pytest.raises(StartError, match="does not listen"):
        take_socket(passed(), os.dup(silent.fileno()))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other, pytest.raises(StartError, match="does not listen"):
        take_socket(passed(), os.dup(other.fileno()))
    closed = os.dup(listening.fileno())
    os.close(closed)
    with pytest.raises(StartError, match="Bad file descriptor"):
        take_socket(passed(), closed)


def test_readiness_is_told_to_a_path_and_to_an_abstract_address(tmp_path: object) -> None:
    for address in (f"{tmp_path}/notes", "\0lqs-test-notes"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notes:
            notes.bind(address)
            notify({"NOTIFY_SOCKET": address.replace("\0", "@")}, "READY=1")
            assert notes.recv(100) == b"READY=1"
    # Nobody listens, or nobody asked.
    notify({"NOTIFY_SOCKET": f"{tmp_path}/nobody"}, "READY=1")
    notify({}, "READY=1")


def test_only_a_supervisor_that_is_the_parent_is_asked_for_a_restart() -> None:
    parent = str(os.getppid())
    for environ in ({}, {"LQS_SUPERVISOR": parent + "0"}):
        assert "--supervise" in ask_restart(environ)
        assert ask_successor(environ) == "none"
    environ = {"LQS_SUPERVISOR": parent, "NOTIFY_SOCKET": "@lqs-test-asked"}
    assert ask_restart(environ) == "the supervisor does not answer"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notes, ThreadPoolExecutor(1) as pool:
        notes.bind("\0lqs-test-asked")
        for ask, question, answer in ((ask_restart, RESTART, ""), (ask_successor, SUCCESSOR, "failed: exit code 2")):
            told = pool.submit(ask, environ)
            said, sender = notes.recvfrom(100)
            assert said.decode() == question
            with (
                socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger,
                pytest.raises(OSError, match="permitted"),
            ):
                stranger.sendto(b"failed: a lie", sender)
            notes.sendto(answer.encode(), sender)
            assert told.result(10) == answer
