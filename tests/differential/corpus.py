"""Every case of the contract that can be provoked, by name.

A name describes the call; the genuine helper defines the expected result.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.differential.model import PROGRAM, ROOT, STRANGER, USER, WORK, Case, Comm, Policy, Step


def call(*arguments: bytes, **fields: Any) -> Case:
    return Case((PROGRAM, *arguments), **fields)


def mount(options: bytes, path: bytes = b"dir", **fields: Any) -> Case:
    return call(b"-o", options, b"--", path, **fields)


def unmount(path: bytes, *flags: bytes, **fields: Any) -> Case:
    return call(b"-u", *flags, b"--", path, **fields)


def mounted(path: bytes = b"dir", options: bytes = b"", uid: int = USER) -> Step:
    return Step("mount", (path, options, uid))


SINCE_LONG: dict[str, Any] = {"since": (3, 15)}  # --options, --auto-unmount
SINCE_COMM: dict[str, Any] = {"since": (3, 17)}  # --comm-fd, x-*, strict numbers
TARGET: dict[str, Any] = {"since": (3, 18)}


def command_lines() -> dict[str, Case]:
    cases = {
        "nothing": call(),
        "two mountpoints": call(b"dir", b"other"),
        "an unknown letter": call(b"-x", b"dir"),
        "an unknown letter that is not ASCII": call(b"-\xff", b"dir"),
        "an unknown letter in a cluster": call(b"-uxz", b"dir"),
        "an unknown long option": call(b"--foo", b"dir"),
        "an unknown long option with a value": call(b"--foo=bar", b"dir"),
        "an unknown long option that is not UTF-8": call(b"--f\xffo", b"dir"),
        "two unknown options": call(b"-x", b"--foo", b"dir"),
        "-o without an argument": call(b"-o"),
        "-o without an argument in a cluster": call(b"-uo"),
        "-o takes the mountpoint": call(b"-o", b"dir"),
        "--options without an argument": call(b"--options", **SINCE_LONG),
        "an argument to a long option without": call(b"--unmount=yes", b"dir"),
        "an empty argument to a long option without": call(b"--quiet=", b"dir"),
        "an argument to an abbreviated option": call(b"--unm=yes", b"dir"),
        "an ambiguous abbreviation": call(b"--=x", b"dir", **TARGET),
        "-h": call(b"-h"),
        "--help": call(b"--help"),
        "--he": call(b"--he"),
        "-h without a mountpoint and broken options": call(b"-o", b"foo", b"-h", b"-x"),
        "-h after a mistake": call(b"-x", b"-h"),
        "-h with standard output closed": call(b"-h", closed=(1,)),
        "-h with all closed": call(b"-h", closed=(0, 1, 2)),
        "a mistake with all closed": call(b"-x", closed=(0, 1, 2)),
        "-z alone": call(b"-z", b"dir"),
        "-z without a mountpoint": call(b"-z"),
        "-uz": call(b"-uz", b"dir", setup=(mounted(),)),
        "-zu": call(b"-zu", b"dir", setup=(mounted(),)),
        "-uqz": call(b"-uqz", b"dir", setup=(mounted(),)),
        "-u after the mountpoint": call(b"dir", b"-u", setup=(mounted(),)),
        "--unmount --quiet --lazy": call(b"--unmount", b"--quiet", b"--lazy", b"--", b"dir", setup=(mounted(),)),
        "--unm --qui --laz": call(b"--unm", b"--qui", b"--laz", b"--", b"dir", setup=(mounted(),)),
        "--u": call(b"--u", b"dir", setup=(mounted(),)),
        "-u twice": call(b"-u", b"-u", b"dir", setup=(mounted(),)),
        "-q for a mount": call(b"-q", b"--", b"dir"),
        "-q for a mount that is refused": call(b"-q", b"-o", b"foo", b"--", b"dir"),
        "-oro": call(b"-oro", b"dir"),
        "-qoro": call(b"-qoro", b"dir"),
        "-o after the mountpoint": call(b"dir", b"-o", b"ro"),
        "-o twice": call(b"-o", b"ro", b"-o", b"noexec", b"dir"),
        "-o with an empty argument": call(b"-o", b"", b"dir"),
        "-o takes what looks like an option": call(b"-o", b"-u", b"dir"),
        "-o=ro": call(b"-o=ro", b"dir"),
        "--options": call(b"--options", b"ro", b"dir", **SINCE_LONG),
        "--options=": call(b"--options=ro,noexec", b"dir", **SINCE_LONG),
        "--opt": call(b"--opt", b"ro", b"dir", **SINCE_LONG),
        "an option after the end of options": call(b"--", b"-u"),
        "a mountpoint that begins with a dash": call(b"--", b"-x", setup=(Step("mkdir", (b"-x",)),)),
        "two ends of options": call(b"--", b"--"),
        "a dash is a mountpoint": call(b"-"),
        "an empty mountpoint": call(b"--", b""),
        "an empty mountpoint to unmount": unmount(b""),
        "an empty argument before the mountpoint": call(b"", b"dir"),
        "--comm-fd": call(b"--comm-fd", b"3", b"dir", environment=(), **SINCE_COMM),
        "--comm-fd=": call(b"--comm-fd=3", b"dir", environment=(), **SINCE_COMM),
        "--comm": call(b"--comm", b"3", b"dir", environment=(), **SINCE_COMM),
        "--comm-fd beats the variable": call(
            b"--comm-fd=3", b"dir", environment=((b"_FUSE_COMMFD", b"9"),), **SINCE_COMM
        ),
        "--comm-fd garbage": call(b"--comm-fd=x", b"dir", **SINCE_COMM),
        "--comm-fd without an argument": call(b"dir", b"--comm-fd", **SINCE_COMM),
        "--comm-fd twice": call(b"--comm-fd=9", b"--comm-fd=3", b"dir", **SINCE_COMM),
    }
    for name, program in {
        "a full path": b"/usr/bin/fusermount3",
        "another name": b"fusermount",
        "no name": b"",
        "blanks": b"my helper",
        "a newline": b"a\nb",
        "bytes that are not UTF-8": b"\xff\xfe",
        "a percent sign": b"%s%n",
    }.items():
        cases[f"the name {name}, for help"] = Case((program, b"-h"))
        cases[f"the name {name}, for a mistake"] = Case((program, b"-x"))
        cases[f"the name {name}, for a refusal"] = Case((program, b"-o", b"foo", b"dir"))
        cases[f"the name {name}, for a mount"] = Case((program, b"dir"))
    return cases


def versions() -> dict[str, Case]:
    return {
        "-V": call(b"-V"),
        "--version": call(b"--version"),
        "-V before a mistake": call(b"-V", b"-x"),
        "-V after a mistake": call(b"-x", b"-V"),
        "-V with standard output closed": call(b"-V", closed=(1,)),
        "-V with output and errors closed": call(b"-V", closed=(1, 2)),
        "-V under another name": Case((b"fusermount", b"-V")),
    }


def comm_sockets() -> dict[str, Case]:
    cases = {
        "a stream socket": mount(b""),
        "a seqpacket socket": mount(b"", comm=Comm.SEQPACKET),
        "a datagram socket": mount(b"", comm=Comm.DGRAM),
        "a socket whose peer is gone": mount(b"", comm=Comm.PEERLESS),
        "a file in its place": mount(b"", comm=Comm.FILE, **SINCE_COMM),
        "nothing in its place": mount(b"", comm=Comm.CLOSED),
    }
    cases["no _FUSE_COMMFD"] = mount(b"", environment=())
    for text in (b"", b" 3", b"+3", b"03", b"0x3", b"3 ", b"3x", b"x", b"4294967299", b"9" * 30):
        cases[f"_FUSE_COMMFD={text.decode()!r}"] = mount(b"", environment=((b"_FUSE_COMMFD", text),), **SINCE_COMM)
    for text in (b"-1", b"-0", b"99", b"2147483648", b"9" * 18):
        since = SINCE_COMM if text == b"-0" else {}
        cases[f"_FUSE_COMMFD={text.decode()!r}"] = mount(b"", environment=((b"_FUSE_COMMFD", text),), **since)
    cases["_FUSE_COMMFD of standard output"] = mount(b"", environment=((b"_FUSE_COMMFD", b"1"),), **SINCE_COMM)
    cases["_FUSE_COMMFD of closed standard input"] = mount(
        b"", environment=((b"_FUSE_COMMFD", b"0"),), closed=(0,), **SINCE_COMM
    )
    cases["_FUSE_COMMFD2 is nobody's business"] = mount(
        b"", environment=((b"_FUSE_COMMFD", b"3"), (b"_FUSE_COMMFD2", b"x"))
    )
    cases["a mount with all of 0 to 2 closed"] = mount(b"", closed=(0, 1, 2))
    cases["a refusal with all of 0 to 2 closed"] = mount(b"foo", closed=(0, 1, 2))
    cases["a comm socket that is missing, and a bad mountpoint"] = mount(b"", b"nowhere/at/all", environment=())
    cases["a comm socket that is missing, and bad options"] = mount(b"foo", environment=())
    cases["a bad mountpoint and bad options"] = mount(b"foo", b"fifo")
    return cases


FLAGS = (
    *(b"rw", b"ro", b"nosuid", b"nodev", b"exec", b"noexec", b"sync", b"async", b"dirsync", b"noatime", b"atime"),
    *(b"nodiratime", b"diratime", b"norelatime", b"relatime", b"nostrictatime", b"strictatime", b"lazytime"),
    *(b"nolazytime", b"nonempty", b"default_permissions", b"large_read"),
)
NEWER_FLAGS = (b"symfollow", b"nosymfollow")
REFUSED = (
    *(b"allow_other", b"allow_root", b"user=me", b"user", b"context=x", b"umask=0", b"uid=0", b"gid=0", b"foo"),
    *(b"foo=bar", b"ro=1", b"RO", b" ro", b"ro ", b"ro\\", b"fsnam", b"fsname", b"subtype", b"max_read", b"blksize"),
    *(b"fd", b"rootmode", b"user_id", b"group_id", b"default_permissions=1", b"allow_other=1", b"loop", b"remount"),
    *(b"bind", b"silent", b"mand", b"nosub", b"x", b"X-foo", b"=", b"\\", b"\\,ro", b"\xff", b"a\nb", b"a\tb", b"%s%n"),
    *(b"auto_unmount=1", b"defaults", b"nofail", b"users", b"owner", b"_netdev", b"noauto"),
)
VALUES = (
    *(b"fsname=a", b"fsname=", b"fsname=a b", b"fsname=a\\,b", b"fsname=a\\\\b", b"fsname=a\\", b"fsname=a\\b"),
    *(
        b"fsname=a=b",
        b"fsname=\xff",
        b"fsname=a\nb",
        b"fsname=a\tb",
        b"fsname=#a",
        b"fsname=/dev/sda",
        b"fsname=a,fsname=b",
    ),
    *(
        b"fsname=a,fsname=",
        b"fsname=,fsname=b",
        b"subtype=a",
        b"subtype=",
        b"subtype=a.b",
        b"subtype=a\\,b",
        b"subtype=a b",
    ),
    *(b"subtype=a,subtype=b", b"subtype=\xff", b"fsname=a,subtype=b", b"subtype=b,fsname=a", b"fsname=,subtype=b"),
    *(b"subtype=,fsname=a", b"subtype=a/b", b"subtype=.", b"subtype=a#b", b"fsname=a#b,subtype=c"),
    *(
        b"max_read=0",
        b"max_read=4096",
        b"max_read=131072",
        b"max_read=",
        b"max_read=x",
        b"max_read=-1",
        b"max_read=0x10",
    ),
    *(b"max_read=99999999999", b"max_read=1,max_read=4096", b"max_read=4096,max_read=x", b"max_read=010"),
    *(b"blksize=4096", b"blksize=", b"blksize=512", b"max_read=\\4096", b"max_read=40 96"),
    *(
        b"fd=9",
        b"rootmode=100000",
        b"user_id=0",
        b"group_id=0",
        b"fd=",
        b"fd=9,rootmode=1,user_id=0,group_id=0",
        b"fd=x\\,y",
    ),
    *(b"fsname=a\\,ro,noexec", b"fsname=a\\\\,ro", b"subtype=a\\\\\\,b"),
    *(b"fsname=" + b"a" * 255, b"fsname=" + b"a" * 256, b"fsname=" + b"a" * 300, b"subtype=" + b"a" * 100),
    *(b"subtype=" + b"a" * 300, b"fsname=\\" + b"\\,\\" * 100 + b"z"),
)
LISTS = (
    *(
        b"ro,rw",
        b"rw,ro",
        b"noexec,exec",
        b"exec,noexec",
        b"noatime,atime",
        b"atime,noatime",
        b"sync,async",
        b"async,sync",
    ),
    *(
        b"noatime,relatime",
        b"relatime,noatime",
        b"noatime,strictatime",
        b"strictatime,noatime",
        b"strictatime,relatime",
    ),
    *(b"strictatime,nostrictatime", b"nostrictatime,strictatime", b"nodiratime,diratime", b"diratime,nodiratime"),
    *(
        b"lazytime,nolazytime",
        b"nolazytime,lazytime",
        b"noatime,norelatime",
        b"strictatime,atime",
        b"noatime,nostrictatime",
    ),
    *(b"noatime,nodiratime", b"strictatime,nodiratime", b"norelatime,strictatime", b"strictatime,norelatime"),
    *(
        b"nosuid,nodev,noexec,ro",
        b"sync,dirsync",
        b"dirsync,async",
        b"ro,",
        b"ro,,rw",
        b"ro,,",
        b"ro,foo,bar",
        b"foo,ro",
    ),
    *(
        b"default_permissions,default_permissions",
        b"ro,ro",
        b"large_read,large_read",
        b"large_read,foo",
        b"ro,allow_other",
    ),
    *(b"allow_other,foo", b"foo,allow_other", b"allow_other,allow_root", b"blkdev,foo", b"foo,blkdev"),
    *(b"rw,nosuid,nodev,noatime,max_read=131072,fsname=me@host:,subtype=sshfs", b"rw,fsname=a,default_permissions"),
    *(b"ro,noexec,noatime,nodiratime,sync,dirsync,lazytime,default_permissions,max_read=4096,fsname=a,subtype=b",),
)
#: Lists that only 3.17 and later accept: ``x-`` options, and commas at either end.
NEWER_LISTS = (
    *(
        b",",
        b",,",
        b",ro",
        b",ro,",
        b",,ro",
        b"ro,,",
        b"x-foo",
        b"x-foo=bar",
        b"x-foo,ro",
        b"ro,x-foo",
        b"ro,x-foo,rw",
        b"x-",
    ),
    *(
        b"x-a,x-b",
        b"x-a,,x-b",
        b"x-a,ro,x-b,noexec",
        b"x-a,foo",
        b"foo,x-a",
        b"x-a,",
        b",x-a",
        b"fsname=a\\,x-b",
        b"x-a\\,ro",
    ),
    *(
        b"ro,,x-a",
        b"x-a,,ro",
        b"fsname=a,x-b,subtype=c",
        b"x-\xff",
        b"fsname=a\\,x-b,ro",
        b"x-a=b c,ro",
        b"xfoo",
        b"ro,x",
        b"x",
    ),
    *(b"symfollow,nosymfollow", b"nosymfollow,symfollow", b"nosymfollow,ro"),
)


def options() -> dict[str, Case]:
    cases = {}
    for each in (
        *FLAGS,
        *REFUSED,
        *VALUES,
        *LISTS,
        b"blkdev",
        b"suid",
        b"dev",
        b"suid,dev,ro",
        b"suid,foo",
        b"suid,nosuid",
        b"suid,blksize=512",
    ):
        cases[f"-o {shown(each)}"] = mount(each)
        cases[f"root: -o {shown(each)}"] = mount(each, uid=ROOT)
    for each in (*NEWER_FLAGS, *NEWER_LISTS):
        cases[f"-o {shown(each)}"] = mount(each, **SINCE_COMM)
        cases[f"root: -o {shown(each)}"] = mount(each, uid=ROOT, **SINCE_COMM)
    for each in (
        b"allow_other",
        b"allow_root",
        b"allow_other,allow_other",
        b"allow_other,default_permissions",
        b"allow_other=1",
    ):
        cases[f"everybody may: -o {shown(each)}"] = mount(each, policy=Policy.ALLOW_OTHER)
    for size in (3900, 4000, 4200, 5000, 20000):
        long = b"fsname=" + b"a" * size
        cases[f"a fsname of {size} bytes"] = mount(long)
        cases[f"root: a fsname of {size} bytes"] = mount(long, uid=ROOT)
        cases[f"a subtype of {size} bytes"] = mount(b"subtype=" + b"a" * size)
        numbers = b",".join([b"max_read=4096"] * (size // 14))
        cases[f"{size} bytes of max_read"] = mount(numbers)
    for size in range(4020, 4060):
        cases[f"{size} bytes of data"] = mount(filler(size))
        cases[f"root: {size} bytes of data"] = mount(filler(size), uid=ROOT)
    cases["long data and an unknown option"] = mount(b",".join([b"max_read=4096"] * 400) + b",foo")
    cases["long options that the kernel never sees"] = mount(b",".join([b"fd=12345678"] * 500))
    cases["a mistake in options for a file"] = mount(b"foo", b"file")
    return cases


def filler(size: int) -> bytes:
    """Return options that take this many bytes of mount data."""
    return b",".join([b"max_read=7"] * (size // 11 - 1) + [b"max_read=" + b"0" * (size % 11 + 1) + b"7"])


def shown(text: bytes) -> str:
    return (
        text.decode("latin-1").encode("unicode_escape").decode()
        if len(text) < 120
        else f"{shown(text[:20])}… ({len(text)})"
    )


KINDS = (
    *(b"dir", b"file", b"foreign", b"foreign/own", b"open", b"sticky", b"sticky/own", b"own-sticky", b"read-only"),
    *(b"locked", b"locked/own", b"unsearchable", b"read-only-file", b"write-only-file", b"foreign-file", b"open-file"),
    *(
        b"link",
        b"link/",
        b"link/.",
        b"link/below",
        b"link/..",
        b"link-to-file",
        b"dangling",
        b"loop",
        b"loop/x",
        b"fifo",
    ),
    *(b"device", b"socket", b"nowhere", b"nowhere/", b"nowhere/x", b"file/", b"file/x", b"file/.", b"unsearchable/x"),
    *(b"dir/", b"dir//", b"./dir", b"dir/.", b"dir/..", b"dir/../other", b"dir/./below/", b".", b"..", b"/", b"//"),
    *(b"/work/dir", b"//work//dir//", b"/work/dir/below/..", b"/proc/sys", b"/dev", b"/tmp", b"/dev/null", b"/etc"),
    *(
        b"/proc/self/cwd/dir",
        b"/etc/passwd",
        b"fifo/",
        b"locked/own/x",
        b"locked/../dir",
        b"locked/.",
        b"link-to-file/x",
        b"unsearchable/",
    ),
    *(b"device/", b"dangling/", b"sticky/", b"open/", b"read-only/", b"./", b"../", b"../work/dir", b"-", b"..."),
    *(
        b"a" * 255,
        b"a" * 256,
        b"/".join([b"a"] * 2047),
        b"a/" * 2048,
        b"x" * 5000,
        b"dir" + b"/" * 4000,
        b"./" * 2040 + b"dir",
    ),
)


def mountpoints() -> dict[str, Case]:
    cases = {}
    for path in KINDS:
        cases[f"mount on {shown(path)}"] = mount(b"", path)
        if path not in (b"/", b"//", b"..", b"../"):  # these would remove the sandbox
            cases[f"root: mount on {shown(path)}"] = mount(b"", path, uid=ROOT)
        cases[f"unmount {shown(path)}"] = unmount(path)
        cases[f"root: unmount {shown(path)}"] = unmount(path, uid=ROOT)
    for path in (b"/proc/self/fd", b"/proc/self/map_files", b"/proc/thread-self/fd", b"/proc/self/fd/"):
        cases[f"mount on {shown(path)}"] = mount(b"", path)  # with other paths, messages contain the helper's own PID
        cases[f"root: mount on {shown(path)}"] = mount(b"", path, uid=ROOT)
    for name in (
        b"a b",
        b"a\nb",
        b"a\tb",
        b"a\\b",
        b"a\\040b",
        b"\xff\xfe",
        b"\xc3\xa4",
        b"a,b",
        b"%s",
        b"'",
        b"#",
        b"a" * 255,
        b" ",
        b"\n",
    ):
        made = Step("mkdir", (name,))
        cases[f"mount on the name {shown(name)}"] = mount(b"", name, setup=(made,))
        cases[f"mount below the name {shown(name)}"] = mount(
            b"", name + b"/x", setup=(made, Step("mkdir", (name + b"/x",)))
        )
        cases[f"unmount the name {shown(name)}"] = unmount(name, setup=(made, mounted(name)))
        cases[f"unmount the name {shown(name)} where nothing is mounted"] = unmount(name, setup=(made,))
        cases[f"a refusal that names {shown(name)}"] = mount(b"", name)
    for length in (4000, 4070, 4085, 4089, 4090, 4091):
        deep = deep_path(length)
        setup = (Step("mkdirs", (deep,)),)
        cases[f"mount on a path of {length} bytes"] = mount(b"", deep, setup=setup)
        cases[f"unmount a path of {length} bytes"] = unmount(deep, setup=setup)
    cases["mount on an absolute path of 4095 bytes"] = mount(
        b"", WORK + b"/" + deep_path(4089), setup=(Step("mkdirs", (deep_path(4089),)),)
    )
    home = WORK + b"/dir"
    for path in (b"below", b"./below", b".", b"../dir", b"..", b"/work/other", b"", b"below/.."):
        cases[f"in a directory: mount on {shown(path)}"] = mount(b"", path, cwd=home)
    gone: dict[str, Any] = {"cwd": WORK + b"/other", "cwd_deleted": True}
    for path in (b"x", b".", b"..", b"./x", b"../dir", b"/work/dir"):
        cases[f"in a directory that is gone: mount on {shown(path)}"] = mount(b"", path, uid=ROOT, **gone)
    cases["on a tmpfs of its own"] = mount(b"", setup=(Step("tmpfs", (b"dir",)),))
    cases["on a bind mount"] = mount(b"", setup=(Step("bind", (b"other", b"dir")),))
    cases["on a bind mount of a file"] = mount(b"", b"file", setup=(Step("bind", (b"open-file", b"file")),))
    return cases


def deep_path(length: int) -> bytes:
    """Return a relative path of this many bytes, in components of 200."""
    path = b"/".join([b"d" * 200] * (length // 201))
    return path + b"/" + b"e" * (length - len(path) - 1)


def limits() -> dict[str, Case]:
    cases = {}
    for uid in (USER, ROOT):
        who = "root: " if uid == ROOT else ""
        cases[f"{who}no mount is allowed"] = mount(b"", uid=uid, policy=Policy.NO_MOUNTS)
        cases[f"{who}no mount is allowed, and the options are wrong"] = mount(b"foo", uid=uid, policy=Policy.NO_MOUNTS)
        cases[f"{who}no mount is allowed, and the mountpoint is wrong"] = mount(
            b"", b"fifo", uid=uid, policy=Policy.NO_MOUNTS
        )
        cases[f"{who}one mount is allowed"] = mount(b"", uid=uid, policy=Policy.ONE_MOUNT)
    return cases


def second_mounts() -> dict[str, Case]:
    return {
        "a second mount where one is allowed": mount(b"", b"other", policy=Policy.ONE_MOUNT, setup=(mounted(),)),
        "a second mount after the first is gone": mount(
            b"", b"other", policy=Policy.ONE_MOUNT, setup=(mounted(), Step("umount", (b"dir",)), Step("die"))
        ),
        "root: a second mount where one is allowed": mount(
            b"", b"other", uid=ROOT, policy=Policy.ONE_MOUNT, setup=(mounted(),)
        ),
    }


def unmounts() -> dict[str, Case]:
    dead = Step("die")
    held = Step("hold", (b"dir",))
    cases = {}
    for flags in ((), (b"-q",), (b"-z",), (b"-q", b"-z")):
        with_flags = "".join(f" {flag.decode()}" for flag in flags)
        for who, uid in (("", USER), ("root: ", ROOT)):
            own = mounted(uid=uid)
            for name, setup in {
                "own": (own,),
                "own with names": (mounted(options=b"fsname=a b,subtype=c", uid=uid),),
                "dead": (own, dead),
                "busy": (own, held),
                "busy and dead": (own, dead, held),
                "one of two": (own, mounted(b"other", uid=uid)),
                "stacked": (mounted(b"dir", uid=uid), Step("bind", (b"other", b"dir"))),
                "not mounted": (),
                "a tmpfs": (Step("tmpfs", (b"dir",)),),
                "a bind mount": (Step("bind", (b"other", b"dir")),),
            }.items():
                cases[f"{who}-u{with_flags}: {name}"] = unmount(b"dir", *flags, uid=uid, setup=setup)
            cases[f"{who}-u{with_flags}: a file"] = unmount(
                b"file", *flags, uid=uid, setup=(mounted(b"file", uid=uid),)
            )
            cases[f"{who}-u{with_flags}: another user's"] = unmount(
                b"open", *flags, uid=uid, setup=(mounted(b"open", uid=ROOT if uid else USER),)
            )
            cases[f"{who}-u{with_flags}: made by the kernel alone"] = unmount(
                b"dir", *flags, uid=uid, setup=(Step("kernel_mount", (b"dir", uid)),)
            )
    cases["-u: another user's of a similar number"] = unmount(b"open", setup=(Step("kernel_mount", (b"open", 10000)),))
    cases["-u: through a link above"] = unmount(b"link/below", setup=(mounted(b"dir/below"),))
    cases["-u: a link to it"] = unmount(b"link", setup=(mounted(),))
    cases["-u: with a slash"] = unmount(b"dir/", setup=(mounted(),))
    cases["-u: an absolute path"] = unmount(b"/work/dir", setup=(mounted(),))
    cases["-u: below what is mounted"] = unmount(b"dir/below", setup=(mounted(b"dir/below"), mounted(b"other")))
    cases["-u: its parent was renamed"] = unmount(
        b"dir/below", setup=(mounted(b"dir/below"), Step("rename", (b"dir", b"moved")))
    )
    cases["-u: at its new place"] = unmount(
        b"moved/below", setup=(mounted(b"dir/below"), Step("rename", (b"dir", b"moved")))
    )
    cases["-u: a link has taken its parent's place"] = unmount(
        b"dir/below",
        setup=(mounted(b"dir/below"), Step("rename", (b"dir", b"moved")), Step("symlink", (b"moved", b"dir"))),
    )
    cases["-u: a copy by a bind mount"] = unmount(b"other", setup=(mounted(), Step("bind", (b"dir", b"other"))))
    for text in (b"9", b"x", b"", b"-1"):
        cases[f"-u: with a stale _FUSE_COMMFD={text.decode()}"] = unmount(
            b"dir", setup=(mounted(),), environment=((b"_FUSE_COMMFD", text),)
        )
    cases["-u: without any environment"] = unmount(b"dir", setup=(mounted(),), environment=())
    cases["-u: with everything closed"] = unmount(b"dir", setup=(mounted(),), closed=(0, 1, 2), comm=Comm.CLOSED)
    cases["-u: with options"] = call(b"-u", b"-o", b"foo", b"dir", setup=(mounted(),))
    cases["-u: in a parent that is not to be searched"] = unmount(
        b"locked/own", setup=(mounted(b"locked/own", uid=ROOT),)
    )
    cases["-u: with --auto-unmount"] = call(b"-u", b"--auto-unmount", b"dir", setup=(mounted(),), **SINCE_LONG)
    cases["-u: with --comm-fd"] = call(b"-u", b"--comm-fd=x", b"dir", setup=(mounted(),), **SINCE_COMM)
    cases["mount over one's own that is dead"] = mount(b"", setup=(mounted(), dead))
    cases["root: mount over one's own that is dead"] = mount(b"", uid=ROOT, setup=(mounted(uid=ROOT), dead))
    cases["mount over another user's"] = mount(b"", b"open", setup=(mounted(b"open", uid=ROOT),))
    return cases


def watchers() -> dict[str, Case]:
    """Return cases in which the FUSE program closes its comm socket when it ends, as programs do."""
    cases = {}
    for kind in (Comm.STREAM, Comm.SEQPACKET):
        cases[f"auto_unmount, {kind.value}"] = mount(b"auto_unmount", comm=kind, **SINCE_LONG)
        cases[f"auto_unmount for everybody, {kind.value}"] = mount(
            b"auto_unmount,allow_other", comm=kind, policy=Policy.ALLOW_OTHER
        )
    cases["auto_unmount with more"] = mount(b"ro,auto_unmount,fsname=a,subtype=b,default_permissions", **SINCE_LONG)
    cases["auto_unmount on a file"] = mount(b"auto_unmount", b"file", **SINCE_LONG)
    cases["auto_unmount with a subtype that mtab escapes"] = mount(b"auto_unmount,subtype=a#b", **TARGET)
    cases["auto_unmount that is refused"] = mount(b"auto_unmount,foo")
    cases["root: auto_unmount"] = mount(b"auto_unmount", uid=ROOT)
    cases["auto_unmount under another name"] = Case(
        (b"/usr/bin/fusermount3", b"-o", b"auto_unmount", b"dir"), **SINCE_LONG
    )
    cases["auto_unmount with all of 0 to 2 closed"] = mount(b"auto_unmount", closed=(0, 1, 2), **SINCE_LONG)
    cases["--auto-unmount of nothing"] = call(b"--auto-unmount", b"--", b"dir", **SINCE_LONG)
    cases["--auto-unmount of a mount of one's own"] = call(
        b"--auto-unmount", b"--", b"dir", setup=(Step("kernel_mount", (b"dir", USER)),), **SINCE_LONG
    )
    cases["root: --auto-unmount of a mount of one's own"] = call(
        b"--auto-unmount", b"--", b"dir", uid=ROOT, setup=(Step("kernel_mount", (b"dir", ROOT)),), **SINCE_LONG
    )
    cases["--auto-unmount of another file system"] = call(
        b"--auto-unmount", b"--", b"dir", setup=(Step("tmpfs", (b"dir",)),), **SINCE_LONG
    )
    cases["--auto-unmount without a comm socket"] = call(b"--auto-unmount", b"--", b"dir", environment=(), **SINCE_LONG)
    cases["--auto-unmount without a mountpoint"] = call(b"--auto-unmount", **SINCE_LONG)
    cases["--auto-unmount of what is not there"] = call(b"--auto-unmount", b"nowhere/x", **SINCE_LONG)
    cases["--auto with options"] = call(b"--auto", b"-o", b"foo", b"dir", **SINCE_LONG)
    return cases


def deviating() -> dict[str, Case]:
    """Return cases that exist only as examples of a deviation."""
    no_mtab = Step("unlink", (b"/etc/mtab",))
    return {
        "a uid that passwd doesn't know mounts": mount(b"", b"open", uid=STRANGER),
        "a uid that passwd doesn't know unmounts": unmount(
            b"open", uid=STRANGER, setup=(Step("kernel_mount", (b"open", STRANGER)),)
        ),
        "the user unmounts without an mtab": unmount(b"dir", setup=(mounted(), no_mtab)),
        "the user mounts without an mtab": mount(b"", setup=(no_mtab,), **TARGET),
        "fuse.conf is garbage": mount(b"", setup=(Step("fuse_conf", (b"what is this\nuser_allow_other",)),)),
        "fuse.conf is not readable": mount(b"", setup=(Step("fuse_conf", (b"user_allow_other\n", 0o600)),)),
        "fuse.conf of the container allows allow_other": mount(
            b"allow_other", setup=(Step("fuse_conf", (b"user_allow_other\n",)),)
        ),
        "there is no /dev/fuse": mount(b"", setup=(Step("unlink", (b"/dev/fuse",)),)),
        "FUSE_KERN_DEVICE names another device": mount(
            b"", environment=((b"_FUSE_COMMFD", b"3"), (b"FUSE_KERN_DEVICE", b"/dev/null")), **TARGET
        ),
        "--sync-init": call(b"--sync-init", b"-o", b"foo", b"dir"),
    }


GROUPS = {
    "command line": command_lines,
    "version": versions,
    "comm socket": comm_sockets,
    "options": options,
    "mountpoint": mountpoints,
    "limits": limits,
    "second mount": second_mounts,
    "unmount": unmounts,
    "watcher": watchers,
    "deviating": deviating,
}


def corpus() -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for group, make in GROUPS.items():
        for name, case in make().items():
            assert name not in cases, name
            cases[f"{group}: {name}"] = replace(case, since=max(case.since, oldest(case)))
    return cases


#: Flags that are newer than 3.14.0, with the first release among Debian's that has them.
YOUNGER = {
    **dict.fromkeys(
        (b"nodiratime", b"diratime", b"norelatime", b"relatime", b"nostrictatime", b"strictatime"), (3, 17)
    ),
    **dict.fromkeys((b"lazytime", b"nolazytime", b"symfollow", b"nosymfollow"), (3, 17)),
}


def oldest(case: Case) -> tuple[int, int]:
    """Return the first release that has the options of the case."""
    items = [item for argument in case.argv for item in argument.split(b",")]
    return max((YOUNGER.get(item, (3, 14)) for item in items), default=(3, 14))


CORPUS = corpus()
