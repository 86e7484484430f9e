"""A FUSE program of one file, for tests that have a /dev/fuse descriptor and choose the process that serves it.

It speaks the kernel's protocol itself (include/uapi/linux/fuse.h): a program with libfuse would want to mount, too.
"""

from __future__ import annotations

import errno
import os
import signal
import struct

NAME = b"file"
BLOCKS = 1000
BLOCK_SIZE = 4096

_LOOKUP, _FORGET, _GETATTR, _OPEN, _READ, _STATFS, _RELEASE = 1, 2, 3, 14, 15, 17, 18
_FLUSH, _INIT, _OPENDIR, _READDIR, _RELEASEDIR, _INTERRUPT, _BATCH_FORGET = 25, 26, 27, 28, 29, 36, 42
_GETXATTR = 22
_ROOT, _FILE = 1, 2
_INIT_REPLY = struct.pack("=IIIIHHIIHH28x", 7, 31, 65536, 0, 12, 9, 65536, 1, 0, 0)
_STATFS_REPLY = struct.pack("=5Q4I24x", BLOCKS, BLOCKS // 2, BLOCKS // 4, 100, 50, BLOCK_SIZE, 255, BLOCK_SIZE, 0)


def serve(device: int, content: bytes = b"hello", hangs: bool = False, mode: int = 0o644) -> None:
    """Serve in this process until the filesystem has ended; no longer than a test may take.

    Its only file is root's, with mode `mode` and contents `content`. With `hangs`, requests are read and only the
    first one is answered. Raises OSError.
    """
    signal.alarm(120)
    while True:
        answer(device, content, hangs, mode)


def serve_a_node(device: int, number: int, attribute: bytes) -> None:
    """Serve, until the filesystem has ended, one whose only file is the node of a block device with that number.

    Each extended attribute has the value `attribute`. Raises OSError.
    """
    signal.alarm(120)
    node = struct.pack("=6Q10I", _FILE, 0, 0, 0, 0, 0, 0, 0, 0, 0o060600, 1, 0, 0, number, BLOCK_SIZE, 0)
    attributes = {_ROOT: _attributes(_ROOT, b"", 0), _FILE: node}
    while True:
        request = os.read(device, 1 << 17)
        _, opcode, unique, of, *_ = struct.unpack_from("=IIQQ", request)
        if opcode in (_FORGET, _BATCH_FORGET, _INTERRUPT):
            continue
        body, error = b"", 0
        if opcode == _INIT:
            body = _INIT_REPLY
        elif opcode == _STATFS:
            body = _STATFS_REPLY
        elif opcode == _GETATTR:
            body = struct.pack("=QII", 0, 0, 0) + attributes[of]
        elif opcode == _LOOKUP:
            body = struct.pack("=QQQQII", _FILE, 1, 0, 0, 0, 0) + node
        elif opcode == _GETXATTR:
            (size,) = struct.unpack_from("=I", request, 40)
            body = attribute if size else struct.pack("=II", len(attribute), 0)
        else:
            error = errno.ENOSYS
        os.write(device, struct.pack("=IiQ", 16 + len(body), -error, unique) + body)


def answer(device: int, content: bytes = b"hello", hangs: bool = False, mode: int = 0o644) -> None:
    """Wait for one request and treat it as `serve` does. Raises OSError."""
    request = os.read(device, 1 << 17)
    _, opcode, unique, node, *_ = struct.unpack_from("=IIQQIII", request)
    if opcode in (_FORGET, _BATCH_FORGET, _INTERRUPT) or (hangs and opcode != _INIT):
        return
    try:
        body, error = _answer(opcode, node, request[40:], content, mode), 0
    except OSError as refused:
        body, error = b"", refused.errno or errno.EIO
    os.write(device, struct.pack("=IiQ", 16 + len(body), -error, unique) + body)


def _answer(opcode: int, node: int, arguments: bytes, content: bytes, mode: int) -> bytes:
    if opcode == _INIT:
        return _INIT_REPLY
    if opcode == _STATFS:
        return _STATFS_REPLY
    if opcode == _GETATTR:
        return struct.pack("=QII", 0, 0, 0) + _attributes(node, content, mode)
    if opcode == _LOOKUP and arguments.rstrip(b"\0") == NAME:
        return struct.pack("=QQQQII", _FILE, 1, 0, 0, 0, 0) + _attributes(_FILE, content, mode)
    if opcode == _LOOKUP:
        raise FileNotFoundError(errno.ENOENT, "no such file")
    if opcode in (_OPEN, _OPENDIR):
        return struct.pack("=QII", 0, 0, 0)
    if opcode in (_READ, _READDIR):
        _, offset, size = struct.unpack_from("=QQI", arguments)
        whole = content if opcode == _READ else _ENTRY
        return whole[offset : offset + size]
    if opcode in (_FLUSH, _RELEASE, _RELEASEDIR):
        return b""
    raise OSError(errno.ENOSYS, "not implemented")


def _attributes(node: int, content: bytes, mode: int) -> bytes:
    mode, size = (0o040755, 0) if node == _ROOT else (0o100000 | mode, len(content))
    return struct.pack("=6Q10I", node, size, 1, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, BLOCK_SIZE, 0)


_ENTRY = struct.pack("=QQII", _FILE, 1 << 20, len(NAME), 0o10) + NAME + bytes(4)
