"""JWTs (RFC 7519) that an identity provider signs, as credentials.

Claims beside `exp`, `iss` and `aud`, which every token needs: `tenant`, `lanes`, `admin`,
`max_prompt_tokens`, `max_output_tokens` and `max_concurrent`, as in the file of API keys; `sub` is
what logs call the holder. Only asymmetric signatures count: whoever checks cannot make one.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from baton.runtime.api_keys import Grants
from baton.runtime.config_error import ConfigError
from baton.runtime.security_config import JwtConfig
from baton.runtime.watched_file import WatchedFiles

_ALGORITHMS = ["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "EdDSA"]
_CLAIMS = ("tenant", "lanes", "admin", "max_prompt_tokens", "max_output_tokens", "max_concurrent")
# Tokens whose signature has been checked.
_MAX_KNOWN = 1024
# As much as fits the metadata of a call. Anybody may send more in a request, and looking at it
# takes its time before there is anything to check.
_MAX_CHARS = 16 * 2**10


class Token(NamedTuple):
    """What a valid token says.

    Attributes:
        name: of its subject, for logs.
        account: of its subject, or of its tenant where it names none: never two subjects'.
        expires_at: in seconds since the epoch.
    """

    name: str
    account: str
    grants: Grants
    expires_at: float


class BadToken(Exception):
    """A token does not count; `reason` is a word."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class JwtVerifier:
    """Checks tokens against a public key, or those of a JWKS by `kid`.

    Raises:
        ConfigError: PyJWT is not installed, or the file is wrong.
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
        """What a token says.

        Args:
            text: as it came.
            now: seconds since the epoch.

        Raises:
            BadToken: it does not count.
        """
        if len(text) > _MAX_CHARS:
            raise BadToken("too_long")
        keys = self._keys.get()
        if self._version != self._keys.version:
            self._known.clear()
            self._version = self._keys.version
        # By digest: tokens themselves are not kept.
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
        # A tenant's name has no slash.
        account = f"jwt {grants.tenant}/{claims.get('sub', '')}"
        name = f"jwt:{claims.get('sub', '-')}"[:80]
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
