"""The plugin's process, with the real gRPC client and with a fake front at the other end of the socket pair."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import grpc
import pytest
from google.protobuf.message import Message

from fusermount3_broker.csi import csi_pb2
from fusermount3_broker.csi.csi_pb2 import NodeServiceCapability, VolumeCapability
from fusermount3_broker.csi.plugin import Front, NoAnswer
from fusermount3_broker.messages import csi
from fusermount3_broker.messages.csi import Question
from fusermount3_proxy import __version__, wire

MessageT = TypeVar("MessageT", bound=Message)
TARGET = "/var/lib/kubelet/pods/0d4f6a2e-1/volumes/kubernetes.io~csi/data/mount"
#: Timeout in seconds, longer than anything here takes.
LONG = 30


class FakeFront:
    """The front's end of the socket pair: `asked` holds the questions, `answer` returns the reply to one."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(LONG)
        self.connection = connection
        self.asked: list[Question] = []
        self.answer: Callable[[Question], csi.Record | None] = lambda question: csi.Done(question.number)

    def hear(self) -> csi.Record:
        return csi.load(self.connection.recv(wire.MAX_MESSAGE))

    def say(self, record: csi.Record) -> None:
        self.connection.send(csi.dump(record))

    def hear_question(self) -> Question:
        question = self.hear()
        assert isinstance(question, Question)
        self.asked.append(question)
        return question

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Answer questions until the block ends."""
        end, ended = socket.socketpair()
        thread = threading.Thread(target=self._answer, args=(ended,))
        thread.start()
        try:
            yield
        finally:
            end.close()
            thread.join()
            ended.close()

    def _answer(self, ended: socket.socket) -> None:
        poll = select.poll()  # select(2) takes no descriptor above 1023
        for each in (self.connection, ended):
            poll.register(each, select.POLLIN)
        while ended.fileno() not in dict(poll.poll(1000 * LONG)):
            question = self.hear()
            if isinstance(question, Question):
                self.asked.append(question)
                if answer := self.answer(question):
                    self.say(answer)


class Plugin:
    """The plugin's process, which serves in `directory`."""

    def __init__(self, directory: Path) -> None:
        self.socket = directory / "csi.sock"
        self.log = directory / "log"
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.front = FakeFront(ours)
        self.theirs = theirs
        arguments = [
            str(theirs.fileno()),
            "json",
            f"unix://{self.socket}",
            "node-1",
            "fuse.example.org",
            "/var/lib/kubelet",
        ]
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-m", "fusermount3_broker.csi.plugin", *arguments],
                pass_fds=[theirs.fileno()],
                stderr=log,
            )

    def call(self, method: str, request: Message, response: type[MessageT], timeout: float = LONG) -> MessageT:
        """Call ``Node/NodePublishVolume``, for example. Raises grpc.RpcError."""
        with grpc.insecure_channel(f"unix://{self.socket}") as channel:
            call = channel.unary_unary(f"/csi.v1.{method}", type(request).SerializeToString, response.FromString)
            answer: MessageT = call(request, timeout=timeout)
            return answer

    def publish(self, volume_id: str = "csi-1", target: str = TARGET, timeout: float = LONG) -> None:
        capability = VolumeCapability(
            mount=VolumeCapability.MountVolume(), access_mode=VolumeCapability.AccessMode(mode="SINGLE_NODE_WRITER")
        )
        request = csi_pb2.NodePublishVolumeRequest(
            volume_id=volume_id, target_path=target, volume_capability=capability, secrets={"password": "hunter2"}
        )
        self.call("Node/NodePublishVolume", request, csi_pb2.NodePublishVolumeResponse, timeout)

    def records(self, message: str) -> list[dict[str, Any]]:
        """Return the log records whose event, or message without one, begins with `message`."""
        records = [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]
        return [record for record in records if record.get("event", record["message"]).startswith(message)]

    def hang_up(self) -> None:
        """Close the other end, as when both supervisor and front are gone."""
        self.theirs.close()
        self.front.connection.close()

    def end(self) -> None:
        self.hang_up()
        try:
            assert self.process.wait(LONG) == 0, self.log.read_text()
        finally:
            self.process.kill()
            self.process.wait()


@pytest.fixture
def plugin(tmp_path: Path) -> Iterator[Plugin]:
    plugin = Plugin(tmp_path)
    try:
        assert plugin.front.hear() == csi.Done(0)
        yield plugin
    finally:
        plugin.end()


def refusal(call: Callable[[], object]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    error: Any = caught.value
    return error.code(), error.details()


# Identity and node capabilities


def test_it_says_who_it_is(plugin: Plugin) -> None:
    info = plugin.call("Identity/GetPluginInfo", csi_pb2.GetPluginInfoRequest(), csi_pb2.GetPluginInfoResponse)
    assert (info.name, info.vendor_version) == ("fuse.example.org", __version__)
    capabilities = plugin.call(
        "Identity/GetPluginCapabilities",
        csi_pb2.GetPluginCapabilitiesRequest(),
        csi_pb2.GetPluginCapabilitiesResponse,
    )
    assert not capabilities.capabilities


def probe(plugin: Plugin) -> bool:
    """Return whether the plugin reports itself ready. Raises grpc.RpcError."""
    return plugin.call("Identity/Probe", csi_pb2.ProbeRequest(), csi_pb2.ProbeResponse).ready.value


def test_it_is_ready_if_the_front_is_well(plugin: Plugin) -> None:
    with plugin.front.answering():
        assert probe(plugin)
        plugin.front.answer = lambda question: csi.Refused(
            question.number, csi.FAILED_PRECONDITION, b"the mounter gave no answer within 1 s"
        )
        not_well = (grpc.StatusCode.FAILED_PRECONDITION, "the mounter gave no answer within 1 s")
        assert refusal(lambda: probe(plugin)) == not_well
    assert {type(question) for question in plugin.front.asked} == {csi.Probe}


def test_it_is_not_ready_without_a_front_and_says_so_in_time(plugin: Plugin) -> None:
    not_there = (grpc.StatusCode.FAILED_PRECONDITION, "the broker has not answered within 2 seconds")
    assert refusal(lambda: probe(plugin)) == not_there


def test_it_says_which_node_it_serves_and_what_it_can(plugin: Plugin) -> None:
    info = plugin.call("Node/NodeGetInfo", csi_pb2.NodeGetInfoRequest(), csi_pb2.NodeGetInfoResponse)
    assert info.node_id == "node-1"
    assert not info.HasField("accessible_topology")
    answer = plugin.call(
        "Node/NodeGetCapabilities", csi_pb2.NodeGetCapabilitiesRequest(), csi_pb2.NodeGetCapabilitiesResponse
    )
    name = NodeServiceCapability.RPC.Type.Name
    assert {name(each.rpc.type) for each in answer.capabilities} == {
        "GET_VOLUME_STATS",
        "VOLUME_CONDITION",
        "GET_VOLUME_HEALTH",
        "VOLUME_MOUNT_GROUP",
        "SINGLE_NODE_MULTI_WRITER",
    }


@pytest.mark.parametrize("service", csi_pb2.DESCRIPTOR.services_by_name.values(), ids=lambda service: service.name)
def test_every_method_that_is_declared_is_served(plugin: Plugin, service: Any) -> None:
    plugin.front.answer = lambda question: csi.Done(question.number)
    with plugin.front.answering():
        for method in service.methods:
            request, response = (getattr(csi_pb2, kind.name) for kind in (method.input_type, method.output_type))
            try:
                plugin.call(f"{service.name}/{method.name}", request(), response)
            except grpc.RpcError as error:
                assert "is missing" in str(error)


def test_other_methods_are_not_implemented(plugin: Plugin) -> None:
    for method in ("Node/NodeStageVolume", "Node/NodeExpandVolume", "Controller/CreateVolume"):
        code, _ = refusal(lambda: plugin.call(method, csi_pb2.ProbeRequest(), csi_pb2.ProbeResponse))  # noqa: B023
        assert code == grpc.StatusCode.UNIMPLEMENTED


# Asking the front


def test_it_asks_a_fake_front_and_tells_kubelet_that_it_is_done(plugin: Plugin) -> None:
    with plugin.front.answering():
        plugin.publish()
        unpublish = csi_pb2.NodeUnpublishVolumeRequest(volume_id="csi-1", target_path=TARGET)
        plugin.call("Node/NodeUnpublishVolume", unpublish, csi_pb2.NodeUnpublishVolumeResponse)
    published, unpublished = plugin.front.asked
    assert isinstance(published, csi.Publish)
    assert (published.id, published.pod) == (b"csi-1", b"0d4f6a2e-1")
    assert isinstance(unpublished, csi.Unpublish)
    assert unpublished.target == published.target
    assert 0 < published.number < unpublished.number


def test_a_refusal_of_a_fake_front_reaches_kubelet_and_is_its_to_log(plugin: Plugin) -> None:
    text = "fuse-csi-ephemeral.sock: something else is there"
    plugin.front.answer = lambda question: csi.Refused(question.number, csi.FAILED_PRECONDITION, text.encode())
    with plugin.front.answering():
        assert refusal(plugin.publish) == (grpc.StatusCode.FAILED_PRECONDITION, f"{text} (volume csi-1)")
    assert plugin.records("publish") == []


def test_what_is_wrong_is_refused_and_logged_without_asking(plugin: Plugin) -> None:
    text = "can't tell whose volume it is: neither the target path nor the CSIDriver's podInfoOnMount"
    code, details = refusal(lambda: plugin.publish(target="/var/lib/kubelet/elsewhere"))
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert details.startswith(text) and details.endswith("(volume csi-1)")
    (record,) = plugin.records("publish refused")
    assert (record["volume"], record["target"]) == ("csi-1", "/var/lib/kubelet/elsewhere")
    assert (record["code"], record["priority"]) == ("INVALID_ARGUMENT", 4)
    assert record["text"].startswith(text)
    assert plugin.front.hear() == csi.TurnedAway(b"publish"), "for the front to count; and nothing else"
    plugin.front.connection.setblocking(False)
    with pytest.raises(BlockingIOError):
        plugin.front.hear()


def test_secrets_go_nowhere(plugin: Plugin) -> None:
    with plugin.front.answering():
        plugin.publish()
        refusal(lambda: plugin.publish(target="/etc"))
    assert "hunter2" not in plugin.log.read_text()
    assert b"hunter2" not in csi.dump(plugin.front.asked[0])


def test_stats_of_a_fake_front_reach_kubelet(plugin: Plugin) -> None:
    plugin.front.answer = lambda question: csi.Stated(question.number, True, 100, 50, 40, 10, 5, b"")
    stat = csi_pb2.NodeGetVolumeStatsRequest(volume_id="csi-1", volume_path=TARGET)
    with plugin.front.answering():
        answer = plugin.call("Node/NodeGetVolumeStats", stat, csi_pb2.NodeGetVolumeStatsResponse)
    assert [usage.total for usage in answer.usage] == [100, 10]
    assert not answer.volume_condition.abnormal


def test_an_answer_to_something_else_is_an_error(plugin: Plugin) -> None:
    plugin.front.answer = lambda question: csi.Stated(question.number, True, 1, 1, 1, 1, 1, b"")
    with plugin.front.answering():
        code, _ = refusal(plugin.publish)
    assert code == grpc.StatusCode.INTERNAL


def test_many_requests_are_under_way_at_once(plugin: Plugin) -> None:
    """There are more than the kernel queues in an unread socket; the answers come in another order."""
    many = 100
    with ThreadPoolExecutor(many) as executor:
        calls = [executor.submit(plugin.publish, f"csi-{number}") for number in range(many)]
        questions = [plugin.front.hear_question() for _ in range(many)]
        ids = {question.number: question.id for question in questions if isinstance(question, csi.Publish)}
        assert {each.decode() for each in ids.values()} == {f"csi-{number}" for number in range(many)}
        assert not any(call.done() for call in calls)
        odd = {number for number, each in ids.items() if int(each[4:]) % 2}
        for question in reversed(questions):
            refused = csi.Refused(question.number, csi.NOT_FOUND, b"odd")
            plugin.front.say(refused if question.number in odd else csi.Done(question.number))
            time.sleep(0.001)  # the socket has room for ten
    assert [call.exception() is not None for call in calls] == [bool(number % 2) for number in range(many)]


# A front that fails


def test_a_request_that_a_fake_front_never_answers_ends_at_kubelets_deadline(plugin: Plugin) -> None:
    with ThreadPoolExecutor(1) as executor:
        call = executor.submit(refusal, lambda: plugin.publish(timeout=5))
        question = plugin.front.hear_question()
        code, _ = call.result(LONG)
    assert code == grpc.StatusCode.DEADLINE_EXCEEDED
    wait_until(lambda: plugin.records("publish given up by kubelet"))
    plugin.front.say(csi.Done(question.number))  # too late: kubelet has given up
    with plugin.front.answering():
        plugin.publish("csi-2")


def test_a_new_front_is_asked_again_what_the_last_one_did_not_answer(plugin: Plugin) -> None:
    with ThreadPoolExecutor(1) as executor:
        call = executor.submit(plugin.publish)
        question = plugin.front.hear_question()  # and the front dies
        plugin.front.say(csi.Done(0))
        assert plugin.front.hear_question() == question
        plugin.front.say(csi.Done(question.number))
        plugin.front.say(csi.Done(question.number))
        assert call.exception(LONG) is None


def test_a_question_that_is_never_answered_ends_by_itself() -> None:
    """kubelet waits longer than the plugin does; this test shortens the plugin's wait."""

    async def ask() -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs:
            front = Front(ours)
            with pytest.raises(NoAnswer, match=r"has not answered within 0\.1 seconds"):
                await front.ask(csi.Unpublish(0, b"csi-1", b"target"), patience=0.1)
            with suppress(BlockingIOError):
                while ours.send(b"x"):  # until the socket is full, and the question can't even be sent
                    pass
            with pytest.raises(NoAnswer):
                await front.ask(csi.Unpublish(0, b"csi-1", b"target"), patience=0.1)

    asyncio.run(ask())


def test_nonsense_of_a_fake_front_is_passed_over(plugin: Plugin) -> None:
    plugin.front.connection.send(b"nonsense")
    plugin.front.say(csi.Done(7))
    plugin.front.say(csi.Unpublish(8, b"", b""))
    with plugin.front.answering():
        plugin.publish()


def test_answers_to_the_last_plugin_are_not_taken_for_answers_to_this_one(tmp_path: Path) -> None:
    numbers = set()
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        plugin = Plugin(tmp_path / name)
        assert plugin.front.hear() == csi.Done(0)
        with plugin.front.answering():
            plugin.publish()
        numbers.add(plugin.front.asked[0].number)
        plugin.end()
    assert len(numbers) == 2


def test_a_request_ends_with_the_front(plugin: Plugin) -> None:
    with ThreadPoolExecutor(1) as executor:
        call = executor.submit(refusal, plugin.publish)
        plugin.front.hear_question()
        plugin.hang_up()
        assert call.result(LONG) == (grpc.StatusCode.UNAVAILABLE, "the broker has ended (volume csi-1)")


# The process


def test_only_its_owner_may_connect_to_the_socket_which_is_gone_at_the_end(plugin: Plugin) -> None:
    assert stat.S_IMODE(plugin.socket.stat().st_mode) == 0o600
    plugin.end()
    assert not plugin.socket.exists()


def test_a_stale_socket_is_replaced(tmp_path: Path) -> None:
    stale = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    stale.bind(bytes(tmp_path / "csi.sock"))
    stale.close()
    plugin = Plugin(tmp_path)
    assert plugin.front.hear() == csi.Done(0)
    with plugin.front.answering():
        plugin.publish()
    plugin.end()


def test_a_live_socket_stays(plugin: Plugin, tmp_path: Path) -> None:
    second = Plugin(tmp_path)
    assert second.process.wait(LONG) == 1
    second.hang_up()
    (record,) = plugin.records("the CSI plugin can't serve")
    assert "another broker listens there" in record["message"]
    with plugin.front.answering():
        plugin.publish()


def test_something_else_in_place_of_the_socket_stays(tmp_path: Path) -> None:
    (tmp_path / "csi.sock").write_text("precious")
    plugin = Plugin(tmp_path)
    assert plugin.process.wait(LONG) == 1
    plugin.hang_up()
    assert (tmp_path / "csi.sock").read_text() == "precious"
    (record,) = plugin.records("the CSI plugin can't serve")
    assert str(plugin.socket) in record["message"]


def test_it_has_no_privilege(plugin: Plugin) -> None:
    status = dict(line.split(":\t", 1) for line in Path(f"/proc/{plugin.process.pid}/status").read_text().splitlines())
    assert {status[name] for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")} == {"0" * 16}
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    if os.geteuid() == 0:
        assert status["CapBnd"] == "0" * 16


def test_signals_are_the_supervisors_business(plugin: Plugin) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        plugin.process.send_signal(number)
    with plugin.front.answering():
        plugin.publish()


def test_it_ends_with_its_supervisor(tmp_path: Path) -> None:
    """Even if another process holds the other end of the socket pair."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    plugin = [sys.executable, "-I", "-m", "fusermount3_broker.csi.plugin", str(theirs.fileno()), "json"]
    script = "import subprocess, sys; subprocess.run(sys.argv[2:], pass_fds=[int(sys.argv[1])])"
    with ours, theirs:
        ours.settimeout(LONG)
        supervisor = subprocess.Popen(
            [sys.executable, "-c", script, str(theirs.fileno()), *plugin, f"unix://{tmp_path}/s", "node", "a.b", "/k"],
            pass_fds=[theirs.fileno()],
            stderr=subprocess.DEVNULL,
        )
        try:
            assert csi.load(ours.recv(wire.MAX_MESSAGE)) == csi.Done(0)
            (child,) = Path(f"/proc/{supervisor.pid}/task/{supervisor.pid}/children").read_text().split()
        finally:
            supervisor.kill()
            supervisor.wait()
        wait_until(lambda: not is_running(int(child)))


def is_running(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def wait_until(true: Callable[[], object]) -> None:
    give_up = time.monotonic() + LONG
    while not true():
        assert time.monotonic() < give_up, "waited in vain"
        time.sleep(0.02)
