"""Authentication and authorization: recognises callers by credential and checks their rights."""

from __future__ import annotations

import hmac
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass

from baton.runtime.errors import (
    BatonError,
    PermissionDenied,
    ResourceExhausted,
    Unauthenticated,
    shown,
)
from baton.runtime.security import api_keys
from baton.runtime.security.api_keys import Grants, LaneName
from baton.runtime.security.jwt_tokens import BadToken, JwtVerifier
from baton.runtime.security.refusals import Refusals
from baton.runtime.security.secret_format import secret_of
from baton.runtime.security.security_config import JwtConfig, SecurityConfig
from baton.runtime.security.watched_file import WatchedFiles, watched_secret
from baton.v1 import common_pb2

_INFERENCE, _ADMIN = "Inference", "Admin"
# Callers get this text only; operators find the exact reason in the log and the metrics.
_UNKNOWN = "the credential is not valid here"


@dataclass(frozen=True, slots=True)
class Caller:
    """A caller whose credential was accepted.

    Attributes:
        name: Name of the API key or subject of the token, for logs; empty without authentication.
        grants: Rights and limits of the caller; None means no limits.
        account: Key under which the caller's running requests are counted; unique per credential.
    """

    name: str = ""
    grants: Grants | None = None
    account: str = ""


ANYONE = Caller()


class Access:
    """Authenticates callers, checks their rights and counts refused calls.

    Args:
        config: Security section; names the files with keys, tokens and certificates.
        refusals: Counter that every refused call is added to.
        wall_clock: Returns seconds since the epoch.

    Raises:
        ConfigError: A configured file cannot be used.
    """

    def __init__(
        self,
        config: SecurityConfig,
        refusals: Refusals,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._config, self.refusals, self._wall_clock = config, refusals, wall_clock
        self._keys: WatchedFiles[dict[str, api_keys.ApiKey]] | None = None
        if path := config.api_keys_file:
            key = "security.api_keys_file"
            self._keys = WatchedFiles({key: path}, lambda: api_keys.read(path, f"{key}: {path}"))
        self._jwt = JwtVerifier(config.jwt) if config.jwt.key_file else None
        self._cluster_token: WatchedFiles[str] | None = None
        if token := config.cluster_token_file:
            self._cluster_token = watched_secret(token, "security.cluster_token_file")
        # Per account: how many requests use each concurrency slot.
        self._slots: defaultdict[str, Counter[object]] = defaultdict(Counter)
        # Per tenant: how many calls use each call slot; and, per call, the slot that it uses.
        self._call_slots: defaultdict[str, Counter[object]] = defaultdict(Counter)
        self._call_slot_of: dict[tuple[str, int], object] = {}

    @classmethod
    def for_workers(cls, config: SecurityConfig, refusals: Refusals) -> Access:
        """Access for a server that only workers call: it does not read the clients' key files."""
        return cls(config.model_copy(update={"api_keys_file": "", "jwt": JwtConfig()}), refusals)

    @property
    def needs_credentials(self) -> bool:
        """Whether a request must carry a credential."""
        return self._config.has_keys

    # ---- Requests.

    def caller(self, authorization: str, *, peer: str = "") -> Caller:
        """Authenticates the sender of a request.

        Raises:
            Unauthenticated: The credential is missing, unknown or expired.
            PermissionDenied: The credential is only valid for the Admin service.
        """
        if not self.needs_credentials:
            return ANYONE
        caller = self._authenticated(authorization, _INFERENCE, peer)
        if caller.grants is None or not caller.grants.tenant:
            raise self._refused(
                _INFERENCE,
                "no_inference",
                PermissionDenied("this credential names no tenant, so it cannot submit requests"),
                peer,
                caller.name,
            )
        return caller

    def knows(self, authorization: str) -> bool:
        """Whether a credential is valid; counts no refusal."""
        return isinstance(self._identified(authorization), Caller)

    def check_request(
        self,
        caller: Caller,
        *,
        tenant: str,
        lane: LaneName,
        sampling: common_pb2.SamplingParams,
        peer: str = "",
    ) -> None:
        """Checks a request's tenant, lane and output length before its prompt is tokenized.

        Raises:
            PermissionDenied: The caller's grants do not allow the tenant, the lane or the length.
        """
        grants = caller.grants
        if grants is None:
            return
        refusal = ""
        if tenant and tenant != grants.tenant:
            reason = "tenant"
            refusal = f"tenant is {shown(tenant)}; this credential may use {grants.tenant}"
        elif lane not in grants.lanes:
            allowed = ", ".join(grants.lanes)
            reason, refusal = "lane", f"lane is {lane}; this credential may use {allowed}"
        elif (limit := grants.max_output_tokens) is not None:
            for field in ("max_tokens", "min_tokens"):
                if (value := getattr(sampling, field)) > limit:
                    reason = "max_output_tokens"
                    refusal = f"sampling.{field} is {value}; at most {limit} with this credential"
                    break
        if refusal:
            raise self._refused(_INFERENCE, reason, PermissionDenied(refusal), peer, caller.name)

    def check_prompt(self, caller: Caller, num_tokens: int) -> None:
        """Raises PermissionDenied when the prompt is longer than the caller's grants allow."""
        limit = caller.grants.max_prompt_tokens if caller.grants is not None else None
        if limit is not None and num_tokens > limit:
            message = f"the prompt has {num_tokens} tokens; at most {limit} with this credential"
            raise self._refused(
                _INFERENCE, "max_prompt_tokens", PermissionDenied(message), "", caller.name
            )

    def acquire_slot(
        self, caller: Caller, request_id: str = "", *, resumes: bool = False
    ) -> Callable[[], None] | None:
        """Takes a concurrency slot for one request.

        Args:
            caller: Sender of the request.
            request_id: Request ID that the caller chose; empty when the caller chose none.
            resumes: Whether the request resumes an earlier one. Both share a slot, because the
                earlier one ends as soon as the resumed one is accepted.

        Returns:
            A function that releases the slot, to be called once. None when the caller has no limit.

        Raises:
            ResourceExhausted: All slots of the caller are in use.
        """
        limit = caller.grants.max_concurrent if caller.grants is not None else None
        if limit is None:
            return None
        account = caller.account
        held, slot = self._slots[account], object()
        # A third request of the same ID needs its own slot: slots also bound request preparation.
        if request_id and held[request_id] <= int(resumes):
            slot = request_id
        if slot not in held and len(held) >= limit:
            self.refusals.count(_INFERENCE, "max_concurrent", who=caller.name)
            raise ResourceExhausted(
                f"{limit} requests of this credential are running, its limit",
                reason="CREDENTIAL_CONCURRENCY",
                retry_after_s=1.0,
            )
        held[slot] += 1
        return lambda: _release(self._slots, account, slot)

    def acquire_call_slot(
        self, caller: Caller, call: int, *, older: int | None = None
    ) -> Callable[[], None]:
        """Counts one open call of the server against the limit of the caller's tenant.

        Args:
            caller: Caller with grants.
            call: Number of the call, unique in this process.
            older: Number of the broken call whose requests are resumed in this call. Both share a
                slot until the server notices that the older call has ended.

        Returns:
            A function that releases the slot, to be called once.

        Raises:
            ResourceExhausted: The tenant already holds security.max_calls_per_tenant calls.
        """
        assert caller.grants is not None
        tenant, limit = caller.grants.tenant, self._config.tenant_calls
        held = self._call_slots[tenant]
        slot = None if older is None else self._call_slot_of.get((tenant, older))
        if slot is None or held[slot] > 1:
            slot = object()
        if slot not in held and len(held) >= limit:
            self.refusals.count(_INFERENCE, "tenant_calls", who=caller.name)
            raise ResourceExhausted(
                f"{limit} sessions and single requests of tenant {tenant} are open, the most that "
                "one tenant may hold (security.max_calls_per_tenant); a session takes any number "
                "of requests",
                reason="TENANT_CALLS",
                retry_after_s=1.0,
            )
        held[slot] += 1
        self._call_slot_of[tenant, call] = slot
        return lambda: _release(self._call_slots, tenant, self._call_slot_of.pop((tenant, call)))

    # ---- Operators and workers.

    def check_admin(self, authorization: str, names: Collection[str], *, peer: str = "") -> None:
        """Checks that a caller may use the Admin service.

        Args:
            authorization: Credential of the call.
            names: Names in the caller's verified certificate.
            peer: Address of the caller, for logs.

        Raises:
            Unauthenticated: The credential is missing, unknown or expired.
            PermissionDenied: The credential or certificate has no admin rights.
        """
        if not self._config.authenticates_clients or set(names) & set(self._config.admin_names):
            return
        if not self._config.has_keys:
            refusal = PermissionDenied("the certificate names none of security.admin_names")
            raise self._refused(_ADMIN, "certificate_name", refusal, peer)
        caller = self._authenticated(authorization, _ADMIN, peer)
        if caller.grants is None or not caller.grants.admin:
            refusal = PermissionDenied("this credential has no admin rights")
            raise self._refused(_ADMIN, "not_admin", refusal, peer, caller.name)

    def check_worker(
        self, authorization: str, names: Collection[str], service: str, *, peer: str = ""
    ) -> None:
        """Checks a worker's call to `service`; other arguments and errors as in `check_admin`."""
        if self._cluster_token is not None:
            token = self._cluster_token.get()
            if not authorization:
                missing = Unauthenticated("workers need the cluster token")
                raise self._refused(service, "missing", missing, peer)
            if not hmac.compare_digest(secret_of(authorization).encode(), token.encode()):
                raise self._refused(service, "unknown", Unauthenticated(_UNKNOWN), peer)
        elif self._config.needs_certificates and not set(names) & set(self._config.cluster_names):
            refusal = PermissionDenied("the certificate names none of security.cluster_names")
            raise self._refused(service, "certificate_name", refusal, peer)

    def _authenticated(self, authorization: str, service: str, peer: str) -> Caller:
        """Returns the caller that owns the credential; raises Unauthenticated."""
        if not authorization:
            missing = Unauthenticated("a credential is missing: authorization: Bearer KEY")
            raise self._refused(service, "missing", missing, peer)
        found = self._identified(authorization)
        if isinstance(found, Caller):
            return found
        reason, who = found
        told = "the credential has expired" if reason == "expired" else _UNKNOWN
        raise self._refused(service, reason, Unauthenticated(told), peer, who)

    def _identified(self, authorization: str) -> Caller | tuple[str, str]:
        """Returns the credential's owner, or why it is not valid and the name of its key."""
        secret, reason, who = secret_of(authorization), "unknown", ""
        now = self._wall_clock()
        key_id = api_keys.id_of(secret)
        if key_id is not None and self._keys is not None:
            key = self._keys.get().get(key_id)
            if key is not None and key.matches(secret):
                if key.expires is None or key.expires.timestamp() > now:
                    return Caller(key.name, key, f"key {key.id}")
                reason, who = "expired", key.name
        elif self._jwt is not None:
            try:
                token = self._jwt.token(secret, now)
                return Caller(token.name, token.grants, token.account)
            except BadToken as error:
                reason = error.reason
        return reason, who

    def _refused(
        self, service: str, reason: str, error: BatonError, peer: str, who: str = ""
    ) -> BatonError:
        self.refusals.count(service, reason, peer=peer, who=who)
        return error


def _release(slots: dict[str, Counter[object]], account: str, slot: object) -> None:
    held = slots[account]
    held[slot] -= 1
    if not held[slot]:
        del held[slot]
    if not held:
        del slots[account]
