"""Certificates, keys and servers for the security tests."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from baton.client import Tls
from baton.coordinator.server.server import Coordinator
from baton.runtime import demo_model
from baton.runtime.config import parse
from baton.runtime.security import api_keys, watched_file
from baton.runtime.security.dev_certs import ADMIN_NAME, CLIENT_NAME, CLUSTER_NAME, Authority

SERVER_NAMES = ["localhost", "127.0.0.1", "::1"]


@dataclass(frozen=True)
class Pki:
    """A directory of certificates: NAME.pem and NAME.key."""

    directory: Path
    authority: Authority

    def file(self, name: str) -> str:
        return str(self.directory / name)

    def issue(self, stem: str, name: str, **options) -> None:
        hosts = SERVER_NAMES if options.get("serves") else []
        cert, key = (self.directory / f"{stem}.{end}" for end in ("pem", "key"))
        self.authority.issue(cert, key, name, hosts, **options)

    def tls(self, stem: str = "") -> Tls:
        """Client settings with that certificate, or without one by default."""
        if not stem:
            return Tls(self.file("ca.pem"))
        return Tls(self.file("ca.pem"), self.file(f"{stem}.pem"), self.file(f"{stem}.key"))

    def server(self, **options) -> dict[str, object]:
        """Values of a `security` section."""
        files = {"ca_file": "ca.pem", "cert_file": "server.pem", "key_file": "server.key"}
        return {key: self.file(name) for key, name in files.items()} | options


def make_pki(directory: Path) -> Pki:
    pki = Pki(directory, Authority.make())
    pki.authority.write(directory / "ca.pem", directory / "ca.key")
    pki.issue("server", CLUSTER_NAME, serves=True)
    pki.issue("client", CLIENT_NAME)
    pki.issue("admin", ADMIN_NAME)
    pki.issue("expired", CLUSTER_NAME, until=datetime.now(UTC) - timedelta(minutes=1))
    # This certificate has the name of a cluster member, but another CA has signed it.
    other = Pki(directory, Authority.make("another CA"))
    other.issue("wrong", CLUSTER_NAME)
    return pki


@pytest.fixture(scope="session")
def pki(tmp_path_factory) -> Pki:
    return make_pki(tmp_path_factory.mktemp("pki"))


@pytest.fixture
def fresh_pki(tmp_path) -> Pki:
    """Certificates whose files a test may replace."""
    return make_pki(tmp_path)


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> str:
    return demo_model.ensure("demo", weights=False, root=tmp_path_factory.mktemp("models"))


@pytest.fixture(autouse=True)
def files_are_checked_at_each_use(monkeypatch):
    monkeypatch.setattr(watched_file, "CHECK_INTERVAL_S", 0.0)


class Keys:
    """A key file; `add` returns the API key."""

    def __init__(self, path: Path) -> None:
        self.path, self._entries = str(path), []
        self.secrets: list[str] = []

    def add(self, name: str, **grants) -> str:
        key, entry = api_keys.make(name, **grants)
        self._entries.append(entry)
        self._write()
        self.secrets.append(key)
        return key

    def remove(self, name: str) -> None:
        self._entries = [entry for entry in self._entries if entry.name != name]
        self._write()

    def _write(self) -> None:
        api_keys.write(self.path, self._entries)


@pytest.fixture
def keys(tmp_path) -> Keys:
    return Keys(tmp_path / "keys.yaml")


class Issuer:
    """An identity provider that signs tokens."""

    def __init__(self, file: Path) -> None:
        self.key, self.file = ec.generate_private_key(ec.SECP256R1()), file
        public, encoding = self.key.public_key(), serialization.Encoding.PEM
        kind = serialization.PublicFormat.SubjectPublicKeyInfo
        file.write_bytes(public.public_bytes(encoding, kind))
        # Values of a `security.jwt` section.
        self.config = {"key_file": str(file), "issuer": "https://idp.test", "audience": "baton"}

    def token(self, key=None, algorithm="ES256", headers=None, **changes) -> str:
        claims = {
            "iss": self.config["issuer"],
            "aud": self.config["audience"],
            "exp": datetime.now(UTC) + timedelta(hours=1),
            "sub": "svc",
            "tenant": "search",
            **changes,
        }
        claims = {name: value for name, value in claims.items() if value is not None}
        return jwt.encode(claims, key or self.key, algorithm, headers)


@pytest.fixture
def issuer(tmp_path) -> Issuer:
    return Issuer(tmp_path / "issuer.pem")


class Log(logging.Handler):
    """Collects Baton's log lines."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        # All fields are included, because a secret may be in any of them.
        self.lines.append(f"{record.getMessage()} {vars(record)}")

    def reasons(self) -> set[str]:
        return {
            reason
            for line in self.lines
            for reason in [line.partition("'reason': '")[2].partition("'")[0]]
            if reason
        }


@pytest.fixture
def log():
    logger, handler = logging.getLogger("baton"), Log()
    level, logger.level = logger.level, logging.INFO
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)


@pytest.fixture
def coordinator_config(model):
    def build(security=None, **sections):
        coordinator = {"listen": "127.0.0.1:0", "heartbeat_s": 0.2}
        coordinator |= sections.pop("coordinator", {})
        return parse(
            {
                "model": model,
                "served_model_name": "demo",
                "engine": "simulated",
                "coordinator": coordinator,
                "security": security or {},
                **sections,
            },
            "test",
        )

    return build


@pytest.fixture
def start_coordinator(coordinator_config):
    @contextlib.asynccontextmanager
    async def start(security=None, **sections):
        async with Coordinator(coordinator_config(security, **sections)) as running:
            yield running

    return start


async def refusals(coordinator) -> dict[tuple[str, str], int]:
    """Refusals by service and reason, as the metrics endpoint shows them."""
    families = await asyncio.to_thread(lambda: list(coordinator._access.refusals.collect()))
    return {
        (sample.labels["service"], sample.labels["reason"]): int(sample.value)
        for family in families
        for sample in family.samples
    }


@pytest.fixture
def count_refusals():
    return refusals
