"""Names of tenants, requests, revisions and workers, and help with names that nothing is called."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

# Of requests that name no tenant.
DEFAULT_TENANT = "default"
TENANT_NAMES = "1 to 64 characters of [A-Za-z0-9._:-]"
_TENANT = re.compile(r"[A-Za-z0-9._:-]{1,64}", re.ASCII)
# Of workers that name none.
FIRST_REVISION = "1"
REVISION_NAMES = "1 to 64 characters of [A-Za-z0-9._-]"
_REVISION = re.compile(r"[A-Za-z0-9._-]{1,64}", re.ASCII)

# Hosts' and pods' names are among them.
WORKER_NAMES = "1 to 128 characters of [A-Za-z0-9._:/-]"
_WORKER = re.compile(r"[A-Za-z0-9._:/-]{1,128}", re.ASCII)


def is_tenant(name: str) -> bool:
    """Whether a tenant may be called that."""
    return _TENANT.fullmatch(name) is not None


def request_name(tenant: str, request_id: str) -> str:
    """What a request is called where those of all tenants are: "TENANT/ID".

    Tenants choose ids without knowing each other's. Requests of the default tenant go by their id
    alone. Neither part may have a slash, so that two requests never have one name.
    """
    return request_id if tenant == DEFAULT_TENANT else f"{tenant}/{request_id}"


def request_name_parts(name: str) -> tuple[str, str]:
    """Tenant and id of a request that is called so."""
    tenant, _, request_id = name.rpartition("/")
    return tenant or DEFAULT_TENANT, request_id


def is_revision(name: str) -> bool:
    """Whether a revision may be called that."""
    return _REVISION.fullmatch(name) is not None


def is_worker(name: str) -> bool:
    """Whether a worker may be called that."""
    return _WORKER.fullmatch(name) is not None


def did_you_mean(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """The end of an error about an unknown name: "; did you mean 'x'?", or "" when none is near.

    Args:
        name: what was written.
        known: what could have been meant.
        cutoff: how alike they must be, 0 to 1 (difflib's ratio).
    """
    close = difflib.get_close_matches(name, known, n=1, cutoff=cutoff)
    return f"; did you mean {close[0]!r}?" if close else ""
