"""Programs of another architecture on this machine, in a private user namespace whose binfmt_misc names an emulator.

That setting belongs to the user namespace since Linux 6.7, so this machine's own stays as it is.
"""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

EMULATOR = Path("/usr/bin/qemu-aarch64-static")
#: The line for /proc/sys/fs/binfmt_misc/register (Documentation/admin-guide/binfmt-misc.rst): the header of a 64-bit
#: little-endian executable (ET_EXEC or ET_DYN) for EM_AARCH64 (elf(5)). F: the emulator is opened now, so it serves in
#: a chroot, too; P: it is told argv[0].
_HEADER = rb"\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00"
_MASK = rb"\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff"
_ENTRY = b":aarch64:M::" + _HEADER + b":" + _MASK + b":" + bytes(EMULATOR) + b":FP"
#: The arguments are the command. It waits until the namespace has its users.
_SCRIPT = """\
read -r entry
mount -t binfmt_misc binfmt_misc /proc/sys/fs/binfmt_misc
printf '%s' "$entry" > /proc/sys/fs/binfmt_misc/register
exec "$@" < /dev/null
"""
_ALL_USERS = "0 0 4294967295"


def can_emulate() -> bool:
    """Return whether the kernel gives each user namespace its own binfmt_misc."""
    return run_emulating(["true"]).returncode == 0


def run_emulating(argv: Sequence[str | Path]) -> subprocess.CompletedProcess[str]:
    """Run the command as root of a user namespace that has all users of this one and executes programs for arm64.

    Needs root and Linux 6.7. Standard error goes to the result's `stdout`, too.
    """
    shell = ["unshare", "--user", "--mount", "--", "sh", "-euc", _SCRIPT, "sh", *argv]
    pipe = subprocess.PIPE
    with subprocess.Popen(shell, text=True, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT) as process:
        try:
            _give_users(process.pid)
            output, _ = process.communicate(os.fsdecode(_ENTRY) + "\n")
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(shell, process.returncode, output)


def _give_users(pid: int) -> None:
    """Wait until unshare(1) has made its user namespace, then give it all users and groups of this one."""
    ours = Path("/proc/self/ns/user").readlink()
    while Path(f"/proc/{pid}/ns/user").readlink() == ours:
        time.sleep(0.01)
    for name in ("uid_map", "gid_map"):
        Path(f"/proc/{pid}/{name}").write_text(_ALL_USERS)
