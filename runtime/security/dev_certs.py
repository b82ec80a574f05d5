"""Creates a CA and certificates for development and for tests."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from baton.runtime.config_error import ConfigError

# Names in the certificates; the defaults of security.cluster_names and security.admin_names.
CLUSTER_NAME, CLIENT_NAME, ADMIN_NAME = "baton", "baton-client", "baton-admin"
_LOCAL = ("localhost", "127.0.0.1", "::1")
# Certificates start to be valid this much earlier, because clocks of hosts differ.
_EARLIER = timedelta(minutes=5)
_CA_DAYS = 3650


@dataclass(frozen=True, slots=True)
class Authority:
    """A certificate authority with its private key."""

    cert: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @classmethod
    def make(cls, name: str = "baton development CA") -> Authority:
        key = ec.generate_private_key(ec.SECP256R1())
        subject = _named(name)
        now = datetime.now(UTC)
        cert = (
            _builder(subject, subject, key, now - _EARLIER, now + timedelta(days=_CA_DAYS))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs=True), critical=True)
            .add_extension(
                x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False
            )
            .sign(key, hashes.SHA256())
        )
        return cls(cert, key)

    def write(self, cert_file: Path, key_file: Path) -> None:
        _write(key_file, _key_pem(self.key), secret=True)
        _write(cert_file, _cert_pem(self.cert))

    @classmethod
    def read(cls, cert_file: Path, key_file: Path) -> Authority:
        """Raises ConfigError when the files are not a CA certificate with its key."""
        try:
            cert = x509.load_pem_x509_certificate(cert_file.read_bytes())
            key = serialization.load_pem_private_key(key_file.read_bytes(), None)
        except ValueError:
            raise ConfigError(
                f"{cert_file}, {key_file}: not a PEM certificate with its private key"
            ) from None
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ConfigError(f"{key_file}: not made by `baton certs`")
        if key.public_key() != cert.public_key():
            raise ConfigError(f"{key_file}: not the key of {cert_file}")
        return cls(cert, key)

    def issue(
        self,
        cert_file: Path,
        key_file: Path,
        name: str,
        hosts: Sequence[str] = (),
        *,
        serves: bool = False,
        until: datetime | None = None,
    ) -> None:
        """Writes a certificate and its new private key.

        Args:
            cert_file: Path for the certificate.
            key_file: Path for the private key, readable by its owner only.
            name: Common name; also added as a DNS name.
            hosts: Further host names and addresses that the certificate is valid for.
            serves: Whether a server may use the certificate.
            until: Expiry; None means 30 days from now.
        """
        key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
        until = until if until is not None else now + timedelta(days=30)
        # An expired certificate also needs a start before its end.
        since = min(now, until) - _EARLIER
        usages = [ExtendedKeyUsageOID.CLIENT_AUTH]
        if serves:
            usages.append(ExtendedKeyUsageOID.SERVER_AUTH)
        names = [_general_name(one) for one in dict.fromkeys((name, *hosts))]
        issuer_key = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key())
        cert = (
            _builder(_named(name), self.cert.subject, key, since, until)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(issuer_key, critical=False)
            .sign(self.key, hashes.SHA256())
        )
        _write(key_file, _key_pem(key), secret=True)
        _write(cert_file, _cert_pem(cert))


def make(directory: str, *, hosts: Iterable[str] = (), days: int = 30) -> list[Path]:
    """Writes a CA, and server.pem, client.pem and admin.pem with their keys.

    An existing CA is kept, and the three certificates are renewed. Without a CA, existing files are
    never overwritten, because something else created them.

    Args:
        directory: Target directory; created when missing.
        hosts: Names and addresses of the servers, beside this host's loopback names.
        days: Validity in days.

    Returns:
        Paths of all eight files.

    Raises:
        ConfigError: The directory holds other files of these names, or a host name is invalid.
        OSError: A file cannot be written.
    """
    names = [*_LOCAL, *hosts]
    for one in names:
        _general_name(one)
    root = Path(directory)
    root.mkdir(parents=True, exist_ok=True)
    stems = ("ca", "server", "client", "admin")
    ca, server, client, admin = [(root / f"{stem}.pem", root / f"{stem}.key") for stem in stems]
    files = [*ca, *server, *client, *admin]
    if all(file.exists() for file in ca):
        authority = Authority.read(*ca)
    elif found := [str(file) for file in files if file.exists()]:
        raise ConfigError(
            f"{', '.join(found)} would be overwritten, and there is no ca.pem with its ca.key to "
            "renew them with: choose another directory, or move these files away"
        )
    else:
        authority = Authority.make()
        authority.write(*ca)
    until = datetime.now(UTC) + timedelta(days=days)
    authority.issue(*server, CLUSTER_NAME, names, serves=True, until=until)
    authority.issue(*client, CLIENT_NAME, until=until)
    authority.issue(*admin, ADMIN_NAME, until=until)
    return files


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    since: datetime,
    until: datetime,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(since)
        .not_valid_after(until)
    )


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _general_name(name: str) -> x509.GeneralName:
    """Raises ConfigError when the name is neither an IP address nor an ASCII host name."""
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        pass
    if not name or not name.isascii():
        raise ConfigError(f"{name!r} is neither an IP address nor a host name in ASCII")
    return x509.DNSName(name)


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _cert_pem(cert: x509.Certificate) -> bytes:
    return cert.public_bytes(serialization.Encoding.PEM)


def _write(file: Path, data: bytes, *, secret: bool = False) -> None:
    """Replaces a file atomically: readers see either the old content or the new."""
    beside = file.with_name(f"{file.name}.new")
    beside.unlink(missing_ok=True)
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if secret else 0o644)
    try:
        with os.fdopen(descriptor, "wb") as out:
            out.write(data)
        beside.replace(file)
    finally:
        # Remove what a failed write (disk full) has left.
        beside.unlink(missing_ok=True)
