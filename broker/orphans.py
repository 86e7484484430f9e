"""Mounts whose front was killed before it had written them down: the mounter's child kept them, and says so here.

The socket is the supervisor's, and outlives both sides: what a child says waits there for the next front. It says so
before it lets go of its caller; so what is said by the time that somebody comes is all that they can know of.
"""

import asyncio
import time

from broker import log, plan
from broker.front import Front
from broker.peer import account_of_process, command_of
from broker.registry import Device, Mount, MountNamespace
from fusermount3_proxy import wire


def expect(front: Front) -> None:
    """Have the running event loop write down what comes."""
    asyncio.get_running_loop().add_reader(front.mounter.orphans, _receive, front)


def _receive(front: Front) -> None:
    if not adopt_waiting(front):
        asyncio.get_running_loop().remove_reader(front.mounter.orphans)


def adopt_waiting(front: Front) -> bool:
    """Write down what has been said by now; whether more may come."""
    while True:
        try:
            record = plan.load(front.mounter.orphans.recv(wire.MAX_MESSAGE))
        except BlockingIOError:
            return True
        except (OSError, wire.ProtocolError):  # the end is an empty record, which is none
            return False
        if isinstance(record, plan.Orphaned):
            adopt(front, record)


def adopt(front: Front, orphan: plan.Orphaned) -> None:
    """Write an orphaned mount down, unless that was done. What its caller called the mountpoint is not known."""
    device = Device(orphan.device)
    request = orphan.request.decode("ascii", "replace")
    known = front.registry.find(device)
    if known and not (known.awaits_program and known.volume == orphan.target):
        return  # it is written down, or gone, and this is a later one of its number
    account, container = account_of_process(orphan.pid, orphan.uid, front.open_proc)
    front.registry.add(
        Mount(
            device=device,
            connection=front.registry.connection(device),
            namespace=MountNamespace(orphan.mount_namespace),
            uid=orphan.uid,
            pid=orphan.pid,
            command=command_of(orphan.pid, front.open_proc),
            container=container,
            account=account,
            mountpoint=b"",
            type=plan.filesystem_type(orphan.subtype),
            source=orphan.source,
            mounted_at=time.time(),
            request=request,
            volume=orphan.target,
            mount_id=orphan.mount_id,
        )
    )
    front.log(log.NOTICE, "adopted a mount whose front was killed", request_id=request, device=device)
