"""Builds superblock_creator, which the broker's mounter executes: see superblock_creator.c.

    PYTHONPATH=broker /usr/bin/python3 packaging/superblock_creator.py --output FILE

`CC` in the environment names the compiler, also that for another architecture. The same compiler gives the same bytes
in any directory.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

from fusermount3_broker.kernel import syscalls
from fusermount3_broker.mounter.superblock_creator import FILE

SOURCE = Path(f"{FILE}.c")
# It has no libc and no data that is written, so there is nothing for the usual hardening to protect.
COMPILE_FLAGS = ["-std=gnu11", "-Os", "-Wall", "-Wextra", "-Werror", "-ffreestanding", "-fno-stack-protector"]
COMPILE_FLAGS += ["-fno-asynchronous-unwind-tables", "-fno-pie"]
COMPILE_FLAGS += [f"-DCMD_CREATE={syscalls.FSCONFIG_CMD_CREATE}"]
COMPILE_FLAGS += [f"-DCMD_CREATE_EXCL={syscalls.FSCONFIG_CMD_CREATE_EXCL}"]
# No build id: two builds can be compared byte by byte. One segment, which nothing may write.
LINK_FLAGS = ["-nostdlib", "-static", "-no-pie", "-s", "-Wl,--build-id=none", "-Wl,-z,noseparate-code"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, default=Path(FILE), help="the executable to write (%(default)s)")
    output: Path = parser.parse_args().output
    output.parent.mkdir(parents=True, exist_ok=True)
    compiler = os.environ.get("CC", "cc").split()
    # Built aside, so that the final name is always that of a whole executable.
    unfinished = output.with_suffix(".unfinished")
    command = [*compiler, *COMPILE_FLAGS, *LINK_FLAGS, str(SOURCE), "-o", str(unfinished)]
    if subprocess.run(command, check=False).returncode != 0:
        sys.exit(f"superblock_creator.py: {output}: not built, see the compiler's messages above")
    unfinished.replace(output)


if __name__ == "__main__":
    main()
