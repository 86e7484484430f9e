"""The webhook's certificate authority and serving certificate: made, and renewed before they expire. Pure.

They are the data of one Secret that all replicas share, and say by themselves when they were made, so nothing else has
to be remembered. A new authority is trusted for an hour before it signs, and an old one for an hour after: so long may
the API server and another replica take to notice.
"""

import datetime
from collections.abc import Mapping
from typing import NamedTuple

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

#: The keys of the Secret's data; those of the certificate are named as in the type kubernetes.io/tls.
AUTHORITIES, AUTHORITY_KEY, CERTIFICATE, KEY = "ca.crt", "ca.key", "tls.crt", "tls.key"

AUTHORITY_LIFE = datetime.timedelta(days=3650)
CERTIFICATE_LIFE = datetime.timedelta(days=90)
#: How long what is new is trusted before it is used, and what is old after it was.
SETTLE = datetime.timedelta(hours=1)
#: How far the clock of an API server may be behind.
_SKEW = datetime.timedelta(minutes=5)
_COMMON_NAME = "fusermount3-controller"

_Key = ec.EllipticCurvePrivateKey


class Certificates(NamedTuple):
    """What the Secret has, as PEM; `authorities` are all that are to be trusted, the newest last."""

    authorities: bytes
    authority_key: bytes
    certificate: bytes
    key: bytes

    @classmethod
    def of(cls, data: Mapping[str, bytes]) -> "Certificates | None":
        """Return what is in the Secret; None if that is not all of it."""
        try:
            return cls(data[AUTHORITIES], data[AUTHORITY_KEY], data[CERTIFICATE], data[KEY])
        except KeyError:
            return None

    def data(self) -> dict[str, bytes]:
        return dict(zip((AUTHORITIES, AUTHORITY_KEY, CERTIFICATE, KEY), self, strict=True))

    def expiry(self) -> datetime.datetime:
        """Return when the serving certificate expires."""
        return x509.load_pem_x509_certificate(self.certificate).not_valid_after_utc


def due(current: Certificates | None, host: str, now: datetime.datetime) -> Certificates | None:
    """Return what the certificates for this DNS name must be now; None if they are that already."""
    try:
        return _due(current, host, now) if current else _new(host, now)
    except (ValueError, x509.ExtensionNotFound):  # no PEM, or not of ours
        return _new(host, now)


def _new(host: str, now: datetime.datetime) -> Certificates:
    authority, authority_key = _authority(now)
    return _signed(Certificates(_pem(authority), _pem_of_key(authority_key), b"", b""), host, now)


def _due(current: Certificates, host: str, now: datetime.datetime) -> Certificates | None:
    authorities = x509.load_pem_x509_certificates(current.authorities)
    certificate = x509.load_pem_x509_certificate(current.certificate)
    newest = authorities[-1]
    issuer = _issuer(certificate, authorities)
    if issuer is None or not (_fits(current, newest, certificate, host) and _is_valid(certificate, now)):
        return _new(host, now)
    if _is_old(newest, now):
        authority, key = _authority(now)
        added = current.authorities + _pem(authority)
        return current._replace(authorities=added, authority_key=_pem_of_key(key))
    if issuer != newest:
        return _signed(current, host, now) if now >= _made(newest) + SETTLE else None
    if _is_old(certificate, now):
        return _signed(current, host, now)
    if len(authorities) > 1 and now >= _made(certificate) + SETTLE:
        return current._replace(authorities=_pem(newest))
    return None


def _issuer(certificate: x509.Certificate, authorities: list[x509.Certificate]) -> x509.Certificate | None:
    for authority in authorities:
        try:
            certificate.verify_directly_issued_by(authority)
        except (ValueError, TypeError, InvalidSignature):
            continue
        return authority
    return None


def _fits(current: Certificates, newest: x509.Certificate, certificate: x509.Certificate, host: str) -> bool:
    """Return whether the keys are those of the certificates, and the name is the host's."""
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    pairs = ((current.authority_key, newest), (current.key, certificate))
    are_pairs = all(_load_key(key).public_key() == each.public_key() for key, each in pairs)
    return are_pairs and names.get_values_for_type(x509.DNSName) == [host]


def _made(certificate: x509.Certificate) -> datetime.datetime:
    return certificate.not_valid_before_utc + _SKEW


def _is_valid(certificate: x509.Certificate, now: datetime.datetime) -> bool:
    return certificate.not_valid_before_utc <= now < certificate.not_valid_after_utc


def _is_old(certificate: x509.Certificate, now: datetime.datetime) -> bool:
    """Return whether two thirds of its life are over."""
    begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    return now >= begin + (end - begin) * 2 / 3


# Making them -------------------------------------------------------------------------------------------------------


def _authority(now: datetime.datetime) -> tuple[x509.Certificate, _Key]:
    key = ec.generate_private_key(ec.SECP256R1())
    # Each authority has a name of its own, for a client finds the one that has signed by its name.
    name = _name(f"{_COMMON_NAME} {now:%Y-%m-%dT%H:%M:%S}")
    builder = _builder(name, name, key, now, AUTHORITY_LIFE)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_usage(is_authority=True), critical=True)
    builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    return builder.sign(key, hashes.SHA256()), key


def _signed(current: Certificates, host: str, now: datetime.datetime) -> Certificates:
    """Return the certificates with a new serving certificate, of the newest authority."""
    authority = x509.load_pem_x509_certificates(current.authorities)[-1]
    key = ec.generate_private_key(ec.SECP256R1())
    builder = _builder(_name(_COMMON_NAME), authority.subject, key, now, CERTIFICATE_LIFE)
    builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=False)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_usage(is_authority=False), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    identifier = authority.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    by = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier)
    builder = builder.add_extension(by, critical=False)
    certificate = builder.sign(_load_key(current.authority_key), hashes.SHA256())
    return current._replace(certificate=_pem(certificate), key=_pem_of_key(key))


def _builder(
    subject: x509.Name, issuer: x509.Name, key: _Key, now: datetime.datetime, life: datetime.timedelta
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(now + life)
    )


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _usage(*, is_authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not is_authority,
        key_cert_sign=is_authority,
        crl_sign=is_authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _pem_of_key(key: _Key) -> bytes:
    form = serialization.PrivateFormat.PKCS8
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())


def _load_key(pem: bytes) -> _Key:
    """Return the key. Raises ValueError, also if it is of another kind."""
    key = serialization.load_pem_private_key(pem, password=None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError("the key is of another kind")
    return key
