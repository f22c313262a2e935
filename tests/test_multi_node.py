"""Several machines: how launchers find and lose each other, and what the benchmark of two nodes is made of."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.multi_node_parts.agreement import largest_difference
from benchmarks.multi_node_parts.collective_cases import CASES, added_s, added_to_step_s, decode_collectives, slope
from benchmarks.multi_node_parts.delay_line import DelayLine
from benchmarks.multi_node_parts.delays import CollectiveTimes, DecodeTimes, collective_growths, decode_growth
from benchmarks.multi_node_parts.networks import LOOPBACK, UnavailableError, network
from benchmarks.multi_node_parts.relay import Relay
from benchmarks.multi_node_parts.tables import print_results
from launch import addresses, failures, ranks
from launch.addresses import Endpoint, interface_of, is_own, own_address
from launch.failures import Failure
from launch.liveness import KEY, Liveness
from launch.measurement.spread import Spread
from launch.ranks import Placement, threads_a_rank
from tp.config import ModelConfig
from tp.errors import CommunicationError, LostPeerError, RequestError

ROOT = Path(__file__).resolve().parents[1]
EMBEDDED = ROOT / "launch" / "embedded_model"
ENDS_WITHIN_S = 10.0


def wait_for(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert condition()


@pytest.mark.parametrize(
    "text, endpoint",
    [
        ("node-0:1234", Endpoint("node-0", 1234)),
        ("10.0.0.1", Endpoint("10.0.0.1", 29400)),
        ("[fd00::1]:5", Endpoint("fd00::1", 5)),
    ],
)
def test_where_machines_meet(text, endpoint):
    assert Endpoint.of(text) == endpoint


@pytest.mark.parametrize("text", ["node:port", ":29400", "node:99999", "user@node:1", "node:1/path", ""])
def test_what_is_no_endpoint_is_refused(text):
    with pytest.raises(RequestError, match="--rdzv-endpoint .* is not HOST:PORT"):
        Endpoint.of(text)


def test_the_address_is_the_one_on_the_way_to_the_endpoint():
    assert own_address(Endpoint("127.0.0.5", 1)) == "127.0.0.1"
    assert own_address(Endpoint("localhost", 1)) in ("127.0.0.1", "::1")
    assert is_own(Endpoint("127.0.0.5", 1)) and not is_own(Endpoint("192.0.2.7", 1))
    assert interface_of("127.0.0.1") == interface_of("::1") == ("lo0" if sys.platform == "darwin" else "lo")
    assert interface_of("192.0.2.7") is None


def test_an_interface_is_found_by_either_kind_of_address(monkeypatch):
    if sys.platform != "linux":
        pytest.skip("interfaces are read on Linux only")
    assert ("lo", addresses.ipaddress.ip_address("127.0.0.1")) in list(addresses._interfaces())
    monkeypatch.setattr(Path, "read_text", lambda path: "fd000000000000000000000000000001 02 40 00 80  wire0\n")
    assert interface_of("fd00::1%wire0") == "wire0"


@pytest.fixture
def name_service(monkeypatch):
    """The addresses of "node", and the address that packets to others leave from."""
    known: dict[str, list[str]] = {}
    sources = {"127.0.1.1": "127.0.0.1"}

    def look_up(host, port, **options):
        if host not in known:
            raise socket.gaierror(-2, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in known[host]]

    monkeypatch.setattr(addresses.socket, "getaddrinfo", look_up)
    monkeypatch.setattr(addresses, "_source", sources.get)
    return SimpleNamespace(known=known, sources=sources)


def test_a_name_without_an_address_is_waited_for_then_refused(name_service):
    with pytest.raises(CommunicationError, match="the name node has no address on this machine"):
        Endpoint("node", 1).addresses(patience_s=0.0)
    looked_up = iter([OSError(), [(0, 0, 0, "", ("10.0.0.1", 1))]])

    def comes_late(*arguments, **options):
        answer = next(looked_up)
        if isinstance(answer, OSError):
            raise answer
        return answer

    addresses.socket.getaddrinfo = comes_late
    assert Endpoint("node", 1).addresses() == ["10.0.0.1"]


def test_an_own_name_that_is_a_loopback_address_gives_way_to_the_default_route(name_service):
    """As on Debian, where /etc/hosts has 127.0.1.1 for the machine's own name."""
    name_service.known["node"] = ["127.0.1.1"]
    with pytest.raises(CommunicationError, match="node is a loopback address on this machine"):
        own_address(Endpoint("node", 1))
    name_service.sources["192.0.2.1"] = "10.0.0.4"
    assert own_address(Endpoint("node", 1)) == "10.0.0.4"


def test_no_route_is_an_error(name_service):
    name_service.known["node"] = ["10.9.9.9"]
    with pytest.raises(CommunicationError, match="no route to --rdzv-endpoint node"):
        own_address(Endpoint("node", 1))


def test_ranks_use_the_interface_of_that_way_and_share_the_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(6), raising=False)
    monkeypatch.setattr(addresses, "own_address", lambda endpoint: f"address to {endpoint.host}")
    monkeypatch.setattr(addresses, "interface_of", {"address to far": "wire0", "mine": "wire1"}.get)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    far = Placement(4, nodes=2, rdzv_endpoint="far:1")
    found = ranks._environment(far, debug=False)
    assert (found["GLOO_SOCKET_IFNAME"], found["OMP_NUM_THREADS"]) == ("wire0", "1")
    given = Placement(3, nodes=2, rdzv_endpoint="far:1", local_addr="mine")
    assert ranks._environment(given, debug=False)["GLOO_SOCKET_IFNAME"] == "wire1"
    assert ranks._environment(given, debug=False)["OMP_NUM_THREADS"] == "2"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "chosen")
    assert ranks._environment(far, debug=False)["GLOO_SOCKET_IFNAME"] == "chosen"


@pytest.mark.parametrize("cores", [1, 2, 6, 7])
def test_ranks_never_have_more_threads_than_there_are_cores(monkeypatch, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(cores), raising=False)
    for ranks_here in range(1, cores + 1):
        assert 0 < threads_a_rank(ranks_here) * ranks_here <= cores
    assert threads_a_rank(cores + 1) == 1


GLOO = "[../third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [10.0.0.2]:4: Connection reset by peer"


def test_a_peer_that_is_gone_is_a_typed_error():
    """Of one line, without gloo's advice, and with the status of communication."""
    failure = Failure.of(1, RuntimeError(f"{GLOO}. This is typically caused by a remote worker hanging ..."))
    assert (failure.typed, failure.lost_peer, failure.exit_code) == (True, True, LostPeerError.exit_code)
    told = failure.story(4, together=False, debug=False)
    assert told.startswith("error: rank 1 of 4: the connection to another rank is lost") and told.count("\n") == 1
    assert told.endswith(": Read error [10.0.0.2]:4: Connection reset by peer\n")
    assert "RuntimeError" in failure.story(4, together=False, debug=True)
    assert failures.first([failure, Failure(2, status=-signal.SIGKILL)]).rank == 2


def test_errors_of_other_kinds_stay_as_they_are():
    for error in (ValueError("boom"), LostPeerError("rank 1 ended")):
        assert Failure.of(0, error).message.endswith(str(error))
    assert not Failure.of(0, ValueError("boom")).typed


class MemoryStore(dict):
    """A store of one process."""

    def set(self, key, value):
        self[key] = value.encode()

    def check(self, keys):
        return all(key in self for key in keys)


def test_a_launcher_that_goes_is_noticed_by_the_others():
    store, first, second = MemoryStore(), Liveness(), Liveness()
    first.serve(store, "127.0.0.1")
    port, token = store[KEY].decode().split()
    relayed = socket.create_server(("127.0.0.1", 0))  # stands for the first machine, and can be taken away
    store.set(KEY, f"{relayed.getsockname()[1]} {token}")
    second.join(store, "127.0.0.1")
    held, _ = relayed.accept()
    assert held.recv(len(token), socket.MSG_WAITALL) == token.encode()
    for greeting in (b"stranger", b""):
        with socket.create_connection(("127.0.0.1", int(port))) as stranger:
            stranger.sendall(greeting)
    member = socket.create_connection(("127.0.0.1", int(port)))
    member.sendall(token.encode())
    time.sleep(0.1)
    assert first.seconds_lost() == second.seconds_lost() == 0.0
    member.close()
    held.close()
    wait_for(lambda: first.seconds_lost() > 0 and second.seconds_lost() > 0)


def test_a_lost_machine_ends_the_run_after_a_time_for_better_reasons(monkeypatch):
    from launch import rendezvous

    machines = rendezvous.FixedMachines(SimpleNamespace(), None)
    assert machines.num_nodes_waiting() == 0
    for seconds, ends in ((rendezvous.PATIENCE_S / 2, False), (rendezvous.PATIENCE_S + 1, True)):
        monkeypatch.setattr(machines._liveness, "seconds_lost", lambda seconds=seconds: seconds)
        if ends:
            with pytest.raises(LostPeerError, match="the launcher of another machine has ended"):
                machines.num_nodes_waiting()
        else:
            assert machines.num_nodes_waiting() == 0


def test_frames_arrive_after_the_delay_in_their_order():
    line = DelayLine()
    line.delay_s = 2.0
    line.send(b"a", 10.0)
    line.send(b"b", 10.5)
    assert line.wait_s(11.0) == 1.0 and line.arrived(11.9) == []
    assert line.arrived(12.0) == [b"a"] and line.wait_s(13.0) == 0.0
    line.delay_s = 0.0
    line.send(b"c", 11.0)  # sent later over a shorter line: it does not overtake
    assert line.arrived(12.4) == [] and line.arrived(12.5) == [b"b", b"c"]
    assert line.wait_s(13.0) is None and (line.sent, line.lost) == (3, 0)


@pytest.mark.parametrize("loss", [0.0, 0.25, 1.0])
def test_the_share_of_frames_that_is_asked_for_is_lost(loss):
    line = DelayLine(seed=3)
    line.loss = loss
    for number in range(4000):
        line.send(bytes([number % 256]), 0.0)
    assert line.lost == pytest.approx(4000 * loss, abs=150)  # five standard deviations
    assert len(line.arrived(0.0)) == line.sent - line.lost


class Wire:
    """Stands for a TAP device: what is written at one end is read at the other."""

    def __init__(self):
        self.there, here = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        here.setblocking(False)
        self.there.settimeout(5.0)
        self._here = here
        self.file = here.fileno()

    def close(self):
        self._here.close()


def test_a_relay_carries_delays_and_loses():
    one, other = Wire(), Wire()
    relay = Relay(one, other)
    relay.set(0.05, 0.0)
    began = time.monotonic()
    one.there.send(b"there")
    assert other.there.recv(100) == b"there"
    other.there.send(b"back")
    assert one.there.recv(100) == b"back"
    assert time.monotonic() - began >= 0.1
    relay.set(0.0, 1.0)
    one.there.send(b"lost")
    wait_for(lambda: relay.frames() == (3, 1))
    relay.set(0.0, 0.0)
    one.there.send(b"last")
    assert other.there.recv(100) == b"last"
    relay.close()


def test_a_loopback_network_has_two_addresses_and_no_link():
    with network(LOOPBACK) as joined:
        assert [node.address for node in joined.nodes] == ["127.0.0.2", "127.0.0.3"]
        assert all(node.environment == {"TP_DECODER_DISABLE": "shared_memory"} for node in joined.nodes)
        with pytest.raises(UnavailableError):
            joined.set(0.001, 0.0)


def test_a_delay_costs_a_round_trip_for_each_step():
    """A small all-reduce takes one step, a large one two; a decode step of six layers 15 collectives."""
    assert [added_s(case.operation, case.nbytes, 0.003) for case in CASES] == pytest.approx([6e-3, 6e-3, 6e-3, 12e-3])
    config = ModelConfig.from_hf(json.loads((EMBEDDED / "config.json").read_text()))
    collectives = decode_collectives(config)
    assert sum(each.count for each in collectives) == 15
    assert added_to_step_s(collectives, 0.003) == pytest.approx(15 * 6e-3)


def collective_times(delay_s):
    """Of a link that costs exactly what the planner says."""
    spreads = {case.name: Spread.of([1e-3 + added_s(case.operation, case.nbytes, delay_s)]) for case in CASES}
    return CollectiveTimes(delay_s, 0.0, spreads, "OrderedCommunicator", ["a", "a", "b", "b"])


def decode_times(delay_s):
    """Of a link that costs half as much again."""
    return DecodeTimes(delay_s, 0.0, Spread.of([0.01 + 45 * delay_s]), 0.5)


def test_growth_is_the_slope_over_the_delays():
    delays = (0.0, 0.002, 0.007)
    found = [*collective_growths(list(map(collective_times, delays)))]
    found.append(decode_growth(list(map(decode_times, delays)), EMBEDDED))
    assert [growth.measured for growth in found] == pytest.approx([2.0, 2.0, 2.0, 4.0, 45.0])
    assert [growth.predicted for growth in found] == pytest.approx([2.0, 2.0, 2.0, 4.0, 30.0])
    assert [growth.steps for growth in found] == pytest.approx([1, 1, 1, 2, 15])
    assert found[-1].name == "decode step, 15 collectives"
    with pytest.raises(ValueError, match="two different delays"):
        slope([0.002, 0.002], [1.0, 2.0])


def test_differences_are_relative_to_the_reference():
    assert largest_difference([(2.0, 4.0), (1.0, 1.0)], [(2.0, 5.0), (1.0, 1.1)]) == pytest.approx(0.2)
    with pytest.raises(ValueError):
        largest_difference([(1.0, 1.0)], [])


def test_results_are_told(capsys):
    delays = (0.0, 0.002)
    collectives, decode = list(map(collective_times, delays)), list(map(decode_times, delays))
    links = {"collectives": list(map(asdict, collectives)), "decode": list(map(asdict, decode))}
    growths = list(map(asdict, [*collective_growths(collectives), decode_growth(decode, EMBEDDED)]))
    print_results(
        {
            "network": "relay",
            "about": "two namespaces",
            "agreement": {"new_ids": [1, 2], "same_ids": False, "bitwise": True, "largest_difference": 2e-16},
            "delays": {**links, "growths": growths},
            "window": {"segments": 400, "growths": growths},
            "loss": links,
            "ends": [
                {"what": "a rank is killed", "seconds": 1.25, "statuses": [6, 7], "last_lines": ["error: gone", ""]}
            ],
        }
    )
    told = capsys.readouterr().out
    for text in ("NOT those of one machine", "the same bits as", "45.00", "100.00 (100)", "is killed", "1.2", "6, 7"):
        assert text in told
    assert told.count("15 collectives") == 2 and "400 segments" in told


SCRIPT = """
import sys, time
from pathlib import Path
import torch
from tp.parallel import TensorParallelGroup

group = TensorParallelGroup.from_environment("gloo", "cpu")
total = group.communicator.all_reduce(torch.tensor([1.0 + group.rank]))
name = type(group.communicator).__name__
Path(sys.argv[1], f"rank-{group.rank}").write_text(f"{total.item():g} of {group.size} by {name}")
while len(sys.argv) > 2:
    group.communicator.all_reduce(total)
    time.sleep(0.02)
group.close()
"""


def two_launchers(directory, *arguments, ranks_here):
    """One on each of two loopback addresses, as if they were two machines."""
    script = directory / "script.py"
    script.write_text(SCRIPT)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        meeting = f"127.0.0.2:{probe.getsockname()[1]}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TP_DECODER_DISABLE": "shared_memory"}
    command = [sys.executable, "-m", "launch", "run", "--nproc", str(ranks_here), "--nnodes", "2"]
    return [
        subprocess.Popen(
            [*command, "--rdzv-endpoint", meeting, "--local-addr", address, str(script), str(directory), *arguments],
            cwd=ROOT, env=environment, text=True, stderr=subprocess.PIPE,
        )
        for address in ("127.0.0.2", "127.0.0.3")
    ]  # fmt: skip


def finish(launchers, timeout=60.0):
    try:
        return [(launcher.wait(timeout), launcher.stderr.read()) for launcher in launchers]
    finally:
        for launcher in launchers:
            launcher.kill()


def results(directory):
    return [path.read_text() for path in sorted(directory.glob("rank-*"))]


def _meet(group, endpoint):
    """Each rank of the pool as a launcher of its own."""
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    from launch.rendezvous import registered

    own = f"127.0.0.{2 + group.rank}"
    machines = get_rendezvous_handler(RendezvousParameters(registered(), endpoint, "run", 2, 2, local_addr=own))
    met = machines.next_rendezvous()
    met.store.set(f"from {met.rank}", own)
    others = met.store.get(f"from {1 - met.rank}").decode()
    group.communicator.all_gather_object(None)  # the store is on one of them
    return met.rank, met.world_size, met.bootstrap_store_info.master_addr, others, machines.num_nodes_waiting()


def test_launchers_meet_and_one_of_them_has_the_store(ranks):
    """Both have the address of the endpoint, and could."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.2:{probe.getsockname()[1]}"
    found = ranks(2).run(_meet, endpoint)
    assert found == [(0, 2, "127.0.0.2", "127.0.0.3", 0), (1, 2, "127.0.0.2", "127.0.0.2", 0)]


@pytest.mark.long
def test_two_launchers_meet_over_two_addresses(tmp_path):
    assert finish(two_launchers(tmp_path, ranks_here=1)) == [(0, ""), (0, "")]
    assert results(tmp_path) == ["3 of 2 by OrderedCommunicator"] * 2


@pytest.mark.long
def test_a_killed_launcher_ends_both_machines(tmp_path):
    """Four ranks; those of the killed one go with it, and the other launcher says what its ranks saw."""
    launchers = two_launchers(tmp_path, "forever", ranks_here=2)
    wait_for(lambda: results(tmp_path) == ["10 of 4 by OrderedCommunicator"] * 4, seconds=60.0)
    began = time.monotonic()
    launchers[1].kill()
    (status, told), (killed, _) = finish(launchers)
    assert time.monotonic() - began < ENDS_WITHIN_S
    assert (status, killed) == (CommunicationError.exit_code, -signal.SIGKILL)
    assert "the connection to another rank is lost" in told and told.count("\n") == 1


@pytest.mark.long
def test_two_nodes_of_two_ranks_give_the_tokens_and_gradients_of_one(tmp_path):
    """The benchmark's own check, over loopback addresses, which needs no rights."""
    target = tmp_path / "results.json"
    command = [sys.executable, "-m", "benchmarks.multi_node", "--network", LOOPBACK, "--parts", "agreement"]
    run = subprocess.run([*command, "--json", str(target)], cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert run.returncode == 0, run.stderr
    found = json.loads(target.read_text())["agreement"]
    assert found["holds"] and found["bitwise"] and len(found["new_ids"]) == 32
