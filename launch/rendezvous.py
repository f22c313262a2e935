"""How the launchers of several machines meet: torch's c10d rendezvous, for machines that are all there from the start.

Two things are different. The store in which they meet is hosted on the machine that has the endpoint's address, not on
the one whose host name has it. And once all have met, no launcher asks the store again whether others wait to join:
none may, and a machine that lost the network would wait a quarter of an hour for the answer. Instead the launchers
watch each other, see `launch.liveness`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousParameters
from torch.distributed.elastic.rendezvous.api import rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

from launch.addresses import Endpoint, is_own
from launch.liveness import Liveness
from tp.errors import CommunicationError, LostPeerError

NAME = "tp-decoder-c10d"
"""Of this rendezvous in torch's registry."""
NO_HEARTBEATS_S = 10**8
"""Between two of torch's heartbeats, which nobody asks for; a thread that is in one as the process ends aborts it."""
PATIENCE_S = 5.0
"""How long ranks may still report an error of their own when another machine's launcher is gone."""
ANSWER_S = 10.0
"""How long a store on this machine may take to answer."""
CONNECT_S = 90.0
"""The same on another one, which may come up later; beyond torch's own 60 seconds."""


class FixedMachines(RendezvousHandler):
    """The rendezvous of machines that neither join nor leave: each meets the others once.

    Args:
        inner: torch's own.
        hosted: the store, where this process hosts it; it serves as long as it lives.
    """

    def __init__(self, inner: RendezvousHandler, hosted: TCPStore | None) -> None:
        self._inner = inner
        self._hosted = hosted
        self._liveness = Liveness()

    def next_rendezvous(self) -> RendezvousInfo:
        """Waits for the other machines, and watches them from then on."""
        met = self._inner.next_rendezvous()
        first = met.bootstrap_store_info
        assert first is not None
        watch = self._liveness.serve if met.rank == 0 else self._liveness.join
        watch(met.store, first.master_addr)
        return met

    @property
    def use_agent_store(self) -> bool:
        return self._inner.use_agent_store

    def get_backend(self) -> str:
        return NAME

    def get_run_id(self) -> str:
        return self._inner.get_run_id()

    def num_nodes_waiting(self) -> int:
        """None, ever. It is asked twenty times a second, while all ranks of this machine run.

        Raises:
            LostPeerError: another machine's launcher has been gone for `PATIENCE_S`.
        """
        if self._liveness.seconds_lost() > PATIENCE_S:
            raise LostPeerError("the launcher of another machine has ended; what it printed says why")
        return 0

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def shutdown(self) -> bool:
        return True


def registered() -> str:
    """The name by which torch's elastic launcher finds this rendezvous."""
    rendezvous_handler_registry.register(NAME, _create)
    return NAME


def _create(parameters: RendezvousParameters) -> RendezvousHandler:
    endpoint = Endpoint.of(parameters.endpoint)
    hosted = _hosted_store(endpoint)
    parameters.config.update(is_host=False, keep_alive_interval=NO_HEARTBEATS_S)
    patience_s = ANSWER_S if hosted is None and is_own(endpoint) else CONNECT_S
    backend, store = _within(patience_s, lambda: create_backend(parameters), endpoint)
    return FixedMachines(create_handler(store, backend, parameters), hosted)


def _within(seconds: float, connect: Callable[[], Any], endpoint: Endpoint) -> Any:
    """What `connect` gives. torch's waits for ever for a server that is none of its own and says nothing."""
    results: list[Any] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            results.append(connect())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise CommunicationError(
            f"what listens on --rdzv-endpoint {endpoint.host}:{endpoint.port} does not answer as a launcher does: "
            "is the port taken by another program?"
        )
    return results[0]


def _hosted_store(endpoint: Endpoint) -> Any:
    """The store, where the endpoint is on this machine and no other launcher of it, or other program, has the port."""
    if is_own(endpoint):
        with contextlib.suppress(RuntimeError):
            return TCPStore(endpoint.host, endpoint.port, is_master=True, wait_for_workers=False, multi_tenant=True)
    return None
