"""Metrics and health of a real broker: the content of a scrape after real mounts and refusals, and while the mounter is
stopped. Clients of the endpoint never delay callers.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
from typing import TYPE_CHECKING

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families as parse

from fusermount3_broker.front.http_endpoint import PLACES
from fusermount3_broker.front.metrics import REQUESTS
from fusermount3_proxy import wire
from tests.e2e.caller import call_in
from tests.e2e.conftest import RunBroker, containers, nothing_left, settle, wait_until
from tests.e2e.hostile import O_PATH, Client, check_service, in_private_namespace, mount, mount_request, unmount
from tests.lab.commands import CommandFailed
from tests.lab.images import BUSYBOX, image_tag

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.lab.broker import Broker

pytestmark = pytest.mark.e2e

MOUNTPOINT = "/home/user/mnt"
REQUESTS_TOTAL = "fusermount3_broker_requests_total"


class Endpoint:
    """The endpoint of a running broker, on a port or at the path of a Unix socket."""

    def __init__(self, broker: Broker, address: Path | int) -> None:
        self.broker = broker
        self.address = address

    def connect(self) -> socket.socket:
        if isinstance(self.address, int):
            return socket.create_connection(("127.0.0.1", self.address), timeout=20)
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(20)
        connection.connect(str(self.address))
        return connection

    def get(self, path: str) -> tuple[int, str]:
        """Return status and body."""
        with contextlib.closing(http.client.HTTPConnection("broker")) as client:
            client.sock = self.connect()
            client.request("GET", path)
            response = client.getresponse()
            return response.status, response.read().decode()

    def is_healthy(self) -> bool:
        """Return whether the broker says that it can serve a caller within its own patience."""
        return self.get("/healthz") == (200, "ok\n")

    def scrape(self) -> dict[tuple[str, ...], float]:
        """Return the samples by name and the values of their labels."""
        status, text = self.get("/metrics")
        assert status == 200
        samples = [sample for family in parse(text) for sample in family.samples]
        return {(sample.name, *sample.labels.values()): sample.value for sample in samples}

    def wait_for(self, expected: dict[tuple[str, ...], float]) -> dict[tuple[str, ...], float]:
        """Return the samples once these are among them; samples are up to a second old."""
        found: dict[tuple[str, ...], float] = {}

        def told() -> bool:
            found.update(self.scrape())
            return all(found.get(name) == value for name, value in expected.items())

        try:
            wait_until(told)
        except AssertionError:
            assert {name: found.get(name) for name in expected} == expected
        return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture
def at_a_port(run_broker: RunBroker) -> Endpoint:
    port = free_port()
    return Endpoint(run_broker(f'metrics = "127.0.0.1:{port}"'), port)


@pytest.fixture
def at_a_path(run_broker: RunBroker, tmp_path: Path) -> Endpoint:
    path = tmp_path / "made" / "metrics.sock"
    return Endpoint(run_broker(f'metrics = "{path}"'), path)


@pytest.fixture(params=["port", "path"])
def endpoint(request: pytest.FixtureRequest) -> Endpoint:
    found: Endpoint = request.getfixturevalue(f"at_a_{request.param}")
    return found


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory to mount on."""
    (tmp_path / "mnt").mkdir()
    return tmp_path / "mnt"


def test_what_containers_do_is_counted(endpoint: Endpoint) -> None:
    with containers(endpoint.broker) as start:
        container = start(image_tag(BUSYBOX), user="1000:1000")
        for _ in range(3):
            container.exec(["whoamifs", MOUNTPOINT])
            endpoint.wait_for({("fusermount3_broker_mounts", "live"): 1})
            container.exec(["fusermount3", "-u", MOUNTPOINT])
        assert call_in(container, ["fusermount3", "-o", "allow_other", "--", MOUNTPOINT]).status != 0
        assert container.exec(["fusermount3", "-u", MOUNTPOINT], check=False).returncode != 0
    found = endpoint.wait_for(
        {
            (REQUESTS_TOTAL, "mount", "mounted"): 3,
            (REQUESTS_TOTAL, "mount", "refused"): 1,
            (REQUESTS_TOTAL, "unmount", "unmounted"): 3,
            (REQUESTS_TOTAL, "unmount", "refused"): 1,
            (REQUESTS_TOTAL, "mount", "rolled_back"): 0,
            ("fusermount3_broker_request_duration_seconds_count", "mount"): 4,
            ("fusermount3_broker_request_duration_seconds_count", "unmount"): 4,
            ("fusermount3_broker_request_duration_seconds_bucket", "+Inf", "mount"): 4,
            ("fusermount3_broker_mounts", "live"): 0,
            ("fusermount3_broker_mounter_restarts_total",): 0,
        }
    )
    assert 0 < found["fusermount3_broker_request_duration_seconds_sum", "mount"] < 4 * 20
    front = endpoint.broker.status()["front"]
    assert found["process_resident_memory_bytes",] == pytest.approx(front["rss_bytes"], rel=0.2)
    status = endpoint.broker.status()
    for name in ("supervisor", "front", "mounter"):
        size = found["fusermount3_broker_process_resident_memory_bytes", name]
        assert size == pytest.approx(status[name]["rss_bytes"], rel=0.2)
    assert found["fusermount3_broker_process_cpu_seconds_total", "mounter"] > 0
    wait_until(endpoint.is_healthy)


def test_status_and_top_tell_the_same(at_a_path: Endpoint, place: Path) -> None:
    def body() -> None:
        device = mount(at_a_path.broker, place)
        found = at_a_path.wait_for({("fusermount3_broker_mounts", "live"): 1})
        status = at_a_path.broker.status()
        assert status["mount_states"] == {"live": 1, "dead": 0, "hung": 0}
        assert status["requests"] == {"mount mounted": 1}
        name = "fusermount3_broker_request_duration_seconds"
        histogram = status["latency"]["mount"]
        assert histogram["seconds"] == found[f"{name}_sum", "mount"]
        assert [count for _, count in histogram["buckets"]] == [
            value for (sample, *_), value in found.items() if sample == f"{name}_bucket"
        ]
        shown = [line.split() for line in at_a_path.broker.ask("top").splitlines()]
        assert ["live", str(place), "fuse"] in [[*line[1:2], *line[3:5]] for line in shown]
        assert ["mount", "mounted", "1"] in [line[:3] for line in shown]
        os.close(device)
        unmount(at_a_path.broker, place)

    in_private_namespace(body)


def test_hostile_callers_add_no_series(at_a_path: Endpoint, place: Path) -> None:
    """Every kind of malformed request is tried; the label values remain the same."""
    expected = {(operation, result.replace(" ", "_")) for operation, results in REQUESTS for result in results}

    def body() -> None:
        for number in range(40):
            options = b"subtype=chosen%d,fsname=chosen%d" % (number, number)
            os.close(mount(at_a_path.broker, place, options=options))
            unmount(at_a_path.broker, place)
            strange = [
                b"protocol=1-1\0operation=chosen%d\0" % number,
                b"protocol=1-1\0chosen%d=1\0" % number,
                b"chosen%d" % number,
                mount_request(place, b"chosen%d" % number),
                wire.encode_request(wire.ProceedRequest()),
            ]
            for record in strange:
                with Client(at_a_path.broker) as client:
                    client.send(record, *([os.open(place, O_PATH)] if b"operation=mount" in record else []))
                    client.refused()

    in_private_namespace(body)
    found = at_a_path.wait_for({(REQUESTS_TOTAL, "mount", "mounted"): 40, (REQUESTS_TOTAL, "request", "refused"): 160})
    assert {name[1:] for name in found if name[0] == REQUESTS_TOTAL} == expected
    assert "chosen" not in at_a_path.get("/metrics")[1]


@pytest.fixture
def stopped(endpoint: Endpoint) -> Iterator[list[psutil.Process]]:
    """The mounter and its children, which continue when the test has ended."""
    settle(endpoint.broker)
    mounter = psutil.Process(endpoint.broker.status()["mounter"]["pid"])
    processes = [mounter, *mounter.children()]
    yield processes
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGCONT)


def test_a_mounter_that_is_stopped_is_not_healthy_until_it_goes_on(
    endpoint: Endpoint, stopped: list[psutil.Process], place: Path
) -> None:
    wait_until(endpoint.is_healthy)
    settle(endpoint.broker)  # one of the children has answered and is replaced
    mounter = stopped[0]
    mounter.suspend()
    stopped[1:] = mounter.children()
    for child in stopped[1:]:
        child.suspend()
    problem = (503, "the mounter gave no answer within 1 s\n")
    wait_until(lambda: endpoint.get("/healthz") == problem)
    with pytest.raises(CommandFailed, match="Error: the mounter gave no answer within 1 s"):
        endpoint.broker.ask("health")
    before = endpoint.broker.status()["front"]["open_descriptors"]
    for _ in range(3):
        assert endpoint.get("/healthz") == problem
        assert endpoint.get("/metrics")[0] == 200, "what is measured is told all the same"
    assert endpoint.broker.status()["front"]["open_descriptors"] <= before + 2, "one question waits, not one for each"
    for process in stopped:
        process.resume()
    wait_until(endpoint.is_healthy)
    assert endpoint.broker.ask("health") == "ok\n"
    in_private_namespace(lambda: check_service(endpoint.broker, place))


def test_a_mounter_that_was_killed_is_started_again_and_counted(at_a_path: Endpoint) -> None:
    psutil.Process(at_a_path.broker.status()["mounter"]["pid"]).kill()
    wait_until(at_a_path.is_healthy)
    at_a_path.wait_for({("fusermount3_broker_mounter_restarts_total",): 1})


def test_clients_that_ask_forever_leave_nothing_and_let_callers_in(endpoint: Endpoint, place: Path) -> None:
    settle(endpoint.broker)
    with nothing_left(endpoint.broker), contextlib.ExitStack() as stack:
        for _ in range(2 * PLACES):
            stack.enter_context(endpoint.connect())  # sends nothing
            slow = stack.enter_context(endpoint.connect())
            slow.sendall(b"GET /metrics HTTP/1.1\r\nX: ")
            deaf = stack.enter_context(endpoint.connect())
            deaf.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        for _ in range(5):
            wait_until(endpoint.is_healthy)
            assert endpoint.get("/metrics")[0] == 200
        in_private_namespace(lambda: check_service(endpoint.broker, place))


def test_nothing_listens_unless_it_is_wanted(run_broker: RunBroker) -> None:
    broker = run_broker()
    family = [psutil.Process(broker.process.pid), *psutil.Process(broker.process.pid).children(recursive=True)]
    assert [connection for process in family for connection in process.net_connections("inet")] == []
    at = {str(connection.laddr) for process in family for connection in process.net_connections("unix")}
    assert at - {""} == {str(broker.socket), f"{broker.directory}/control/control.sock"}


def test_the_socket_is_roots_and_is_gone_with_the_broker(at_a_path: Endpoint) -> None:
    path = at_a_path.address
    assert not isinstance(path, int)
    assert (path.stat().st_mode & 0o7777, path.stat().st_uid) == (0o660, 0)
    at_a_path.broker.stop()
    assert not path.parent.exists()
    at_a_path.broker.start()
    wait_until(at_a_path.is_healthy)


def test_a_broker_that_ends_is_not_healthy_while_it_finishes(at_a_path: Endpoint, place: Path) -> None:
    supervisor = at_a_path.broker.process.pid

    def body() -> None:
        with Client(at_a_path.broker) as client:
            client.send(mount_request(place), os.open(place, O_PATH))
            assert client.reply() is not None
            os.kill(supervisor, signal.SIGTERM)
            wait_until(lambda: at_a_path.get("/healthz") == (503, "the broker is ending\n"), 5)

    in_private_namespace(body)
    assert at_a_path.broker.process.wait(30) == 0
    at_a_path.broker.start()
