"""Strategies for argument vectors, option strings and paths: the words of the contract, and noise."""

from __future__ import annotations

import posixpath

from hypothesis import strategies as st

from tests.differential.corpus import FLAGS, NEWER_FLAGS, REFUSED, VALUES, YOUNGER, mount, mounted, unmount
from tests.differential.model import PROGRAM, ROOT, USER, WORK, Case, Policy, Step

USERS = st.sampled_from((USER, ROOT))

noise = st.lists(
    st.sampled_from((b",", b"\\", b"=", b"x-", b"-", b"a", b" ", b"\n", b"\xff", b"ro", b"fsname=", b"#")), max_size=8
)
values = st.one_of(
    st.tuples(st.sampled_from((b"fsname=", b"subtype=")), noise.map(b"".join)).map(b"".join),
    st.tuples(
        st.sampled_from((b"max_read=", b"blksize=", b"fd=", b"rootmode=", b"user_id=", b"group_id=")),
        st.sampled_from(
            (b"", b"0", b"010", b"08", b"0x1f", b"+1", b"-1", b"4096", b"4294967295", b"4294967296", b"1k", b"x")
        ),
    ).map(b"".join),
)


def flags(release: tuple[int, int]) -> st.SearchStrategy[bytes]:
    """Return a strategy for the flags that the release has."""
    return st.sampled_from([flag for flag in (*FLAGS, *NEWER_FLAGS) if YOUNGER.get(flag, (3, 14)) <= release])


def option_strings(release: tuple[int, int]) -> st.SearchStrategy[bytes]:
    """Return a strategy for options: usually as a FUSE library would send them, sometimes not."""
    good = st.one_of(flags(release), values, st.sampled_from(VALUES))
    odd = [st.sampled_from(REFUSED), st.sampled_from((b"suid", b"dev", b"blkdev", b"allow_other"))]
    if release >= (3, 17):
        odd += [
            st.just(b"auto_unmount"),
            st.just(b""),
            st.builds(b"x-%b".__mod__, noise.map(b"".join)),
            noise.map(b"".join),
        ]
    usual = st.lists(good, max_size=6)
    unusual = st.lists(st.one_of(good, *odd), max_size=6)
    return st.one_of(usual, unusual).map(b",".join).filter(lambda text: release >= (3, 18) or not trips(text))


def trips(text: bytes) -> bool:
    """Whether older releases mishandle it: a leading comma, ``x-``, or a source that mount(8) takes for an option."""
    return text.startswith(b",") or b"x-" in text or b"=-" in text


def mounts(release: tuple[int, int]) -> st.SearchStrategy[Case]:
    return st.builds(
        lambda options, uid, policy: mount(options, uid=uid, policy=policy),
        option_strings(release),
        USERS,
        st.sampled_from((Policy.DEFAULT, Policy.DEFAULT, Policy.ALLOW_OTHER)),
    )


words = (
    *(
        b"-u",
        b"-z",
        b"-q",
        b"-o",
        b"-uz",
        b"-zu",
        b"-uqz",
        b"-qu",
        b"-oro",
        b"-qo",
        b"-x",
        b"-ux",
        b"--",
        b"-",
        b"",
        b"-V",
        b"-h",
    ),
    *(b"dir", b"other", b"file", b"nowhere", b"/work/other", b"dir/", b"ro", b"foo", b"ro,noexec", b"3", b"9", b"x"),
)
long_options = (b"unmount", b"lazy", b"quiet", b"help", b"version", b"options", b"auto-unmount", b"comm-fd")
#: Abbreviations, without the first letters of --sync-init, with which the proxy waits for the FUSE program.
long_words = st.builds(
    lambda name, length, value: b"--" + name[:length] + value,
    st.sampled_from((*long_options, b"foo", b"optionsx")),
    st.integers(1, 12),
    st.sampled_from((b"", b"", b"", b"=", b"=3", b"=ro", b"=foo")),
)
letters = st.lists(st.sampled_from((b"u", b"z", b"q", b"o", b"x", b"-", b"\xe4")), min_size=1, max_size=5)
clusters = letters.map(lambda found: b"-" + b"".join(found)).filter(lambda word: not word.startswith(b"--"))
vectors = st.lists(st.one_of(st.sampled_from(words), st.sampled_from(words), long_words, clusters), max_size=6)
programs = st.sampled_from((PROGRAM, PROGRAM, b"/usr/bin/fusermount3", b"x\ny"))


def invocations() -> st.SearchStrategy[Case]:
    """Return a strategy for any arguments, with an existing mount; for the newest release, which has all options."""
    return st.builds(
        lambda program, arguments, uid: Case(
            (program, *arguments), uid, setup=(mounted(b"other", uid=uid), Step("die"))
        ),
        programs,
        vectors,
        USERS,
    )


components = st.sampled_from(
    (
        *(
            b"dir",
            b"dir",
            b"other",
            b"below",
            b"file",
            b"link",
            b"link-to-file",
            b"dangling",
            b"fifo",
            b"foreign",
            b"own",
        ),
        *(
            b"open",
            b"sticky",
            b"own-sticky",
            b"read-only",
            b"..",
            b".",
            b"",
            b"nowhere",
            b"a\\b",
            b"\xff",
            b"loop",
            b"foreign-file",
        ),
    )
)
paths = st.builds(
    lambda start, found, end: start + b"/".join(found) + end,
    st.sampled_from((b"", b"", b"/work/", b"//work/")),
    st.lists(components, min_size=1, max_size=5),
    st.sampled_from((b"", b"", b"/", b"//", b"/.")),
)


def spares_the_root(path: bytes) -> bool:
    """Whether root may mount there without removing the sandbox. The links of the tree stay on their level."""
    return posixpath.normpath(posixpath.join(WORK, path)) not in (b"/", b"//")


def places() -> st.SearchStrategy[Case]:
    """Return a strategy for mounts and unmounts anywhere in the tree."""
    setup = (mounted(b"file"),)  # not a directory: no program serves it, and a process that entered it would hang
    return st.one_of(
        st.builds(lambda path: mount(b"", path), paths),
        st.builds(lambda path: mount(b"", path, uid=ROOT), paths.filter(spares_the_root)),
        st.builds(
            lambda path, flags: unmount(path, *flags, setup=setup), paths, st.sampled_from(((), (b"-q",), (b"-z",)))
        ),
        st.builds(lambda path: unmount(path, uid=ROOT, setup=(mounted(b"file", uid=ROOT),)), paths),
    )
