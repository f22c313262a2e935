"""Whether the launchers of all machines still run: each holds a connection to the first one, and it closes with them.

So a machine whose ranks wait for others that will never come, as they do while groups are made, need not wait for a
timeout. A launcher that goes closes its connections; the first one goes then too, and with it all. A network that is
down closes nothing: that is left to the timeouts of the collectives.
"""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

KEY = "tp-decoder/liveness"
POLL_S = 0.2
CONNECT_S = 30.0
"""How long a launcher looks for the first one's port. Where that is torchrun there is none, and nothing is watched."""


class Store(Protocol):
    """What is needed of torch's store."""

    def set(self, key: str, value: str) -> None: ...

    def check(self, keys: list[str]) -> bool: ...

    def get(self, key: str) -> bytes: ...


class Liveness:
    """The launchers of the other machines, as this one sees them. Its threads end with the process."""

    def __init__(self) -> None:
        self._lost_at: float | None = None

    def seconds_lost(self) -> float:
        """Since when the first of the others is gone; 0 while all are there."""
        return 0.0 if self._lost_at is None else time.monotonic() - self._lost_at

    def serve(self, store: Store, address: str) -> None:
        """On the first machine: waits for the others on a port of `address`."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        server = socket.create_server((address, 0), family=family)
        token = secrets.token_hex(16)
        store.set(KEY, f"{server.getsockname()[1]} {token}")
        _in_background(self._accept, server, token.encode())

    def join(self, store: Store, address: str) -> None:
        """On the other machines: connects to the first one, which has `address`."""
        _in_background(self._connect, store, address)

    def _accept(self, server: socket.socket, token: bytes) -> None:
        while True:
            connection, _ = server.accept()
            _in_background(self._hold, connection, token)

    def _hold(self, connection: socket.socket, token: bytes) -> None:
        with connection, suppress(OSError):
            connection.settimeout(CONNECT_S)
            if connection.recv(len(token), socket.MSG_WAITALL) != token:
                return  # a stranger
            self._wait_for_end(connection)

    def _connect(self, store: Store, address: str) -> None:
        deadline = time.monotonic() + CONNECT_S
        while not store.check([KEY]):
            if time.monotonic() > deadline:
                return
            time.sleep(POLL_S)
        port, token = store.get(KEY).decode().split()
        with suppress(OSError), socket.create_connection((address, int(port)), CONNECT_S) as connection:
            connection.sendall(token.encode())
            self._wait_for_end(connection)

    def _wait_for_end(self, connection: socket.socket) -> None:
        connection.settimeout(None)
        with suppress(OSError):
            connection.recv(1)  # nobody sends anything
        if self._lost_at is None:
            self._lost_at = time.monotonic()


def _in_background(action: Callable[..., None], *arguments: object) -> None:
    threading.Thread(target=action, args=arguments, daemon=True).start()
