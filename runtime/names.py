"""Names of tenants, requests, revisions and workers, and suggestions for misspelt names."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

# Tenant of requests that name none.
DEFAULT_TENANT = "default"
TENANT_NAMES = "1 to 64 characters of [A-Za-z0-9._:-]"
_TENANT = re.compile(r"[A-Za-z0-9._:-]{1,64}", re.ASCII)
REQUEST_IDS = "1 to 128 characters of [A-Za-z0-9._:-]"
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}", re.ASCII)
# Revision of workers that name none.
FIRST_REVISION = "1"
REVISION_NAMES = "1 to 64 characters of [A-Za-z0-9._-]"
_REVISION = re.compile(r"[A-Za-z0-9._-]{1,64}", re.ASCII)

# Host names and pod names are valid worker names.
WORKER_NAMES = "1 to 128 characters of [A-Za-z0-9._:/-]"
_WORKER = re.compile(r"[A-Za-z0-9._:/-]{1,128}", re.ASCII)


def is_tenant(name: str) -> bool:
    """Whether the text is a valid tenant name."""
    return _TENANT.fullmatch(name) is not None


def is_request_id(text: str) -> bool:
    """Whether the text is a valid request ID."""
    return _REQUEST_ID.fullmatch(text) is not None


def request_name(tenant: str, request_id: str) -> str:
    """Name of a request that is unique across tenants: "TENANT/ID".

    Tenants choose IDs independently of each other. Requests of the default tenant use their ID
    alone. A tenant name and an ID have no slash, so the name is unambiguous.
    """
    return request_id if tenant == DEFAULT_TENANT else f"{tenant}/{request_id}"


def request_name_parts(name: str) -> tuple[str, str]:
    """Tenant and request ID of a name made by `request_name`."""
    tenant, _, request_id = name.rpartition("/")
    return tenant or DEFAULT_TENANT, request_id


def cache_salt_of(tenant: str) -> str:
    """Returns the salt that keeps a tenant's KV blocks from other tenants' requests."""
    return "" if tenant == DEFAULT_TENANT else tenant


def is_revision(name: str) -> bool:
    """Whether the text is a valid revision name."""
    return _REVISION.fullmatch(name) is not None


def is_worker(name: str) -> bool:
    """Whether the text is a valid worker name."""
    return _WORKER.fullmatch(name) is not None


def did_you_mean(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Suffix for an error about an unknown name: "; did you mean 'x'?", or "" without a near name.

    Args:
        name: Unknown name.
        known: Valid names.
        cutoff: Required similarity, 0 to 1 (difflib's ratio).
    """
    close = difflib.get_close_matches(name, known, n=1, cutoff=cutoff)
    return f"; did you mean {close[0]!r}?" if close else ""
