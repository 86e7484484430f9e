"""Error messages to the caller when the mounter's child could not carry out a decision."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from errno import EBADMSG, EIO, ETIMEDOUT

from fusermount3_broker.front.mounter_client import OperationEnded, OperationFailed, OperationRefused
from fusermount3_broker.messages.refusal import Refusal
from fusermount3_proxy.wire import DeviceRequest, MountRequest, ProtocolError, UnmountRequest, VolumeRequest


@contextmanager
def explained(prefix: bytes, request: MountRequest | VolumeRequest | UnmountRequest | DeviceRequest) -> Iterator[None]:
    """Turn the failure of an operation into the refusal that the user reads, which begins with `prefix`."""
    begun = time.monotonic()
    try:
        yield
    except OperationFailed as error:
        if error.step == "access mountpoint":
            prefix = b"failed to access mountpoint %b" % request.mountpoint
        elif error.step == "mount on the volume":
            prefix = b"failed to mount on the volume"
        elif error.step.startswith("lock "):
            prefix = b"failed to %b" % error.step.encode()
        elif error.step == "share":
            why = b"a program that serves other pods can't be in a user namespace (hostUsers: false)"
            raise Refusal(error.errno, b"mount failed: %b" % why) from None
        raise Refusal(error.errno, b"%b: %b" % (prefix, os.strerror(error.errno).encode())) from None
    except OperationRefused as error:
        if error.descriptors == 1:
            raise ProtocolError(EBADMSG, "the file descriptor was not opened with O_PATH") from None
        came = f"'{request.OPERATION}' takes {request.DESCRIPTORS} file descriptors, {error.descriptors} came"
        raise ProtocolError(EBADMSG, came) from None
    except OperationEnded:  # killed by its alarm, if it took that long
        problem = ETIMEDOUT if time.monotonic() - begun > 0.9 else EIO
        raise Refusal(problem, b"%b: %b" % (prefix, os.strerror(problem).encode())) from None
