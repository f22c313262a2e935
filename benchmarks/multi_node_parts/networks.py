"""Two nodes on one machine, and what joins them."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Protocol

from benchmarks.multi_node_parts.relay import Relay, Tap
from tp.choice import DISABLE_VARIABLE
from tp.errors import RequestError
from tp.parallel.shared_segment import NAME as SHARED_MEMORY

KINDS = {
    "netem": "two network namespaces, a veth pair, and the kernel's netem for delay and loss",
    "relay": "two network namespaces with a TAP device each; this program carries, delays and loses their frames",
    "loopback": "no namespaces: two addresses of the loopback interface, without delay or loss",
}
"""What a machine may allow, best first."""
LOOPBACK = "loopback"
OWN_WINDOW = 10
"""Segments that Linux's TCP sends on a connection before it has heard anything."""
_AS_A_MACHINE = 'hostname "$0" && mount -t tmpfs none /dev/shm && "$@"; exit $?'


@dataclass(frozen=True)
class Node:
    """One of the two.

    Attributes:
        name: its host name.
        address: its address on the link.
        prefix: what a command line begins with, to run on it.
        environment: variables of its processes.
        options: of our launcher, besides where to meet.
    """

    name: str
    address: str
    prefix: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ()


class Network(Protocol):
    """Two nodes and their link.

    Attributes:
        kind: one of `KINDS`.
        nodes: the two; the first has the address where the machines meet.
    """

    kind: str
    nodes: tuple[Node, Node]

    def set(self, delay_s: float, loss: float) -> None:
        """Delays packets by `delay_s` each way, and loses a share of them; nobody is told where it loses all."""

    def open_window(self, segments: int) -> None:
        """How many segments the nodes' TCP connections send at first, and after a pause, without an answer."""


class UnavailableError(RequestError):
    """This machine does not allow this kind of network."""


@contextlib.contextmanager
def network(kind: str) -> Iterator[Network]:
    """A network of the kind; with "auto" the first of `KINDS` that the machine allows.

    Raises:
        UnavailableError: it does not allow it.
    """
    with ExitStack() as undo:
        yield _first_available(undo) if kind == "auto" else _MAKERS[kind](undo)


def _first_available(undo: ExitStack) -> Network:
    for kind in KINDS:
        attempt = ExitStack()
        try:
            made = _MAKERS[kind](attempt)
        except UnavailableError:
            attempt.close()
            continue
        undo.push(attempt)
        return made
    raise AssertionError("loopback is always there")


class _Namespaces:
    """Two nodes with networks, host names, process ids, IPC and /dev/shm of their own; subclasses join them."""

    def __init__(self, undo: ExitStack) -> None:
        self.nodes = _namespaces(undo)
        self.devices = [f"tp{os.getpid()}{end}" for end in "ab"]

    def attach(self) -> None:
        """Moves the devices, which are there by now, to their nodes."""
        for device, node in zip(self.devices, self.nodes, strict=True):
            _ip("link", "set", device, "netns", node.name)
            _ip("-n", node.name, "address", "add", f"{node.address}/24", "dev", device)
            _ip("-n", node.name, "link", "set", device, "up")

    def open_window(self, segments: int) -> None:
        for device, node in zip(self.devices, self.nodes, strict=True):
            windows = ["initcwnd", str(segments), "initrwnd", str(segments)]
            _ip("-n", node.name, "route", "replace", "10.77.0.0/24", "dev", device, *windows)


class _Netem(_Namespaces):
    kind = "netem"

    def __init__(self, undo: ExitStack) -> None:
        super().__init__(undo)
        one, other = self.devices
        _ip("link", "add", one, "type", "veth", "peer", "name", other)
        self.attach()
        self.set(0.0, 0.0)

    def set(self, delay_s: float, loss: float) -> None:
        for device, node in zip(self.devices, self.nodes, strict=True):
            quality = ["netem", "delay", f"{delay_s * 1e6:.0f}us", "loss", f"{100 * loss:g}%", "limit", "100000"]
            _run("tc", "-n", node.name, "qdisc", "replace", "dev", device, "root", *quality)


class _Relayed(_Namespaces):
    kind = "relay"

    def __init__(self, undo: ExitStack) -> None:
        super().__init__(undo)
        try:
            taps = [Tap(device) for device in self.devices]
        except OSError as error:
            raise UnavailableError(f"no TAP device can be made: {error.strerror}") from error
        self._relay = Relay(*taps)
        undo.callback(self._relay.close)
        self.attach()

    def set(self, delay_s: float, loss: float) -> None:
        self._relay.set(delay_s, loss)


class _Loopback:
    kind = "loopback"

    def __init__(self, undo: ExitStack) -> None:
        del undo
        over_gloo = {DISABLE_VARIABLE: SHARED_MEMORY}  # two machines would have no memory in common
        addresses = ("127.0.0.2", "127.0.0.3")
        one, other = (Node(a, a, environment=over_gloo, options=("--local-addr", a)) for a in addresses)
        self.nodes = (one, other)

    def set(self, delay_s: float, loss: float) -> None:
        if delay_s or loss:
            raise UnavailableError("the loopback interface neither delays nor loses packets")

    def open_window(self, segments: int) -> None:
        raise UnavailableError("the loopback interface serves more than this program")


_MAKERS = {"netem": _Netem, "relay": _Relayed, "loopback": _Loopback}


def _namespaces(undo: ExitStack) -> tuple[Node, Node]:
    for program in ("ip", "tc", "unshare"):
        if shutil.which(program) is None:
            raise UnavailableError(f"there is no program {program} (iproute2, util-linux)")
    nodes = []
    for number, end in enumerate("ab", 1):
        name = f"tp-{os.getpid()}-{end}"
        _ip("netns", "add", name)
        undo.callback(_ip, "netns", "del", name)
        _ip("-n", name, "link", "set", "lo", "up")
        unshare = "unshare --uts --ipc --mount --pid --fork --kill-child --mount-proc sh -c".split()
        prefix = ("ip", "netns", "exec", name, *unshare, _AS_A_MACHINE, name)
        nodes.append(Node(name, f"10.77.0.{number}", prefix))
    one, other = nodes
    _run(*one.prefix, "true")
    return one, other


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise UnavailableError(f"{' '.join(command)}: {done.stderr.strip()}")
