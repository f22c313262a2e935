"""The address and the network interface by which other machines reach this one.

torch takes both from this machine's host name, which often has no address, or a loopback one. Here they are those of
the way to where the machines meet: the one way that must be open. No packet is sent to find it.
"""

from __future__ import annotations

import ipaddress
import socket
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from tp.errors import CommunicationError, RequestError

DEFAULT_PORT = 29400
"""torch's, where the endpoint names none."""
PATIENCE_S = 60.0
"""How long a name may have no address yet: where machines start together, their names do so too."""
LOOPBACK_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"
_ELSEWHERE = ("192.0.2.1", "2001:db8::1")
"""Addresses that nobody has (RFC 5737, RFC 3849): the way to them is the default route."""
_SIOCGIFADDR = 0x8915
"""Linux: the IPv4 address of an interface."""


@dataclass(frozen=True)
class Endpoint:
    """HOST:PORT, where machines meet."""

    host: str
    port: int

    @classmethod
    def of(cls, text: str) -> Endpoint:
        """HOST, HOST:PORT, or with an IPv6 address [HOST]:PORT.

        Raises:
            RequestError: anything else.
        """
        with suppress(ValueError):
            parts = urlsplit(f"//{text}")
            if parts.hostname and parts.netloc == text and parts.username is None:
                return cls(parts.hostname, DEFAULT_PORT if parts.port is None else parts.port)
        raise RequestError(f"--rdzv-endpoint {text!r} is not HOST:PORT, such as node-0:29400 or [fd00::1]:29400")

    def addresses(self, patience_s: float = PATIENCE_S) -> list[str]:
        """The host's addresses, best first. That they are waited for is told on stderr.

        Raises:
            CommunicationError: it has none within `patience_s`.
        """
        deadline = time.monotonic() + patience_s
        announced = False
        while True:
            try:
                found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
                return [str(address[0]) for *_, address in found]
            except OSError as error:
                if time.monotonic() > deadline:
                    raise CommunicationError(
                        f"--rdzv-endpoint: the name {self.host} has no address on this machine ({error.strerror}); "
                        "give an address, or mend the name service or /etc/hosts"
                    ) from error
                if not announced:
                    print(f"waiting up to {patience_s:g} s for an address of {self.host}", file=sys.stderr)
                    announced = True
            time.sleep(0.5)


def own_address(endpoint: Endpoint) -> str:
    """This machine's address on the way to `endpoint`.

    A loopback address only where the endpoint is given as one. A machine may know its own name as one (Debian's
    127.0.1.1): then it is the address of the default route.

    Raises:
        CommunicationError: no address of `endpoint` can be reached, or only over loopback.
    """
    ways = [_source(address) for address in endpoint.addresses()]
    found = [way for way in ways if way is not None]
    if not found:
        raise CommunicationError(
            f"this machine has no route to --rdzv-endpoint {endpoint.host}: is its network up, the address right?"
        )
    if not _is_loopback(found[0]) or endpoint.host == "localhost" or _is_loopback(endpoint.host):
        return found[0]
    default_routes = [_source(address) for address in _ELSEWHERE]
    for way in [*found, *default_routes]:
        if way is not None and not _is_loopback(way):
            return way
    raise CommunicationError(
        f"--rdzv-endpoint: the name {endpoint.host} is a loopback address on this machine, which others cannot reach; "
        "give the address by which they do"
    )


def check_own(address: str) -> None:
    """Refuses an address at which nobody would reach this machine: its ranks would wait for one another without end.

    Raises:
        RequestError: naming it.
    """
    if not _can_be_bound(address):
        raise RequestError(f"--local-addr {address} is no address of this machine: name one that it has")


def is_own(endpoint: Endpoint) -> bool:
    """Whether the endpoint's host is this machine: one of its addresses can be bound here."""
    return any(map(_can_be_bound, endpoint.addresses()))


def interface_of(address: str) -> str | None:
    """The network interface that has the address; None where the system does not tell."""
    if _is_loopback(address):
        return LOOPBACK_INTERFACE
    wanted = ipaddress.ip_address(address.partition("%")[0])  # a link-local one may be followed by its interface
    return next((name for name, own in _interfaces() if own == wanted), None)


def _source(address: str) -> str | None:
    """The address that a packet to `address` would leave from."""
    with socket.socket(_family(address), socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect((address, 9))
        return str(probe.getsockname()[0])
    return None


def _can_be_bound(address: str) -> bool:
    with socket.socket(_family(address), socket.SOCK_STREAM) as probe, suppress(OSError):
        probe.bind((address, 0))
        return True
    return False


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _is_loopback(host: str) -> bool:
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False


def _interfaces() -> Iterator[tuple[str, ipaddress.IPv4Address | ipaddress.IPv6Address]]:
    """Interfaces with their addresses, on Linux."""
    if sys.platform != "linux":
        return
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no IPv4 address
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                yield name, ipaddress.IPv4Address(answer[20:24])
    with suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, *_, name = line.split()
            yield name, ipaddress.IPv6Address(bytes.fromhex(digits))
