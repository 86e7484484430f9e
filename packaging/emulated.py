"""Runs a command as root of a user namespace that has all users of this one and executes programs for arm64.

    /usr/bin/python3 packaging/emulated.py COMMAND [ARGUMENT...]

binfmt_misc is the user namespace's own, so this machine's stays as it is. Needs root, Linux 6.7 and qemu-user-static.
The command reads nothing; its output and its status are those of this program.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

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


def run(argv: list[str]) -> int:
    """Run the command to its end, and return its status."""
    shell = ["unshare", "--user", "--mount", "--", "sh", "-euc", _SCRIPT, "sh", *argv]
    with subprocess.Popen(shell, text=True, stdin=subprocess.PIPE) as process:
        try:
            _give_users(process.pid)
            process.communicate(os.fsdecode(_ENTRY) + "\n")
        except BaseException:
            process.kill()
            raise
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def _give_users(pid: int) -> None:
    """Wait until unshare(1) has made its user namespace, then give it all users and groups of this one."""
    ours = Path("/proc/self/ns/user").readlink()
    while Path(f"/proc/{pid}/ns/user").readlink() == ours:
        time.sleep(0.01)
    for name in ("uid_map", "gid_map"):
        Path(f"/proc/{pid}/{name}").write_text(_ALL_USERS)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
