"""Which account is charged for a caller, and how much one account may ask for."""

from __future__ import annotations

import errno
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusermount3_broker.front.decisions import limits, subordinate_ids
from fusermount3_broker.front.decisions.limits import (
    Account,
    AccountName,
    Accounts,
    Bucket,
    LimitReached,
    Refusals,
    account_of,
)
from fusermount3_broker.service.configuration import Configuration, Limits

ID = "0123456789abcdef" * 4
POD = "3f2c8b1e-5f0a-4f4e-9d7e-0d9c1f6a2b3c"
IN_SYSTEMD = POD.replace("-", "_")

# The account of a caller


CONTAINERS = [
    f"/machine.slice/libpod-{ID}.scope",
    f"/libpod_parent/libpod-{ID}",
    f"/system.slice/docker-{ID}.scope",
    f"/docker/{ID}",
    f"/system.slice/web.service/libpod-payload-{ID}",
    f"/system.slice/cri-containerd-{ID}.scope",
    f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{IN_SYSTEMD}.slice",
    f"/kubepods.slice/kubepods-pod{IN_SYSTEMD}.slice",
    f"/kubepods/besteffort/pod{POD}",
    f"/kubepods-besteffort-pod{IN_SYSTEMD}.slice:cri-containerd:{ID}",
    f"/../../machine.slice/libpod-{ID}.scope",
    "/machine.slice/machine-debian.scope",
    "/machine.slice/systemd-nspawn@debian.service",
    "/machine.slice/anything",
    "/lxc.payload.web",
    "/lxc/web",
]
INSIDE = ["", "/", "/container", "/init.scope", f"/{ID}", "/user.slice/user-7.slice", f"/docker/{ID[::-1]}"]


def test_a_name_with_a_carriage_return_is_one_name() -> None:
    """The kernel writes every byte of it except a newline unchanged (kernel/cgroup/cgroup.c, cgroup_mkdir)."""
    below = b"x\r" + b"y" * 100 + b".service"
    assert account_of(b"0::/system.slice/web.service/%b\n" % below, 7) == "uid 7 in /system.slice/web.service"


@pytest.mark.parametrize("below", ["user-8.slice", "user.slice/user-8.slice"])
def test_a_service_is_not_taken_for_a_user(below: str) -> None:
    """A service may make cgroups of any name below its own, and the user would be charged for it."""
    cgroup = f"0::/system.slice/web.service/{below}/x\n"
    assert account_of(cgroup.encode(), 7) == "uid 7 in /system.slice/web.service"


@pytest.mark.parametrize("line", ["0::%s", "12:pids:%s\n1:name=systemd:%s\n0::/"], ids=["version 2", "version 1"])
@pytest.mark.parametrize("inside", INSIDE)
@pytest.mark.parametrize("path", CONTAINERS)
def test_a_container_is_one_account_whatever_it_makes_inside(path: str, inside: str, line: str) -> None:
    cgroup = line.replace("%s", path + inside).encode() + b"\n"
    for uid in (0, 1000, 100_000):
        assert account_of(cgroup, uid) == f"container {path}"
    assert limits.container_of(account_of(cgroup, 0)) == path.rpartition("/")[2]


@pytest.mark.parametrize("container", CONTAINERS)
def test_what_is_in_a_container_is_the_outermosts(container: str) -> None:
    outer = f"/docker/{ID[::-1]}"
    assert account_of(f"0::{outer}{container}\n".encode(), 0) == f"container {outer}"


def test_containers_of_a_pod_are_one_account() -> None:
    pod = f"/kubepods.slice/kubepods-pod{IN_SYSTEMD}.slice"
    paths = [f"0::{pod}/cri-containerd-{each}.scope\n" for each in (ID, ID[::-1])]
    assert {account_of(path.encode(), 0) for path in paths} == {f"container {pod}"}


@pytest.mark.parametrize(
    "below",
    [
        "",
        "/session-3.scope",
        "/user@1000.service/app.slice/x.service",
        f"/user@1000.service/user.slice/libpod-{ID}.scope",
    ],
)
@pytest.mark.parametrize("uid", [1000, 1001, 165_536])
def test_what_a_user_has_started_is_the_users(below: str, uid: int) -> None:
    assert account_of(f"0::/user.slice/user-1000.slice{below}\n".encode(), uid) == "user 1000"


def test_root_in_a_users_session_is_root() -> None:
    path = "/user.slice/user-1000.slice/session-3.scope"
    assert account_of(f"0::{path}\n".encode(), 0) == f"uid 0 in {path}"


@pytest.mark.parametrize(
    ("cgroup", "uid", "account"),
    [
        (b"", 1000, "uid 1000"),
        (b"0::/\n", 0, "uid 0"),
        (b"0::/init.scope\n", 0, "uid 0 in /init.scope"),
        (b"0::/system.slice/cron.service\n", 1000, "uid 1000 in /system.slice/cron.service"),
        (b"0::/system.slice/x.service/below/y.service\n", 5, "uid 5 in /system.slice/x.service"),
        (b"1:name=systemd:/system.slice/x.service\n0::/\n", 5, "uid 5 in /system.slice/x.service"),
        (b"0::/user.slice/user-0.slice/session-1.scope\n", 7, "uid 7 in /user.slice/user-0.slice/session-1.scope"),
        (b"0::/a\xffb.service\n", 5, "uid 5 in /a\\xffb.service"),
        (b"0::/%b\n" % ID[:63].encode(), 5, "uid 5"),
        (b"garbage", 5, "uid 5"),
    ],
)
def test_others_are_known_by_uid_and_service(cgroup: bytes, uid: int, account: str) -> None:
    assert account_of(cgroup, uid) == account
    assert limits.container_of(AccountName(account)) == ""


@given(st.binary(max_size=300), st.integers(0, 2**32 - 2))
def test_every_process_has_an_account(cgroup: bytes, uid: int) -> None:
    account = account_of(cgroup, uid)
    assert account.split(" ")[0] in ("container", "user", "uid")
    assert account.isprintable() or not cgroup.isascii() or any(byte < 32 or byte == 127 for byte in cgroup)


@given(st.text("abcdef0123456789/.-_:@", max_size=80), st.integers(0, 2**31))
def test_no_name_that_a_container_gives_makes_another_account(inside: str, uid: int) -> None:
    path = f"/machine.slice/libpod-{ID}.scope"
    assert account_of(f"0::{path}/{inside}\n".encode(), uid) == f"container {path}"


@pytest.mark.parametrize(
    ("account", "word"),
    [("container /x", b"container"), ("network 5", b"container"), ("user 5", b"user"), ("uid 5", b"user")],
)
def test_the_word_for_who_pays(account: str, word: bytes) -> None:
    assert limits.kind_of_holder(AccountName(account)) == word


# The pod of a caller

PODS = [
    f"/kubepods/besteffort/pod{POD}/{ID}",
    f"/kubepods/pod{POD}/{ID}",
    f"/kubepods/burstable/pod{POD}",
    f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{IN_SYSTEMD}.slice/cri-containerd-{ID}.scope",
    f"/kubepods.slice/kubepods-pod{IN_SYSTEMD}.slice/crio-{ID}.scope",
    f"/kubelet/kubepods/besteffort/pod{POD}/{ID}",
    f"/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-besteffort.slice/"
    f"kubelet-kubepods-besteffort-pod{IN_SYSTEMD}.slice/cri-containerd-{ID}.scope",
    f"/../../pod{POD}/{ID}",
    f"/../../../burstable/pod{POD}/{ID}",
    f"/../../../kubepods-burstable.slice/kubepods-burstable-pod{IN_SYSTEMD}.slice/cri-containerd-{ID}.scope",
    f"/../../kubepods-besteffort-pod{IN_SYSTEMD}.slice/cri-containerd-{ID}.scope",
]
STATIC_POD = "0123456789abcdef0123456789abcdef"
OTHER_POD = POD.replace("3", "4")


@pytest.mark.parametrize("inside", ["", "/container", f"/kubepods/pod{OTHER_POD}", f"/../pod{OTHER_POD}"])
@pytest.mark.parametrize("line", ["0::%s", "12:pids:%s\n5:devices:/\n1:name=systemd:%s\n0::/"])
@pytest.mark.parametrize("path", PODS)
def test_a_containers_pod_is_known_whatever_it_makes_inside(path: str, line: str, inside: str) -> None:
    assert limits.pod_of(line.replace("%s", path + inside).encode() + b"\n") == POD


def test_a_static_pods_uid_has_no_dashes() -> None:
    assert limits.pod_of(f"0::/kubepods/burstable/pod{STATIC_POD}/{ID}\n".encode()) == STATIC_POD


@pytest.mark.parametrize(
    "path",
    [
        "/",
        f"/user.slice/user-1000.slice/user@1000.service/kubepods/pod{POD}",
        f"/user.slice/user-1000.slice/user@1000.service/kubepods.slice/kubepods-pod{IN_SYSTEMD}.slice",
        f"/user.slice/user-1000.slice/session-1.scope/kubepods/besteffort/pod{POD}",
        f"/system.slice/web.service/kubepods/besteffort/pod{POD}",
        f"/docker/{ID}/kubepods/besteffort/pod{POD}",
        f"/machine.slice/libpod-{ID}.scope/kubepods/pod{POD}",
        f"/machine.slice/anything/kubepods/pod{POD}",
        f"/lxc/web/kubepods/pod{POD}",
        f"/../../../user.slice/user-1000.slice/kubepods-pod{IN_SYSTEMD}.slice",
        f"/../../../system.slice/docker-{ID}.scope/pod{POD}",
        f"/pod{POD}",
        f"/anything/pod{POD}",
        f"/kubepods/podsomething/pod{POD}x",
    ],
)
def test_what_others_call_a_pod_in_a_cgroup_of_their_own_is_none(path: str) -> None:
    assert limits.pod_of(f"0::{path}\n".encode()) == ""


def test_a_process_in_two_pods_is_in_none() -> None:
    assert limits.pod_of(f"2:pids:/kubepods/pod{POD}\n1:memory:/kubepods/pod{OTHER_POD}\n".encode()) == ""


@given(st.binary(max_size=300))
def test_any_cgroup_is_of_a_pod_or_of_none(cgroup: bytes) -> None:
    limits.pod_of(cgroup)


# The bucket


def test_a_bucket_gives_its_burst_at_once_and_then_its_rate() -> None:
    bucket = Bucket()
    assert [bucket.take(10, 3, 100.0) for _ in range(5)] == [True] * 3 + [False] * 2
    assert [bucket.take(10, 3, 100.11) for _ in range(2)] == [True, False]
    assert [bucket.take(10, 3, 1e9) for _ in range(5)] == [True] * 3 + [False] * 2


@given(st.integers(1, 1000), st.integers(1, 100), st.lists(st.floats(0, 3, allow_nan=False), min_size=1, max_size=200))
def test_a_bucket_never_gives_more_than_its_burst_and_its_rate(rate: int, burst: int, pauses: list[float]) -> None:
    bucket, now = Bucket(), 5.0
    taken: list[float] = []
    for pause in pauses:
        now += pause
        if bucket.take(rate, burst, now):
            taken.append(now)
        assert 0 <= bucket.taken <= burst
    for first, begun in enumerate(taken):
        for last in range(first, len(taken)):
            assert last - first + 1 <= burst + rate * (taken[last] - begun) + 1e-6


def test_who_asks_for_much_at_once_waits_for_its_turn() -> None:
    accounts, limited = Accounts(1000), Configuration(limits=Limits(requests_per_second=100, burst=200))
    pauses = []
    for _ in range(100):
        account = accounts.enter(AccountName("somebody"), limited, 5.0)
        pauses.append(account.pause(limited, 5.0))
    assert pauses[:25] == [0.0] * 25
    assert pauses[25:] == pytest.approx([number / 100 for number in range(1, 76)])
    assert accounts.enter(AccountName("another"), limited, 5.0).pause(limited, 5.0) == 0.0
    assert accounts.enter(AccountName("somebody"), limited, 5.9).pause(limited, 5.9) == 0.0


def test_nobody_waits_for_its_turn_where_the_rate_is_not_limited() -> None:
    accounts, unlimited = Accounts(1000), Configuration(limits=Limits(requests_per_second=0))
    assert {accounts.enter(AccountName("somebody"), unlimited, 5.0).pause(unlimited, 5.0) for _ in range(100)} == {0.0}


@given(st.integers(1, 1000), st.integers(1, 50), st.integers(1, 300))
def test_a_bucket_refuses_nobody_who_keeps_to_its_rate(rate: int, burst: int, requests: int) -> None:
    bucket = Bucket()
    assert all(bucket.take(rate, burst, 7.0 + 1.001 * number / rate) for number in range(requests))


@given(st.integers(1, 100), st.integers(1, 20), st.integers(1, 100))
def test_a_refusal_costs_nothing(rate: int, burst: int, refusals: int) -> None:
    bucket = Bucket()
    while bucket.take(rate, burst, 1.0):
        pass
    assert not any(bucket.take(rate, burst, 1.0) for _ in range(refusals))
    assert bucket.take(rate, burst, 1.0 + 1.001 / rate)


# The accounts


def configured(**changes: int) -> Configuration:
    values = {"mounts": 0, "requests_per_second": 0, "burst": 1, "concurrent": 0} | changes
    return replace(Configuration(), limits=Limits(**values), source=b"/etc/b.toml")


A, B = AccountName("container /a"), AccountName("uid 1000")


def refusal(
    accounts: Accounts, name: AccountName, configuration: Configuration, now: float = 0.0
) -> tuple[str, int, str]:
    with pytest.raises(LimitReached) as caught:
        accounts.enter(name, configuration, now)
    return caught.value.limit, caught.value.errno, caught.value.text.decode()


def test_an_account_has_so_many_at_once() -> None:
    accounts, configuration = Accounts(100), configured(concurrent=2)
    first = accounts.enter(A, configuration, 0.0)
    assert accounts.enter(A, configuration, 0.0) is first
    text = "too many requests at once from this container; limits.concurrent=N can be set in /etc/b.toml"
    assert refusal(accounts, A, configuration) == ("limits.concurrent", errno.EAGAIN, text)
    accounts.enter(B, configuration, 0.0)
    accounts.leave(first)
    accounts.enter(A, configuration, 0.0)


def test_an_account_has_so_many_in_a_second() -> None:
    accounts, configuration = Accounts(100), configured(requests_per_second=1, burst=2)
    for _ in range(2):
        accounts.leave(accounts.enter(B, configuration, 0.0))
    text = "too many requests per second from this user; limits.requests_per_second=N can be set in /etc/b.toml"
    assert refusal(accounts, B, configuration) == ("limits.requests_per_second", errno.EAGAIN, text)
    accounts.enter(A, configuration, 0.0)
    accounts.enter(B, configuration, 1.0)


def test_without_limits_there_is_no_limit() -> None:
    accounts = Accounts(10**6)
    for _ in range(5000):
        accounts.enter(A, configured(), 0.0)
    limits.check_mounts(Account(A), 10**6, configured())


@given(st.integers(1, 300), st.integers(1, 12))
def test_an_account_that_takes_all_it_can_leaves_as_much_to_others(most: int, greedy: int) -> None:
    accounts, configuration = Accounts(most), configured()
    left = most
    for number in range(greedy):
        taken = 0
        with pytest.raises(LimitReached, match="max_connections=N can be set"):
            while True:
                accounts.enter(AccountName(f"uid {number}"), configuration, 0.0)
                taken += 1
        left -= taken
        assert 0 <= left <= taken <= left + 1


def test_an_account_has_so_many_mounts() -> None:
    configuration = configured(mounts=3)
    limits.check_mounts(Account(A), 2, configuration)
    with pytest.raises(LimitReached) as caught:
        limits.check_mounts(Account(A), 3, configuration)
    text = b"too many FUSE filesystems mounted by this container; limits.mounts=N can be set in /etc/b.toml"
    assert (caught.value.errno, caught.value.text, caught.value.limit) == (errno.ENOSPC, text, "limits.mounts")


@given(st.lists(st.tuples(st.integers(0, 40), st.booleans(), st.floats(0, 1)), max_size=300))
def test_what_is_counted_is_what_is_there(steps: list[tuple[int, bool, float]]) -> None:
    """Callers enter and leave; no account that is served is forgotten, and each account has its own count."""
    accounts, configuration, now = Accounts(50), configured(concurrent=5, requests_per_second=20, burst=10), 0.0
    inside: list[Account] = []
    for number, enters, pause in steps:
        now += pause
        if enters:
            name = AccountName(f"uid {number}")
            try:
                account = accounts.enter(name, configuration, now)
            except LimitReached:
                continue
            assert account.name == name
            inside.append(account)
        elif inside:
            accounts.leave(inside.pop(number % len(inside)))
        assert accounts._served == len(inside) <= 50
        for account in inside:
            assert account.served == sum(each.name == account.name for each in inside) <= 5
            assert accounts._accounts[account.name] is account


def test_accounts_of_which_nothing_is_to_be_remembered_are_dropped() -> None:
    accounts, configuration = Accounts(100), configured(requests_per_second=100, burst=10)
    for number in range(1000):
        accounts.leave(accounts.enter(AccountName(f"uid {number}"), configuration, number * 1.0))
    assert len(accounts) <= 2


def test_there_are_never_too_many_accounts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MOST_ACCOUNTS", 50)
    accounts, configuration = Accounts(20), configured(requests_per_second=1, burst=10)
    stays = accounts.enter(A, configuration, 0.0)
    for number in range(1000):
        accounts.leave(accounts.enter(AccountName(f"uid {number}"), configuration, 0.0))
        assert len(accounts) <= 50
    assert accounts.enter(A, configuration, 0.0) is stays


# The log


def test_refusals_are_counted_for_each_account_and_limit_until_they_are_logged() -> None:
    refusals = Refusals()
    full = LimitReached(errno.EAGAIN, "limits.concurrent", b"x", configured())
    fast = LimitReached(errno.EAGAIN, "limits.requests_per_second", b"y", configured())
    told = ((A, full, "1"), (A, fast, "2"), (B, full, "3"), (A, full, "4"))
    assert [refusals.add(*each) for each in told] == ["1", "2", "3", "1"]
    taken = [(each.account, each.reason, each.id, each.requests) for each in refusals.take()]
    assert taken == [(A, full, "1", 2), (A, fast, "2", 1), (B, full, "3", 1)]
    assert refusals.take() == []
    assert refusals.add(A, full, "5") == "5"


SUBORDINATES = subordinate_ids.parse(b"ann:100000:65536\n", b"ann:x:1000:1000:::\n")


@pytest.mark.parametrize("cgroup", [b"0::/\n", b"0::/system.slice/cron.service\n", b""])
def test_a_user_pays_for_all_subordinate_uids(cgroup: bytes) -> None:
    own = account_of(cgroup, 1000, SUBORDINATES)
    assert own == account_of(cgroup, 1000)
    assert {account_of(cgroup, 100_000 + number, SUBORDINATES) for number in range(0, 65536, 257)} == {own}
    assert account_of(cgroup, 165_536, SUBORDINATES) != own


def test_a_container_with_subordinate_uids_pays_itself() -> None:
    cgroup = b"0::/machine.slice/libpod-%b.scope\n" % (b"0123456789abcdef" * 4)
    assert account_of(cgroup, 100_000, SUBORDINATES) == account_of(cgroup, 0)


def test_who_has_a_subordinate_uid_is_called_a_user() -> None:
    nobodys = subordinate_ids.parse(b"ldap:100000:65536\n", b"")
    assert limits.kind_of_holder(account_of(b"0::/\n", 100_001, nobodys)) == b"user"
