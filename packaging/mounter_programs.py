"""Builds the programs that the broker's mounter executes: superblock_creator and plain_call, see their sources.

    PYTHONPATH=.:broker /usr/bin/python3 packaging/mounter_programs.py --output DIRECTORY

`CC` in the environment names the compiler, also that for another architecture. The same compiler gives the same bytes
in any directory.

What plain_call repeats of the modules is in a header that is generated from them (`definitions`).
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import get_type_hints

from fusermount3_broker.kernel import syscalls
from fusermount3_broker.messages import mounter, process_names, quantities
from fusermount3_broker.messages.records import bounds
from fusermount3_broker.mounter import daemon, filesystem, invariants, locked_flags, mount_tree, plain_calls, programs
from fusermount3_proxy import wire

SOURCES = Path(programs.__file__).parent
COMMON = ["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-fno-pie"]
COMMON += [f"-DCMD_CREATE={syscalls.FSCONFIG_CMD_CREATE}", f"-DCMD_CREATE_EXCL={syscalls.FSCONFIG_CMD_CREATE_EXCL}"]
# No build id: two builds can be compared byte by byte.
COMMON += ["-static", "-no-pie", "-s", "-Wl,--build-id=none"]
#: Flags for a program that has no libc and no data that is written, so that there is nothing for the usual hardening to
#: protect, and one segment, which nothing may write.
FREESTANDING = [*COMMON, "-Os", "-ffreestanding", "-fno-stack-protector", "-fno-asynchronous-unwind-tables"]
FREESTANDING += ["-nostdlib", "-Wl,-z,noseparate-code"]
HARDENED = [*COMMON, "-O2", "-fstack-protector-strong", "-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=2"]
HARDENED += ["-Wl,-z,relro,-z,now"]
#: The programs, and the compiler's flags for each.
PROGRAMS = {programs.SUPERBLOCK_CREATOR: FREESTANDING, programs.PLAIN_CALL: HARDENED}
#: The constants of the kernel that plain_call uses: the headers of the machine that builds it may lack them.
CONSTANTS = (
    *("AT_EACCESS", "AT_EMPTY_PATH", "AT_HANDLE_FID", "AT_HANDLE_MNT_ID_UNIQUE", "AT_STATX_DONT_SYNC"),
    *("FSCONFIG_SET_FLAG", "FSCONFIG_SET_STRING", "FSMOUNT_CLOEXEC", "FSOPEN_CLOEXEC", "MNT_DETACH"),
    *("MOUNT_ATTR_NOATIME", "MOUNT_ATTR_NODEV", "MOUNT_ATTR_NODIRATIME", "MOUNT_ATTR_NOEXEC", "MOUNT_ATTR_NOSUID"),
    *("MOUNT_ATTR_NOSYMFOLLOW", "MOUNT_ATTR_RDONLY", "MOUNT_ATTR_STRICTATIME", "MOVE_MOUNT_F_EMPTY_PATH"),
    *("MOVE_MOUNT_T_EMPTY_PATH", "NS_GET_USERNS", "OPEN_TREE_CLONE", "SO_PEERGROUPS", "SO_PEERPIDFD"),
    *("STATMOUNT_FS_TYPE", "STATMOUNT_MNT_BASIC", "STATMOUNT_MNT_OPTS", "STATMOUNT_MNT_POINT"),
    *("STATX_ATTR_MOUNT_ROOT", "SYS_LISTMOUNT", "SYS_STATMOUNT", "UMOUNT_NOFOLLOW"),
)
#: Records of which the program reads or writes the fields, and what their constants begin with.
_RECORDS: dict[str, type[mounter.Record]] = {
    "FACT": mounter.MountFacts,
    "PLAN": mounter.MountPlan,
    "START_MOUNT": mounter.StartPlainMount,
    "START_UNMOUNT": mounter.StartPlainUnmount,
    "UNMOUNT_FACT": mounter.UnmountFacts,
    "UNMOUNT_PLAN": mounter.UnmountPlan,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, default=SOURCES, help="where to write the executables (%(default)s)")
    output: Path = parser.parse_args().output
    output.mkdir(parents=True, exist_ok=True)
    compiler = os.environ.get("CC", "cc").split()
    with tempfile.TemporaryDirectory() as generated:
        Path(generated, "definitions.h").write_text(definitions())
        for name, flags in PROGRAMS.items():
            program = output / name
            # Built aside, so that the final name is always that of a whole executable.
            unfinished = program.with_suffix(".unfinished")
            command = [*compiler, *flags, f"-I{generated}", str(SOURCES / f"{name}.c"), "-o", str(unfinished)]
            if subprocess.run(command, check=False).returncode != 0:
                sys.exit(f"mounter_programs.py: {program}: not built, see the compiler's messages above")
            unfinished.replace(program)


def definitions() -> str:
    """Return a header with what plain_call repeats of the modules."""
    decided = [name for name in mounter.MountFacts._fields if name in mounter.MountPlan._fields]
    assert list(mounter.MountPlan._fields[: len(decided)]) == decided == list(mounter.MountFacts._fields[:-1])
    lines = [
        *(_constant(name) for name in CONSTANTS),
        *(f"#define {name} {number}" for name, number in _numbers().items()),
        *(f"#define {name} {_quoted(text)}" for name, text in _texts().items()),
        *(line for name, kind in _RECORDS.items() for line in _record(name, kind)),
        f"#define KERNEL_FILESYSTEMS {', '.join(map(str, invariants.KERNEL_FILESYSTEMS.values()))}",
    ]
    return "\n".join(lines) + "\n"


def _numbers() -> dict[str, int]:
    return {
        "BUSY_MOMENT": round(1000 * mount_tree.BUSY_MOMENT),
        "CAPABILITIES": sum(1 << each for each in plain_calls.CAPABILITIES),
        "DECIDED_FACTS": len(mounter.MountFacts._fields) - 1,
        "LONGEST_STRING": filesystem.LONGEST_STRING,
        "MAX_MESSAGE": wire.MAX_MESSAGE,
        "MOST_QUEUED": daemon.MOST_QUEUED,
        "MOST_SECONDS": bounds(quantities.Seconds)[-1],
        "NOT_LOCKED": locked_flags.NOT_LOCKED,
        "PIDS_FOREIGN": mounter.PIDS_FOREIGN,
        "PIDS_SEEN": mounter.PIDS_SEEN,
        "PIDS_TRACED": mounter.PIDS_TRACED,
        "SIZE_OF_STATMOUNT": syscalls.SIZE_OF_STATMOUNT,
        "NO_CELL": plain_calls.NO_CELL,
    }


def _texts() -> dict[str, bytes]:
    return {
        "BUSY_NAME": process_names.BUSY,
        "CELL_DIRECTORY": locked_flags.DIRECTORY,
        "CELL_FILE": locked_flags.FILE,
        "COMMIT": b"operation=%b" % wire.CommitRequest.OPERATION.encode(),
        "LOCK_STEP": locked_flags.STEP.encode(),
        "REPLY_PROTOCOL": b"%d" % wire.NEWEST,
        "START_MOUNT": mounter.StartPlainMount.__name__.encode(),
        "START_UNMOUNT": mounter.StartPlainUnmount.__name__.encode(),
    }


def _constant(name: str) -> str:
    """Define a constant of the kernel, and compare it with that of the system's headers, if they have it."""
    value = getattr(syscalls, name)
    return (
        f"#ifndef {name}\n#define {name} {value}\n#endif\n_Static_assert({name} == {value}, {_quoted(name.encode())});"
    )


def _record(prefix: str, kind: type[mounter.Record]) -> tuple[str, str, str]:
    """Define the places of a record's fields, their number PREFIXS, their names PREFIX_FIELDS, and PREFIX_FLAGS, the
    set of places where a bool is.
    """
    names = [_quoted(name.replace("_", "-").encode()) for name in kind._fields]
    places = [f"{prefix}_{name.upper()}" for name in kind._fields]
    flags = sum(1 << place for place, name in enumerate(kind._fields) if get_type_hints(kind)[name] is bool)
    return (
        f"enum {{ {', '.join(places)}, {prefix}S }};",
        f"#define {prefix}_FIELDS {', '.join(names)}",
        f"#define {prefix}_FLAGS UINT64_C({flags})",
    )


def _quoted(text: bytes) -> str:
    assert text.decode().isprintable() and not set(text) & set(b'"\\')
    return f'"{text.decode()}"'


if __name__ == "__main__":
    main()
