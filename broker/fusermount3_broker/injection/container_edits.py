"""Container edits: what a container gets so that programs in it mount through the broker, whatever its image contains.

The static proxy covers each path at which libfuse and others start their helper, the broker's socket is where the proxy
looks for it, and /dev/fuse can be opened. `cdi` and `devices` express that for container engines and for kubelet. Pure:
this module reads and changes nothing on the host.
"""

from dataclasses import dataclass
from pathlib import Path, PurePosixPath

#: Where Debian's package puts the static executable on the host.
DEFAULT_PROXY = Path("/usr/bin/fusermount3-proxy")
#: Names under which callers look for their helper: libfuse 3, libfuse 2, and mergerfs, which has a libfuse of its own.
NAMES = ("fusermount3", "fusermount", "mergerfs-fusermount")
#: Paths that callers try before PATH. Where /bin is a link to usr/bin, two are one.
HELPERS = tuple(f"{directory}/{name}" for directory in ("/bin", "/usr/bin") for name in sorted(NAMES))
#: The proxy's default path of the broker's socket, as in fusermount3_proxy/approach.py.
SOCKET = PurePosixPath("/run/fusermount3-proxy/broker.sock")
SOCKET_VARIABLE = "FUSERMOUNT3PROXY_FDPASSING_SOCKPATH"
DEVICE = "/dev/fuse"
#: Callers only test that /dev/fuse can be opened, before they start their helper.
STAND_IN = "/dev/null"


class InjectionError(ValueError):
    """No container should get these paths; the message says why."""


@dataclass(frozen=True)
class Bind:
    """A file or directory of the host that appears at `target` in the container, read-only.

    The stand-in is read-only, too: as a device it can be written to all the same, but the container's root can't change
    the mode and owner of the host's /dev/null.
    """

    source: str
    target: str


@dataclass(frozen=True)
class Injection:
    """What the container gets; `devices` are device nodes of the host that it gets under the same path, to read and
    write.
    """

    binds: tuple[Bind, ...]
    environment: dict[str, str]
    devices: tuple[str, ...]


def injection(proxy: Path, socket: Path, *, device_node: bool = False) -> Injection:
    """Return what a container gets from a host with the static executable and the broker's socket at these paths.

    `device_node`: the real /dev/fuse instead of a stand-in, for clone_fd of libfuse. Raises InjectionError.
    """
    for path in (proxy, socket):
        if not path.is_absolute() or ".." in path.parts:
            raise InjectionError(f"{path}: must be an absolute path without ..")
    if len(socket.parts) < 4:
        raise InjectionError(f"{socket}: containers would see all of {socket.parent}, it needs its own directory")
    # The directory, not the socket: a restarted broker makes a new socket in it.
    binds = [Bind(str(socket.parent), str(SOCKET.parent))]
    binds += [Bind(str(proxy), helper) for helper in HELPERS]
    if not device_node:
        binds.append(Bind(STAND_IN, DEVICE))
    in_container = SOCKET.with_name(socket.name)
    environment = {} if in_container == SOCKET else {SOCKET_VARIABLE: str(in_container)}
    return Injection(tuple(binds), environment, (DEVICE,) if device_node else ())
