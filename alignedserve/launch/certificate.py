"""A key and a self-signed certificate for TLS within one system: ECDSA on P-256.

The certificate is its own authority. Processes of the system have the key, as they would have a shared secret. The key
never leaves a directory that only the user can read.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import datetime
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

# The certificate is always valid, so that a clock that is set back or forward does not matter.
_FROM, _UNTIL = datetime(2000, 1, 1), datetime(9999, 12, 31)


@dataclass(frozen=True)
class Certificate:
    """The paths of two PEM files."""

    certificate: Path
    key: Path


def make_certificate(directory: Path) -> Certificate:
    """Makes a certificate for this machine. Only the user may have access to the directory."""
    key = ec.generate_private_key(ec.SECP256R1())
    made = Certificate(directory / "certificate.pem", directory / "key.pem")
    _write(made.certificate, _certificate(key).public_bytes(Encoding.PEM))
    _write(made.key, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return made


def _certificate(key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "alignedserve")])
    hosts = x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1")), x509.DNSName("localhost")])
    return (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), _FROM, _UNTIL)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(hosts, critical=False)
        .sign(key, hashes.SHA256())
    )


def _write(path: Path, text: bytes) -> None:
    with open(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.write(text)
