"""What another caller experiences while a container does harm to the broker, as `benchmarks.load` measures it."""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.bounds import SHIPPED, Report
from benchmarks.results import percentile
from benchmarks.sample import Sample, caller
from tests.e2e.mounting_script import MOUNT
from tests.lab.broker import Broker
from tests.lab.images import DEBIAN, image_tag
from tests.lab.podman import Container, Options, Volume

SOURCES = Path(__file__).parents[1]

#: The container's activities in turn. It may use half a processor, and can't be kept from using that, be it for system
#: calls that make a server on the host work: the broker is responsible for the additional effect of "does harm".
IDLE, COMPUTES, FLOODS_ANOTHER, HARMS = "is idle", "computes", "floods another server", "does harm"
#: In the container: the beginning of both scripts.
TURNS = f"""
def harm_to_do():
    with open("/work/turn") as turn:
        now = turn.read()
    if now in ({FLOODS_ANOTHER!r}, {HARMS!r}):
        return now
    if now == {COMPUTES!r}:
        sum(range(100_000))
    else:
        time.sleep(0.05)
"""

#: On the host: a server that does nothing for any client.
ANOTHER_SERVER = """
import signal, socket, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit())
listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
listener.bind(sys.argv[1])
listener.listen(16)
served = 0
try:
    while True:
        connection, _ = listener.accept()
        connection.close()
        served += 1
finally:
    print(served)
"""

#: In the container: a few processes that make as many requests as they can.
FLOOD = f"""
import os, socket, sys, time
{TURNS}
sys.path.insert(0, "/usr/lib/python3/dist-packages")
from fusermount3_proxy import wire

PATHS = {{{HARMS!r}: "/run/fusermount3-proxy/broker.sock", {FLOODS_ANOTHER!r}: "/work/another.sock"}}
os.makedirs("/tmp/mnt", exist_ok=True)
REQUEST = wire.encode_request(wire.MountRequest(mountpoint=b"/tmp/mnt", options=b"subtype=flood"))

def connect():
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(10)
    connection.connect(path)
    return connection

def half_open(_):
    open_ = [connect() for _ in range(8)]
    time.sleep(0.01)

def garbage(_):
    connect().send(b"garbage" * 1000)

def never_confirmed(mountpoint):
    connection = connect()
    socket.send_fds(connection, [REQUEST], [os.open(mountpoint, os.O_PATH)])
    _, descriptors, _, _ = socket.recv_fds(connection, 65536, 4)
    for each in descriptors:
        os.close(each)

for number, harm in enumerate((half_open, garbage, never_confirmed) * 4):
    if os.fork() == 0:
        break
mountpoint = "/tmp/mnt%d" % number
os.makedirs(mountpoint, exist_ok=True)
while True:
    path = PATHS.get(harm_to_do())
    if not path:
        continue
    try:
        harm(mountpoint)
    except OSError:
        pass
"""

#: In the container: holds filesystems that never answer, and makes the broker look at them.
HUNG = f"""{MOUNT}
import time
{TURNS}
held = []
for number in range(32):
    held.append(mount(b"mnt%d" % number))
    if os.fork() == 0:
        break
print("hung", flush=True)
while True:
    if not harm_to_do():
        continue
    try:
        mountpoint = b"/tmp/mnt%d" % number
        request = wire.MountRequest(mountpoint=mountpoint, options=b"subtype=over")
        client.ask(approach.DEFAULT_PATH, request, os.open(mountpoint, os.O_PATH)).connection.close()
    except Exception:
        pass
"""


@contextmanager
def harmful(broker: Broker, script: str, directory: Path) -> Iterator[Callable[[str], None]]:
    """Run `script` in a container that may use half a processor; yield the function that selects its activity."""
    volumes = [
        *broker.volumes(),
        Volume(SOURCES / "fusermount3_proxy", "/usr/lib/python3/dist-packages/fusermount3_proxy"),
        Volume(directory, "/work"),
    ]
    options = Options(volumes=volumes, extra=["--cpus", "0.5"])

    def turn(to: str) -> None:
        (directory / "turn").write_text(to)
        time.sleep(1)

    turn(IDLE)
    with Container(image_tag(DEBIAN), ["python3", "-c", script], options):
        time.sleep(1)
        try:
            yield turn
        finally:
            turn(IDLE)


@contextmanager
def another_server(path: Path) -> Iterator[None]:
    with subprocess.Popen([sys.executable, "-c", ANOTHER_SERVER, path], stdout=subprocess.PIPE) as server:
        try:
            yield
        finally:
            server.terminate()
            said, _ = server.communicate()
    assert int(said), "nobody has flooded it"


def neighbours(report: Report, arguments: argparse.Namespace) -> None:
    for name, script, turns, quiet in (
        ("floods the broker", FLOOD, (IDLE, COMPUTES, FLOODS_ANOTHER, HARMS), FLOODS_ANOTHER),
        ("holds 32 hung filesystems", HUNG, (IDLE, COMPUTES, HARMS), IDLE),
    ):
        samples = {each: Sample.empty() for each in turns}
        with tempfile.TemporaryDirectory() as temporary, Broker(SHIPPED) as broker:
            directory = Path(temporary)
            with ExitStack() as stack:
                if FLOODS_ANOTHER in turns:
                    stack.enter_context(another_server(directory / "another.sock"))
                turn = stack.enter_context(harmful(broker, script, directory))
                for _ in range(arguments.rounds):
                    for each, sample in samples.items():
                        turn(each)
                        sample.extend(phase(broker, directory))
        before = ", ".join(turns[:-1])
        report.title(f"Another caller, while a container {before}, {name} (in turn, {arguments.rounds} times)")
        for what in ("mount", "unmount"):
            beside = [getattr(sample, f"{what}s") for sample in samples.values()]
            if min(map(len, beside)) < 2:
                report.at_most(f"{what}: fewer than two calls were answered", 1, 0, "")
                continue
            for percent in (50, 99):
                figures = ", ".join(f"{percentile(each, percent):.1f}" for each in beside)
                report.say(f"{what}, p{percent}", f"{figures} ms")
            *references, harm = (percentile(each, 99) for each in beside)
            for each, reference in zip(turns, references, strict=False):
                ratio, text = harm / reference, f"{what}, p99 beside when it {each}"
                if each == quiet:
                    report.at_most(text, ratio, 2, "x")
                else:
                    report.say(text, f"{ratio:.2f} x")
        report.no_errors([error for sample in samples.values() for error in sample.errors])


def phase(broker: Broker, directory: Path) -> Sample:
    return caller(broker, directory / "other", time.monotonic() + 5, pause=0.04).result()
