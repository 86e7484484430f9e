"""The account of a caller: an input is a name that a container, a service or a user may give to cgroups it creates."""

from __future__ import annotations

from fusermount3_broker.front.decisions.limits import account_of, pod_of

_ID = b"0123456789abcdef" * 4
WORDS = [
    *(b"\r0::/docker/" + _ID, b"/docker-" + _ID + b".scope", b"/user.slice/user-7.slice", b"/machine.slice/x"),
    *(b"/kubepods/besteffort/pod3f2c8b1e-5f0a-4f4e-9d7e-0d9c1f6a2b3d", b"/kubepods-pod01234567.slice", b"/burstable"),
    *(b"/lxc/x", b"/lxc.payload.x", b"/x.service", b"/../..", b" (deleted)", b":"),
]
SEEDS: list[bytes] = []

#: The account's own cgroup, below which it creates cgroups, and the caller's uid.
_PAYERS = [
    (b"/machine.slice/libpod-%b.scope" % _ID, 0),
    (b"/docker/%b" % _ID, 1000),
    (b"/kubepods/besteffort/pod3f2c8b1e-5f0a-4f4e-9d7e-0d9c1f6a2b3c", 7),
    (b"/lxc.payload.web", 0),
    (b"/user.slice/user-1000.slice/user@1000.service", 1000),
]


def check(data: bytes) -> None:
    """Check that no name changes the account or the pod, or adds a pod, and that every process has an account."""
    name = data.replace(b"\n", b"").replace(b"\0", b"")  # no cgroup has these in its name
    for path, uid in _PAYERS:
        account = account_of(b"0::%b\n" % path, uid)
        assert account_of(b"0::%b/%b\n" % (path, name), uid) == account
        assert pod_of(b"0::%b/%b\n" % (path, name)) == pod_of(b"0::%b\n" % path)
        assert account_of(b"12:pids:%b/%b\n1:name=systemd:%b\n0::/%b\n" % (path, name, path, name), uid) == account
    assert account_of(data, len(data))
    assert not pod_of(b"0::/system.slice/web.service/%b\n" % name)
    pod_of(data)
    service = account_of(b"0::/system.slice/web.service/%b\n" % name, 7)
    assert service == "uid 7 in /system.slice/web.service" or service.startswith("container /system.slice/web.service/")
