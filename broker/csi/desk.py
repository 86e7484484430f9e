"""The front's end of the way to the CSI plugin: what the plugin asks is carried out (`publications`), and answered.

Each request is a task of its own. The way outlives both processes; so a new front says that it is there, and a plugin
that has no answer yet asks it again.
"""

import asyncio
import errno
import os
import socket

from broker import log
from broker.channel import Channel, HungUp
from broker.csi import requests
from broker.csi.requests import (
    ALREADY_EXISTS,
    FAILED_PRECONDITION,
    INTERNAL,
    INVALID_ARGUMENT,
    NOT_FOUND,
    UNAVAILABLE,
    Answer,
    Done,
    Probe,
    Publish,
    Question,
    Refused,
    Stat,
    Stated,
    TurnedAway,
    Unpublish,
)
from broker.front import Front
from broker.health import Health
from broker.options import Refusal
from broker.publications import Publications, PublishedOtherwise
from broker.volumes import Volume
from fusermount3_proxy.wire import ProtocolError

DEADLINE_EXCEEDED, RESOURCE_EXHAUSTED = 4, 8
#: What kubelet is told of the errno of a refusal, as far as that says who can do something about it.
_CODES = {
    errno.EINVAL: INVALID_ARGUMENT,
    errno.EAGAIN: UNAVAILABLE,
    errno.ETIMEDOUT: DEADLINE_EXCEEDED,
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EMFILE, errno.ENFILE), RESOURCE_EXHAUSTED),
    **dict.fromkeys((errno.ENOENT, errno.ENOTDIR, errno.EEXIST, errno.EBUSY), FAILED_PRECONDITION),
    **dict.fromkeys((errno.ELOOP, errno.EXDEV, errno.EPERM, errno.EACCES), FAILED_PRECONDITION),
}
#: What is the matter with a volume that has given no answer.
_TROUBLES = {
    errno.ENODATA: b"no FUSE program has mounted the volume yet",
    errno.ENOTCONN: b"the FUSE program of the volume is gone",
    errno.ETIMEDOUT: b"the FUSE program of the volume does not answer",
}
#: Of a text as much as an event of a pod shows.
_LONGEST_TEXT = 1024
_NOTHING_KNOWN = Stated(0, False, 0, 0, 0, 0, 0, b"")


class Desk:
    """Answers what is asked at the other end of `connection`."""

    def __init__(self, front: Front, publications: Publications, health: Health, connection: socket.socket) -> None:
        self._front = front
        self._publications = publications
        self._health = health
        self._channel = Channel(connection)
        self._sending = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Answer until nobody is there any more who could ask."""
        await self._say(Done(0))
        while True:
            try:
                request = requests.load(await self._channel.receive())
            except HungUp:
                return
            except ProtocolError as error:
                self._front.log(log.ERROR, f"the CSI plugin has said what is no request: {error.text}")
                continue
            if request == Done(0):
                self._front.log(log.INFO, "the CSI plugin serves")
            elif isinstance(request, TurnedAway):
                if request.operation in (b"publish", b"unpublish"):
                    self._front.requests[f"{request.operation.decode()} refused"] += 1
            elif isinstance(request, Question):
                task = asyncio.create_task(self._serve(request))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            else:
                self._front.log(log.ERROR, f"the CSI plugin has said what is no request: {type(request).__name__}")

    async def end(self, seconds: float) -> None:
        """Wait so long for what is under way; then leave it to the next front."""
        if self._tasks:
            _, remaining = await asyncio.wait(self._tasks, timeout=seconds)
            for task in remaining:
                task.cancel()
            await asyncio.gather(*remaining, return_exceptions=True)

    async def _serve(self, request: Question) -> None:
        try:
            answer: Answer = await self._answer(request)
        except PublishedOtherwise as refusal:
            answer = _refused(request.number, ALREADY_EXISTS, refusal)
        except Refusal as refusal:
            answer = _refused(request.number, _CODES.get(refusal.errno, INTERNAL), refusal)
        except Exception as error:
            self._front.log(log.ERROR, f"internal error: {error!r}")
            answer = Refused(request.number, INTERNAL, b"internal error of the broker")
        await self._say(answer)

    async def _answer(self, request: Question) -> Answer:
        """Raises Refusal."""
        if isinstance(request, Publish):
            await self._publications.publish(volume_of(request))
        elif isinstance(request, Unpublish):
            await self._publications.unpublish(request.target)
        elif isinstance(request, Probe):
            if problem := await self._health.problem():
                return Refused(request.number, FAILED_PRECONDITION, problem.encode())
        else:
            return await self._stat(request)
        return Done(request.number)

    async def _stat(self, request: Stat) -> Answer:
        """Answer for the target that is worst, if the request says none."""
        answer: Answer = Refused(request.number, NOT_FOUND, b"no volume is published there")
        for target in self._publications.targets_of(request.id):
            if request.target in (b"", target):
                answer = await self._stat_at(request._replace(target=target))
                if not isinstance(answer, Stated) or answer.trouble:
                    break
        return answer

    async def _stat_at(self, request: Stat) -> Answer:
        nothing = _NOTHING_KNOWN._replace(number=request.number)
        try:
            stated = await self._publications.stat(request.target)
        except Refusal as refusal:
            if refusal.errno == errno.ETIMEDOUT:
                return nothing._replace(trouble=_TROUBLES[errno.ETIMEDOUT])
            code = NOT_FOUND if refusal.errno == errno.ENOENT else INTERNAL
            return _refused(request.number, code, refusal)
        if not stated.published:
            return Refused(request.number, NOT_FOUND, b"no volume is published there")
        if not stated.served:
            return nothing._replace(trouble=_TROUBLES.get(stated.errno) or os.strerror(stated.errno).encode())
        return Stated(
            number=request.number,
            served=True,
            total_bytes=stated.total_bytes,
            free_bytes=stated.free_bytes,
            available_bytes=stated.available_bytes,
            total_inodes=stated.total_inodes,
            free_inodes=stated.free_inodes,
            trouble=b"",
        )

    async def _say(self, record: requests.Record) -> None:
        """Say it, as soon as there is room, if the plugin is there."""
        async with self._sending:
            try:
                await asyncio.get_running_loop().sock_sendall(self._channel.socket, requests.dump(record))
            except OSError as error:
                self._front.log(log.ERROR, f"the CSI plugin can't be told: {error}")


def volume_of(request: Publish) -> Volume:
    """Return the volume that is to be published."""
    fields = request._asdict()
    del fields["number"]
    return Volume(**{**fields, "pod": request.pod.decode("ascii", "replace")})


def _refused(number: int, code: requests.Code, refusal: Refusal) -> Refused:
    return Refused(number, code, refusal.text[:_LONGEST_TEXT])
