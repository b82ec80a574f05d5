"""The `security` section: certificates, keys and limits. Secrets are in files that it names."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from baton.runtime.section import PositiveInt, PositiveSeconds, Section

# Of a server's calls, where the configuration does not say: others find a call whatever one tenant
# does.
_TENANT_PART = 4


class JwtConfig(Section):
    """Tokens that somebody else signs, in the place of API keys."""

    key_file: str = Field("", description="public key in PEM, or a JWKS; empty: no JWTs")
    issuer: str = Field("", description="`iss` of every token")
    audience: str = Field("", description="`aud` of every token")

    @model_validator(mode="after")
    def _is_whole(self) -> JwtConfig:
        if self.key_file and not (self.issuer and self.audience):
            raise ValueError("key_file needs issuer and audience beside it")
        return self


class SecurityConfig(Section):
    """Who may speak to whom; the same file serves coordinator, gateway and workers."""

    allow_insecure: bool = Field(
        False,
        description="whether listeners that others than this host can reach may do without "
        "authentication",
    )
    ca_file: str = Field("", description="PEM: who signs the certificates of peers")
    cert_file: str = Field(
        "", description="PEM chain: of this process, as a server and as a client; empty: no TLS"
    )
    key_file: str = Field("", description="PEM: its private key")
    client_auth: Literal["none", "require"] = Field(
        "none", description="whether gRPC and metrics clients need a certificate that ca_file signs"
    )
    http_client_auth: Literal["none", "require"] = Field(
        "none", description="whether clients of the HTTP gateway need one"
    )
    server_name: str = Field(
        "", description="what servers' certificates must name; empty: the host that is dialled"
    )
    cluster_names: list[str] = Field(
        ["baton"],
        description="names in certificates of workers and gateways, where client_auth is require "
        "and there is no cluster token",
    )
    admin_names: list[str] = Field(
        ["baton-admin"], description="names in certificates of operators, who need no key then"
    )
    api_keys_file: str = Field("", description="YAML of hashed keys; see `baton keys`")
    jwt: JwtConfig = Field(default_factory=JwtConfig)
    cluster_token_file: str = Field("", description="a secret that workers share with each other")
    metrics_token_file: str = Field(
        "", description="a secret that whoever reads metrics sends as a bearer token"
    )
    allow_plain_links: bool = Field(
        False, description="whether gloo and NCCL, which have no TLS, may leave a host with TLS on"
    )
    max_connections: PositiveInt = Field(16384, description="of one gRPC server")
    max_calls: PositiveInt = Field(8192, description="of one gRPC server at a time")
    max_calls_per_tenant: PositiveInt | None = Field(
        None,
        description="of these, sessions and single requests that one tenant may hold; "
        "null: a quarter",
    )
    max_metadata_bytes: PositiveInt = Field(16 * 2**10, ge=1024, description="of one gRPC call")
    handshake_timeout_s: PositiveSeconds = Field(
        10.0, description="longest wait for a connection's TLS and HTTP/2 handshake"
    )
    idle_timeout_s: PositiveSeconds = Field(
        600.0, description="a gRPC connection without a call is closed after so long"
    )

    @model_validator(mode="after")
    def _files_fit(self) -> SecurityConfig:
        if bool(self.cert_file) != bool(self.key_file):
            raise ValueError("cert_file and key_file go together")
        if self.cert_file and not self.ca_file:
            raise ValueError("cert_file needs ca_file beside it, which peers are told by")
        for key in ("client_auth", "http_client_auth"):
            if getattr(self, key) == "require" and not self.cert_file:
                raise ValueError(f"{key} is 'require'; it needs ca_file, cert_file and key_file")
        return self

    @property
    def tenant_calls(self) -> int:
        """Calls that one tenant may hold at a time."""
        return self.max_calls_per_tenant or max(1, self.max_calls // _TENANT_PART)

    @property
    def serves_tls(self) -> bool:
        return bool(self.cert_file)

    @property
    def dials_tls(self) -> bool:
        return bool(self.ca_file)

    @property
    def has_keys(self) -> bool:
        """Whether requests and operators need an API key or a JWT."""
        return bool(self.api_keys_file or self.jwt.key_file)

    @property
    def needs_certificates(self) -> bool:
        """Whether gRPC and metrics clients need one."""
        return self.client_auth == "require"

    @property
    def knows_clients(self) -> bool:
        return self.has_keys or self.needs_certificates

    @property
    def knows_workers(self) -> bool:
        return bool(self.cluster_token_file) or self.needs_certificates

    @property
    def knows_http_clients(self) -> bool:
        return self.has_keys or self.http_client_auth == "require"

    @property
    def knows_scrapers(self) -> bool:
        return bool(self.metrics_token_file) or self.needs_certificates
