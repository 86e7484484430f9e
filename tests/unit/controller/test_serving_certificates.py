"""The webhook's certificates: who trusts whom, and when what is renewed."""

from __future__ import annotations

import datetime
from itertools import pairwise

import pytest
from cryptography import x509
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError

from fusermount3_controller.serving_certificates import AUTHORITY_LIFE, SETTLE, Certificates, due

HOST = "fusermount3-controller.fusermount3-proxy.svc"
NOW = datetime.datetime(2026, 11, 25, tzinfo=datetime.UTC)
DAY, HOUR = datetime.timedelta(days=1), datetime.timedelta(hours=1)


def made(current: Certificates | None = None, now: datetime.datetime = NOW) -> Certificates:
    result = due(current, HOST, now)
    assert result is not None
    return result


def accepts(bundle: bytes, certificate: bytes, now: datetime.datetime, host: str = HOST) -> bool:
    """Return whether a client that trusts the bundle accepts the certificate."""
    store = Store(x509.load_pem_x509_certificates(bundle))
    verifier = PolicyBuilder().store(store).time(now).build_server_verifier(x509.DNSName(host))
    try:
        verifier.verify(x509.load_pem_x509_certificate(certificate), [])
    except VerificationError:
        return False
    return True


def test_the_api_server_accepts_the_certificate_for_this_host_only() -> None:
    first = made()
    assert accepts(first.authorities, first.certificate, NOW)
    assert not accepts(first.authorities, first.certificate, NOW, "other.fusermount3-proxy.svc")
    assert not accepts(made().authorities, first.certificate, NOW)
    assert Certificates.of(first.data()) == first
    assert Certificates.of({}) is None


def test_a_clock_that_is_behind_accepts_it() -> None:
    first = made()
    assert accepts(first.authorities, first.certificate, NOW - datetime.timedelta(minutes=4))


def test_nothing_is_due_for_two_thirds_of_its_life() -> None:
    first = made()
    assert due(first, HOST, NOW + 59 * DAY) is None
    second = made(first, NOW + 61 * DAY)
    assert second.authorities == first.authorities
    assert second.expiry() == NOW + 151 * DAY
    assert first.expiry() == NOW + 90 * DAY


@pytest.mark.parametrize("name", Certificates._fields)
def test_what_can_not_be_used_is_made_anew(name: str) -> None:
    first, other = made(), made()
    for value in (b"", b"nonsense", getattr(other, name)):
        again = made(first._replace(**{name: value}))
        assert accepts(again.authorities, again.certificate, NOW)
        assert due(again, HOST, NOW) is None


def test_another_host_and_an_expired_certificate_are_reasons_to_make_all_anew() -> None:
    first = made()
    again = due(first, "other.svc", NOW)
    assert again is not None and accepts(again.authorities, again.certificate, NOW, "other.svc")
    later = NOW + 91 * DAY
    assert not accepts(first.authorities, first.certificate, later)
    renewed = made(first, later)
    assert accepts(renewed.authorities, renewed.certificate, later)


def test_whoever_notices_an_hour_late_accepts_and_is_accepted_all_the_time() -> None:
    """Over the change of the authority: at any time, the newest and the one of an hour ago get on with each other."""
    current = made()
    history = [(NOW, current)]
    now = NOW
    end = NOW + AUTHORITY_LIFE * 2 / 3 + 2 * DAY
    while now < end:
        # A day at a time, and in the days about the authority's change 10 minutes.
        is_near = abs(now - (NOW + AUTHORITY_LIFE * 2 / 3)) < 2 * DAY
        now += datetime.timedelta(minutes=10) if is_near else DAY
        current = due(current, HOST, now) or current
        history.append((now, current))
    assert len(x509.load_pem_x509_certificates(current.authorities)) == 1
    assert current.authorities != history[0][1].authorities
    assert max(len(x509.load_pem_x509_certificates(each.authorities)) for _, each in history) == 2
    versions = [history[0], *(after for before, after in pairwise(history) if before[1] != after[1])]
    for (_, before), (now, after) in pairwise(versions):
        for bundle in (before.authorities, after.authorities):
            for certificate in (before.certificate, after.certificate):
                assert accepts(bundle, certificate, now)
    # No two changes of the trust or of who signs are nearer to each other than the time to notice.
    for (earlier, _), (later, _) in pairwise(versions):
        assert later - earlier >= SETTLE
