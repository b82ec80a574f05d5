"""The `security` section: certificates, keys and limits. It names files that hold the secrets."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from baton.runtime.section import PositiveInt, PositiveSeconds, Section

# Default share of a server's calls (1/4) that one tenant may hold, so that other tenants find room.
_TENANT_PART = 4


class JwtConfig(Section):
    """JSON Web Tokens of an identity provider, used instead of API keys."""

    key_file: str = Field(
        "", description="Public key in PEM, or a JWKS, that checks tokens. Empty: no JWTs."
    )
    issuer: str = Field("", description="Required value of each token's `iss` claim.")
    audience: str = Field("", description="Required value of each token's `aud` claim.")

    @model_validator(mode="after")
    def _is_whole(self) -> JwtConfig:
        if self.key_file and not (self.issuer and self.audience):
            raise ValueError("key_file needs issuer and audience beside it")
        return self


class SecurityConfig(Section):
    """Authentication and limits; coordinator, gateway and workers can share the same section."""

    allow_insecure: bool = Field(
        False,
        description="Whether listeners that other hosts can reach are allowed without "
        "authentication.",
    )
    ca_file: str = Field(
        "", description="PEM file with the CA certificates that sign the peers' certificates."
    )
    cert_file: str = Field(
        "",
        description="PEM file with this process's certificate chain, as a server and as a client. "
        "Empty: no TLS.",
    )
    key_file: str = Field("", description="PEM file with the private key of cert_file.")
    client_auth: Literal["none", "require"] = Field(
        "none",
        description="Whether gRPC and metrics clients need a certificate signed by ca_file.",
    )
    http_client_auth: Literal["none", "require"] = Field(
        "none", description="Whether HTTP gateway clients need a certificate signed by ca_file."
    )
    server_name: str = Field(
        "", description="Name that servers' certificates must have. Empty: the dialled host."
    )
    cluster_names: list[str] = Field(
        ["baton"],
        description="Accepted names in certificates of workers and gateways, when client_auth is "
        "require and there is no cluster token.",
    )
    admin_names: list[str] = Field(
        ["baton-admin"],
        description="Names in certificates of operators; they need no API key for admin calls.",
    )
    api_keys_file: str = Field(
        "", description="YAML file with hashed API keys, written by `baton keys`."
    )
    jwt: JwtConfig = Field(default_factory=JwtConfig)
    cluster_token_file: str = Field(
        "", description="File with the secret token that workers send to coordinator and peers."
    )
    metrics_token_file: str = Field(
        "", description="File with the bearer token that readers of the metrics must send."
    )
    allow_plain_links: bool = Field(
        False,
        description="Whether NIXL, gloo and NCCL, which have no TLS, may connect hosts when TLS is "
        "on.",
    )
    max_connections: PositiveInt = Field(16384, description="Connections to one gRPC server.")
    max_calls: PositiveInt = Field(8192, description="Concurrent calls of one gRPC server.")
    max_calls_per_tenant: PositiveInt | None = Field(
        None,
        description="Sessions and single requests that one tenant may hold open at a time. "
        "null: a quarter of max_calls.",
    )
    max_metadata_bytes: Annotated[int, Field(ge=1024, le=2**31 - 1)] = Field(
        16 * 2**10, description="Size of the metadata of one gRPC call."
    )
    handshake_timeout_s: PositiveSeconds = Field(
        10.0, description="Longest wait for a connection's TLS and HTTP/2 handshake."
    )
    idle_timeout_s: PositiveSeconds = Field(
        600.0, description="A gRPC connection without a call is closed after this long."
    )

    @model_validator(mode="after")
    def _files_fit(self) -> SecurityConfig:
        if bool(self.cert_file) != bool(self.key_file):
            raise ValueError("cert_file and key_file go together")
        if self.cert_file and not self.ca_file:
            raise ValueError("cert_file needs ca_file, which peers' certificates are checked with")
        for key in ("client_auth", "http_client_auth"):
            if getattr(self, key) == "require" and not self.cert_file:
                raise ValueError(f"{key} is 'require'; it needs ca_file, cert_file and key_file")
        return self

    @property
    def tenant_calls(self) -> int:
        """Limit of concurrent calls of one tenant."""
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
        """Whether gRPC and metrics clients need a certificate."""
        return self.client_auth == "require"

    @property
    def authenticates_clients(self) -> bool:
        return self.has_keys or self.needs_certificates

    @property
    def authenticates_workers(self) -> bool:
        return bool(self.cluster_token_file) or self.needs_certificates

    @property
    def authenticates_http_clients(self) -> bool:
        return self.has_keys or self.http_client_auth == "require"

    @property
    def authenticates_metrics_readers(self) -> bool:
        return bool(self.metrics_token_file) or self.needs_certificates
