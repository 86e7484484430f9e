"""The front's end of the connection to the CSI plugin: carries out its requests (`published_volumes`) and answers.

Each request is a task of its own. The connection outlives both processes, so a new front announces itself, and the
plugin then repeats the requests that are still unanswered.
"""

import asyncio
import errno
import os
import socket

from fusermount3_broker.front.context import Front
from fusermount3_broker.front.health import Health
from fusermount3_broker.front.model import Volume
from fusermount3_broker.front.published_volumes import Publications, PublishedOtherwise
from fusermount3_broker.kernel import error_texts
from fusermount3_broker.messages import csi
from fusermount3_broker.messages.csi import (
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
from fusermount3_broker.messages.refusal import Refusal
from fusermount3_broker.service import log
from fusermount3_broker.service.channel import Channel, HungUp
from fusermount3_proxy.wire import ProtocolError

DEADLINE_EXCEEDED, RESOURCE_EXHAUSTED = 4, 8
#: The gRPC status that kubelet gets for the errno of a refusal, where the errno shows who can fix the problem.
#:
#: Not there yet (ENOENT) is what kubelet makes while it has the volume published; EIO, a child of the mounter that was
#: killed. Both may be well when kubelet asks again. All but UNAVAILABLE, DEADLINE_EXCEEDED and
#: RESOURCE_EXHAUSTED are final for kubelet: it removes its record of the volume, without which it can't end a pod whose
#: volume it has found at its start (pkg/volume/csi/csi_mounter.go, SetUpAt; operation_generator.go,
#: markVolumeErrorState).
_CODES = {
    errno.EINVAL: INVALID_ARGUMENT,
    **dict.fromkeys((errno.EAGAIN, errno.ENOENT, errno.EIO), UNAVAILABLE),
    errno.ETIMEDOUT: DEADLINE_EXCEEDED,
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EMFILE, errno.ENFILE), RESOURCE_EXHAUSTED),
    **dict.fromkeys((errno.ENOTDIR, errno.EEXIST, errno.EBUSY), FAILED_PRECONDITION),
    **dict.fromkeys((errno.ELOOP, errno.EXDEV, errno.EPERM, errno.EACCES, errno.EROFS), FAILED_PRECONDITION),
}
#: Why a volume did not answer, by errno.
_TROUBLES = {
    errno.ENODATA: b"no FUSE program has mounted the volume yet",
    errno.ENOTCONN: b"the FUSE program of the volume is gone",
    errno.ETIMEDOUT: b"the FUSE program of the volume does not answer",
    errno.ENODEV: b"the device of the volume is gone",
}
#: The longest text: as much as an event of a pod shows.
_LONGEST_TEXT = 1024
_NOTHING_KNOWN = Stated(0, False, 0, 0, 0, 0, 0, b"")


class RequestHandler:
    """Answers the requests that come on `connection`."""

    def __init__(self, front: Front, publications: Publications, health: Health, connection: socket.socket) -> None:
        self._front = front
        self._publications = publications
        self._health = health
        self._channel = Channel(connection)
        self._sending = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Answer until no process has the other end of the connection any more."""
        await self._say(Done(0))
        while True:
            try:
                request = csi.load(await self._channel.receive())
            except HungUp:
                return
            except ProtocolError as error:
                self._front.log(log.ERROR, f"the CSI plugin sent an invalid request: {error.text}")
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
                self._front.log(log.ERROR, f"the CSI plugin sent an invalid request: {type(request).__name__}")

    async def end(self, seconds: float) -> None:
        """Wait up to `seconds` for requests under way; leave the rest to the next front."""
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
        """Carry out the request and return the answer. Raises Refusal."""
        if isinstance(request, Publish):
            await self._publications.publish(volume_of(request))
        elif isinstance(request, Unpublish):
            await self._publications.unpublish(request.target)
        elif isinstance(request, Probe):
            if problem := await self._health.process_problem():  # on a problem, kubelet restarts the broker
                return Refused(request.number, FAILED_PRECONDITION, problem.encode())
        else:
            return await self._stat(request)
        return Done(request.number)

    async def _stat(self, request: Stat) -> Answer:
        """Answer for the request's target or, if it names none, for the volume's target in the worst state."""
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
            block=self._publications.is_block(request.target),
        )

    async def _say(self, record: csi.Record) -> None:
        """Send the record as soon as there is room; log an error if the plugin can't be reached."""
        async with self._sending:
            try:
                await asyncio.get_running_loop().sock_sendall(self._channel.socket, csi.dump(record))
            except OSError as error:
                self._front.log(log.ERROR, f"can't answer the CSI plugin: {error_texts.of(error)}")


def volume_of(request: Publish) -> Volume:
    """Return the volume that the request wants published."""
    fields = request._asdict()
    del fields["number"]
    return Volume(**{**fields, "pod": request.pod.decode("ascii", "replace")})


def _refused(number: int, code: csi.Code, refusal: Refusal) -> Refused:
    return Refused(number, code, refusal.text[:_LONGEST_TEXT])
