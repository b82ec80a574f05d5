"""JWTs (RFC 7519) signed by an identity provider, as credentials.

Every token needs the claims `exp`, `iss` and `aud`. The claims `tenant`, `lanes`, `admin`,
`max_prompt_tokens`, `max_output_tokens` and `max_concurrent` mean the same as in the API key file;
`sub` is the holder's name in logs. Only asymmetric signatures are accepted, so that the key that
checks a token cannot be used to make one.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from baton.runtime.config_error import ConfigError
from baton.runtime.security.api_keys import Grants
from baton.runtime.security.security_config import JwtConfig
from baton.runtime.security.watched_file import WatchedFiles

_ALGORITHMS = ["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "EdDSA"]
_CLAIMS = ("tenant", "lanes", "admin", "max_prompt_tokens", "max_output_tokens", "max_concurrent")
# Most seconds by which the identity provider's clock may be ahead: `iat` and `nbf` of a token that
# it has just made are then in the future. `exp` has no such tolerance.
_CLOCK_SKEW_S = 60
# Size of the cache of tokens with a checked signature.
_MAX_KNOWN = 1024
# The size limit of a call's metadata. A request message could carry a longer token, and decoding it
# would cost time before its signature can be checked.
_MAX_CHARS = 16 * 2**10


class Token(NamedTuple):
    """Claims of a valid token.

    Attributes:
        name: Subject, for logs.
        account: Key for counting running requests, unique per tenant and subject.
        grants: Rights and limits.
        expires_at: Seconds since the epoch.
    """

    name: str
    account: str
    grants: Grants
    expires_at: float


class BadToken(Exception):
    """A token is not accepted; `reason` is one word, used as a metric label."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class JwtVerifier:
    """Checks tokens against a public key, or against the keys of a JWKS by `kid`.

    Raises:
        ConfigError: PyJWT is not installed, or the key file is invalid.
    """

    def __init__(self, config: JwtConfig) -> None:
        try:
            import jwt
        except ImportError:
            raise ConfigError(
                "security.jwt.key_file: needs PyJWT and cryptography (install baton[security])"
            ) from None
        self._jwt, self._config = jwt, config
        self._keys = WatchedFiles({"security.jwt.key_file": config.key_file}, self._read)
        self._known: OrderedDict[bytes, Token] = OrderedDict()
        self._version = self._keys.version

    def token(self, text: str, now: float) -> Token:
        """Verifies a token and returns its claims.

        Args:
            text: Encoded token.
            now: Seconds since the epoch.

        Raises:
            BadToken: The token is invalid or expired.
        """
        if len(text) > _MAX_CHARS:
            raise BadToken("too_long")
        keys = self._keys.get()
        if self._version != self._keys.version:
            self._known.clear()
            self._version = self._keys.version
        # The cache is keyed by digest, so that no tokens are kept in memory.
        mark = hashlib.sha256(text.encode()).digest()
        found = self._known.get(mark)
        if found is None:
            found = self._known[mark] = self._checked(text, keys)
            if len(self._known) > _MAX_KNOWN:
                self._known.popitem(last=False)
        if found.expires_at <= now:
            raise BadToken("expired")
        return found

    def _checked(self, text: str, keys: dict[str, Any]) -> Token:
        errors = self._jwt.exceptions
        try:
            kid = self._jwt.get_unverified_header(text).get("kid", "")
            key = keys.get(kid) or (next(iter(keys.values())) if len(keys) == 1 else None)
            if key is None:
                raise BadToken("unknown_key")
            claims: dict[str, Any] = self._jwt.decode(
                text,
                key,
                algorithms=_ALGORITHMS,
                issuer=self._config.issuer,
                audience=self._config.audience,
                # Also applies to `exp`, which `token` checks again.
                leeway=_CLOCK_SKEW_S,
                options={"require": ["exp", "iss", "aud"]},
            )
        except errors.ExpiredSignatureError:
            raise BadToken("expired") from None
        except errors.InvalidAudienceError:
            raise BadToken("audience") from None
        except errors.InvalidIssuerError:
            raise BadToken("issuer") from None
        except (errors.PyJWTError, ValueError, TypeError):
            raise BadToken("invalid") from None
        try:
            grants = Grants.model_validate({n: claims[n] for n in _CLAIMS if n in claims})
        except ValidationError:
            raise BadToken("claims") from None
        # The account is unambiguous, because a tenant's name has no slash.
        account = f"jwt {grants.tenant}/{claims.get('sub', '')}"
        name = f"jwt:{_printable(claims.get('sub', '-'))}"[:80]
        return Token(name, account, grants, float(claims["exp"]))

    def _read(self) -> dict[str, Any]:
        from cryptography.exceptions import UnsupportedAlgorithm

        path = self._config.key_file
        try:
            text = Path(path).read_text(encoding="utf-8")
            if text.lstrip().startswith("{"):
                keys = self._jwt.PyJWKSet.from_dict(json.loads(text)).keys
                return {key.key_id or str(number): key.key for number, key in enumerate(keys)}
            from cryptography.hazmat.primitives.serialization import load_pem_public_key

            return {"": load_pem_public_key(text.encode())}
        except (ValueError, TypeError, UnsupportedAlgorithm, self._jwt.exceptions.PyJWTError):
            raise ConfigError(
                f"security.jwt.key_file: {path} is neither a public key in PEM nor a JWKS"
            ) from None


def _printable(subject: str) -> str:
    """The subject without line breaks: users may choose it, and they must not write log lines."""
    return "".join(one if one.isprintable() else "?" for one in subject)
