"""API keys of the form `baton_ID_SECRET`. The key file stores only the ID and a hash of the key.

The secret has 256 random bits, so a plain SHA-256 of the key cannot be reversed by guessing.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import os
import re
import secrets
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, ValidationError, field_validator, model_validator

from baton.runtime.config_error import ConfigError, what_is_allowed
from baton.runtime.names import TENANT_NAMES, is_tenant
from baton.runtime.section import PositiveInt, Section

LaneName = Literal["interactive", "batch"]

# Longest wait for the lock on the key file, and the interval between two attempts.
_LOCK_TIMEOUT_S, _LOCK_POLL_S = 10.0, 0.02

_KEY = re.compile(r"baton_([0-9a-f]{12})_[A-Za-z0-9_-]{43}", re.ASCII)


class Grants(Section):
    """Rights and limits of an API key or a token.

    Attributes:
        tenant: Tenant that requests are accounted to; empty means that requests are not allowed.
        admin: Whether the Admin service may be called.
    """

    tenant: str = ""
    lanes: list[LaneName] = Field(["interactive", "batch"], min_length=1)
    max_prompt_tokens: PositiveInt | None = None
    max_output_tokens: PositiveInt | None = None
    max_concurrent: PositiveInt | None = None
    admin: bool = False

    @field_validator("tenant")
    @classmethod
    def _is_tenant(cls, tenant: str) -> str:
        if tenant and not is_tenant(tenant):
            raise ValueError(f"must be {TENANT_NAMES}")
        return tenant


class ApiKey(Grants):
    """One entry of the key file.

    Attributes:
        id: Second part of the key; not secret.
        name: Name of the key in logs.
        sha256: Hex SHA-256 of the whole key.
        expires: Expiry with time zone; None means never.
    """

    id: Annotated[str, Field(pattern=r"^[0-9a-f]{12}$")]
    name: str
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    expires: datetime | None = None

    @field_validator("name")
    @classmethod
    def _is_name(cls, name: str) -> str:
        if not is_tenant(name):
            raise ValueError(f"must be {TENANT_NAMES}")
        return name

    @field_validator("expires")
    @classmethod
    def _has_zone(cls, expires: datetime | None) -> datetime | None:
        if expires is not None and expires.tzinfo is None:
            raise ValueError("needs a time zone, for example 2030-01-31T00:00:00Z")
        return expires

    @model_validator(mode="after")
    def _may_something(self) -> ApiKey:
        if not self.tenant and not self.admin:
            raise ValueError("needs tenant, or admin: true")
        return self

    def matches(self, key: str) -> bool:
        """Whether `key` is the key of this entry, compared in constant time."""
        return hmac.compare_digest(digest(key), self.sha256)


class _File(Section):
    keys: list[ApiKey] = Field(default_factory=list)


def digest(key: str) -> str:
    """Hex SHA-256 of a key."""
    return hashlib.sha256(key.encode()).hexdigest()


def id_of(key: str) -> str | None:
    """ID of an API key; None when the text does not have the form of an API key."""
    found = _KEY.fullmatch(key)
    return found[1] if found is not None else None


def make(name: str, **grants: Any) -> tuple[str, ApiKey]:
    """Creates an API key and its entry for the key file.

    Raises:
        ConfigError: The name or a grant is invalid.
    """
    key_id = secrets.token_hex(6)
    key = f"baton_{key_id}_{secrets.token_urlsafe(32)}"
    try:
        return key, ApiKey(id=key_id, name=name, sha256=digest(key), **grants)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(error))) from None


def read(path: str, called: str = "") -> dict[str, ApiKey]:
    """Reads the key file.

    Args:
        path: Path of the file.
        called: Name of the file in error messages; empty means the path.

    Returns:
        Entries by key ID.

    Raises:
        ConfigError: The content is invalid; the message names the entry but none of its values.
        OSError: The file cannot be read.
    """
    called = called or path
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
        found = _File.model_validate(values).keys
    except ValidationError as error:
        raise ConfigError("\n".join(f"{called}: {line}" for line in _explain(error))) from None
    except (yaml.YAMLError, ValueError):
        # ValueError: bytes that are not UTF-8, or a date that does not exist.
        raise ConfigError(f"{called}: not YAML, or with a date that does not exist") from None
    by_id = {key.id: key for key in found}
    if len(by_id) < len(found):
        raise ConfigError(f"{called}: an id is there twice")
    return by_id


@contextlib.contextmanager
def locked(path: str) -> Iterator[None]:
    """Holds the lock for a change of the key file: read and write the file inside the context.

    Raises:
        ConfigError: Another process held the lock for too long.
        OSError: The directory of the file cannot be opened.
    """
    # The lock is on the directory, because `write` replaces the file and a lock file would remain.
    directory = os.open(Path(path).resolve().parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        until = time.monotonic() + _LOCK_TIMEOUT_S
        while True:
            try:
                fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= until:
                    raise ConfigError(
                        f"{path}: another process has been changing it for {_LOCK_TIMEOUT_S:g} s"
                    ) from None
                time.sleep(_LOCK_POLL_S)
        yield
    finally:
        os.close(directory)


def write(path: str, keys: list[ApiKey]) -> None:
    """Replaces the key file atomically, following a symbolic link.

    A new file is readable by its owner only. An existing file keeps its owner and mode, so that its
    readers can still read it.

    Raises:
        ConfigError: The path is not a regular file, but for example a device.
        OSError: The file cannot be written.
    """
    file = Path(path).resolve()
    if file.exists() and not file.is_file():
        raise ConfigError(f"{path}: is not a regular file")
    kept = [key.model_dump(mode="json", exclude_defaults=True) for key in keys]
    text = yaml.safe_dump({"keys": kept}, sort_keys=False)
    beside = Path(f"{file}.new")
    beside.unlink(missing_ok=True)
    try:
        beside.touch(mode=0o600)
        beside.write_text(text, encoding="utf-8")
        with contextlib.suppress(FileNotFoundError):
            before = file.stat()
            with contextlib.suppress(PermissionError):
                os.chown(beside, before.st_uid, before.st_gid)
            beside.chmod(before.st_mode & 0o777)
        beside.replace(file)
    finally:
        # After a failed write (disk full) the incomplete file must not be taken for the key file.
        beside.unlink(missing_ok=True)


def _explain(error: ValidationError) -> list[str]:
    """Describes each validation error with its place, but without the values."""
    found = []
    for one in error.errors():
        said = what_is_allowed(one["msg"])
        if one["type"] == "model_type":
            said = "must be a mapping of keys"
        elif one["type"] == "string_pattern_mismatch":
            said = f"must match {one['ctx']['pattern']}"
        found.append(": ".join(filter(None, (".".join(map(str, one["loc"])), said))))
    return found
