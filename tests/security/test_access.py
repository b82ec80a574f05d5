"""Authentication by API key or token, and the rights that result."""

import json
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from baton.runtime.config_error import ConfigError
from baton.runtime.errors import PermissionDenied, ResourceExhausted, Unauthenticated
from baton.runtime.security.access import Access
from baton.runtime.security.refusals import Refusals
from baton.runtime.security.security_config import SecurityConfig
from baton.v1.common_pb2 import SamplingParams

NOW = datetime(2030, 1, 1, tzinfo=UTC)


def access(**security) -> Access:
    return Access(SecurityConfig(**security), Refusals(), NOW.timestamp)


def jwt_access(issuer) -> Access:
    return Access(SecurityConfig(jwt=issuer.config), Refusals())


def refused(access: Access) -> dict[str, int]:
    return {reason: count for (_, reason), count in access.refusals.counts.items()}


def request(access, key, **said):
    caller = access.caller(f"Bearer {key}")
    fields = {"tenant": "", "lane": "interactive", "sampling": SamplingParams(), **said}
    access.check_request(caller, **fields)
    return caller


def test_without_keys_every_caller_is_accepted():
    assert access().caller("").grants is None


def test_a_key_names_its_tenant(keys):
    key = keys.add("one", tenant="search")
    assert request(access(api_keys_file=keys.path), key).grants.tenant == "search"


@pytest.mark.parametrize("form", ["Bearer {}", "bearer {}", "BEARER  {} ", "{}"])
def test_forms_of_a_credential(keys, form):
    key = keys.add("one", tenant="search")
    assert access(api_keys_file=keys.path).caller(form.format(key)).name == "one"


@pytest.mark.parametrize(
    "wrong",
    [
        "",
        "Bearer",
        "Bearer ",
        "Bearer x",
        "Basic eDp5",
        "Bearer baton_0_x",
        "Bearer \u00e9",
        "\x00",
    ],
)
def test_an_invalid_credential_is_unauthenticated(keys, wrong):
    keys.add("one", tenant="search")
    with pytest.raises(Unauthenticated):
        access(api_keys_file=keys.path).caller(wrong)


def test_a_known_id_with_another_secret_is_unknown(keys):
    key = keys.add("one", tenant="search")
    last = "A" if key[-1] != "A" else "B"
    found = access(api_keys_file=keys.path)
    with pytest.raises(Unauthenticated) as caught:
        found.caller(f"Bearer {key[:-1]}{last}")
    assert refused(found) == {"unknown": 1}
    assert key[-20:-1] not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "said", "reason"),
    [
        ("search", {"tenant": "other"}, "tenant"),
        ("batch", {"lane": "interactive"}, "lane"),
        ("short", {"sampling": SamplingParams(max_tokens=11)}, "max_output_tokens"),
        ("short", {"sampling": SamplingParams(min_tokens=11)}, "max_output_tokens"),
        ("admin", {}, "no_inference"),
    ],
)
def test_a_request_beyond_the_grants_is_denied_and_counted(keys, log, key, said, reason):
    made = {
        "search": keys.add("search", tenant="search"),
        "batch": keys.add("batch", tenant="search", lanes=["batch"]),
        "short": keys.add("short", tenant="search", max_output_tokens=10),
        "admin": keys.add("admin", admin=True),
    }
    found = access(api_keys_file=keys.path)
    with pytest.raises(PermissionDenied) as caught:
        request(found, made[key], **said)
    assert refused(found) == {reason: 1}
    assert log.reasons() == {reason}
    # The log has the key's name but not the key.
    assert any(f"'key': '{key}'" in line for line in log.lines)
    shown = "".join([*log.lines, str(caught.value)])
    assert not any(secret[-40:] in shown for secret in keys.secrets)


def test_an_expired_key_is_refused_as_expired(keys):
    old = keys.add("old", tenant="search", expires=NOW - timedelta(seconds=1))
    good = keys.add("good", tenant="search", expires=NOW + timedelta(seconds=1))
    found = access(api_keys_file=keys.path)
    with pytest.raises(Unauthenticated, match="has expired"):
        found.caller(f"Bearer {old}")
    assert found.caller(f"Bearer {good}").name == "good"
    assert refused(found) == {"expired": 1}


def test_a_removed_key_is_refused_and_a_broken_file_changes_nothing(keys, log):
    key, other = keys.add("one", tenant="a"), keys.add("two", tenant="b")
    found = access(api_keys_file=keys.path)
    keys.remove("one")
    with pytest.raises(Unauthenticated):
        found.caller(f"Bearer {key}")
    with open(keys.path, "w") as file:
        file.write("keys: [{id: secret-that-somebody-put-there}]")
    assert found.caller(f"Bearer {other}").name == "two"
    assert any("cannot be used" in line for line in log.lines)
    assert not any("secret-that-somebody-put-there" in line for line in log.lines)


@pytest.mark.parametrize(
    "wrong", [b"keys: [{expires: 2030-13-45T00:00:00Z}]", b"\xff\xfe", b"keys: [{", b"[1]"]
)
def test_an_invalid_key_file_changes_nothing(keys, log, wrong):
    key = keys.add("one", tenant="a")
    found = access(api_keys_file=keys.path)
    Path(keys.path).write_bytes(wrong)
    assert found.caller(f"Bearer {key}").name == "one"
    assert any("cannot be used" in line for line in log.lines)
    with pytest.raises(ConfigError):
        access(api_keys_file=keys.path)


def test_prompts_and_running_requests_have_limits(keys):
    key = keys.add("one", tenant="a", max_prompt_tokens=10, max_concurrent=1)
    found = access(api_keys_file=keys.path)
    caller = found.caller(f"Bearer {key}")
    found.check_prompt(caller, 10)
    with pytest.raises(PermissionDenied, match="11 tokens; at most 10"):
        found.check_prompt(caller, 11)
    leave = found.acquire_slot(caller)
    with pytest.raises(ResourceExhausted) as caught:
        found.acquire_slot(caller)
    assert caught.value.reason == "CREDENTIAL_CONCURRENCY"
    leave()
    found.acquire_slot(caller)


def test_a_resumed_request_shares_the_slot_of_the_earlier_one(keys):
    one, other = (keys.add(name, tenant="a", max_concurrent=1) for name in ("one", "other"))
    found = access(api_keys_file=keys.path)
    caller, stranger = (found.caller(f"Bearer {key}") for key in (one, other))

    def is_refused(who, *names, **options):
        with pytest.raises(ResourceExhausted):
            found.acquire_slot(who, *names, **options)
        return True

    older = found.acquire_slot(caller, "r")
    assert is_refused(caller, "r")
    assert is_refused(caller, "s", resumes=True)
    newer = found.acquire_slot(caller, "r", resumes=True)
    assert is_refused(caller, "r", resumes=True)
    older()
    assert is_refused(caller, "s")
    # A request cannot take over the slot of another credential's request.
    elsewhere = found.acquire_slot(stranger, "s")
    assert is_refused(stranger, "r", resumes=True)
    newer()
    elsewhere()
    for who in (caller, stranger):
        found.acquire_slot(who)
        assert is_refused(who)


def test_admin_and_inference_are_different_rights(keys):
    user, admin = keys.add("user", tenant="a"), keys.add("admin", admin=True)
    both = keys.add("both", tenant="a", admin=True)
    found = access(api_keys_file=keys.path)
    for key in (admin, both):
        found.check_admin(f"Bearer {key}", [])
    with pytest.raises(PermissionDenied, match="no admin rights"):
        found.check_admin(f"Bearer {user}", [])
    with pytest.raises(Unauthenticated):
        found.check_admin("", [])
    found.caller(f"Bearer {both}")
    assert refused(found) == {"not_admin": 1, "missing": 1}


def test_the_cluster_token(tmp_path):
    file = tmp_path / "token"
    file.write_text("first\n")
    found = access(cluster_token_file=str(file))
    found.check_worker("Bearer first", [], "Cluster")
    for wrong in ("", "Bearer", "Bearer firs", "Bearer first2"):
        with pytest.raises(Unauthenticated):
            found.check_worker(wrong, [], "Cluster")
    file.write_text("second-one\n")
    found.check_worker("Bearer second-one", [], "Cluster")
    assert refused(found) == {"missing": 1, "unknown": 3}


def test_many_refusals_do_not_fill_the_log(log):
    now = [0.0]
    refusals = Refusals(lambda: now[0])
    for _ in range(1000):
        refusals.count("Inference", "unknown")
    assert len(log.lines) == 20
    now[0] = 5.0
    refusals.count("Inference", "unknown")
    assert "'not_logged': '980'" in log.lines[-1]
    assert refusals.counts["Inference", "unknown"] == 1001


# ---- JWTs.


def test_a_token_carries_the_same_grants(issuer):
    found = jwt_access(issuer)
    caller = request(found, issuer.token(lanes=["batch"], max_output_tokens=5), lane="batch")
    assert (caller.name, caller.grants.tenant) == ("jwt:svc", "search")
    with pytest.raises(PermissionDenied):
        request(found, issuer.token(lanes=["batch"]))
    found.check_admin(f"Bearer {issuer.token(admin=True)}", [])
    with pytest.raises(PermissionDenied):
        found.check_admin(f"Bearer {issuer.token()}", [])


def test_a_subject_cannot_write_log_lines(issuer):
    found = jwt_access(issuer)
    assert request(found, issuer.token(sub="a\nb\x1b[2J\u2028é")).name == "jwt:a?b?[2J?é"


def test_running_requests_are_counted_per_subject(issuer, keys):
    long = "x" * 90
    tokens = [
        issuer.token(sub=sub, tenant=tenant, max_concurrent=1)
        for sub, tenant in (
            ("svc", "search"),
            ("svc", "other"),
            (f"{long}1", "search"),
            (f"{long}2", "search"),
            (None, "search"),
            (None, "other"),
            ("-", "search"),
        )
    ]
    found = jwt_access(issuer)
    places = [found.acquire_slot(request(found, token)) for token in tokens]
    for token in tokens:
        with pytest.raises(ResourceExhausted):
            found.acquire_slot(request(found, token))
    for give_back in places:
        give_back()
    # A key is counted separately, even if its name looks like a token's subject.
    named = [keys.add("jwt:svc", tenant=tenant, max_concurrent=1) for tenant in ("search", "b")]
    both = Access(SecurityConfig(api_keys_file=keys.path, jwt=issuer.config), Refusals())
    for credential in (*named, tokens[0]):
        both.acquire_slot(request(both, credential))


@pytest.mark.parametrize("claim", ["iat", "nbf"])
def test_the_clock_of_the_identity_provider_may_be_ahead(issuer, claim):
    """A new token is used at once, before this host's clock reaches its beginning."""
    token = issuer.token(**{claim: time.time() + 30})
    assert request(jwt_access(issuer), token).grants.tenant == "search"
    found = jwt_access(issuer)
    with pytest.raises(Unauthenticated):
        request(found, issuer.token(exp=time.time() - 1))
    assert refused(found) == {"expired": 1}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"exp": 1000}, "expired"),
        ({"exp": None}, "invalid"),
        ({"iat": 4_000_000_000}, "invalid"),
        ({"nbf": 4_000_000_000}, "invalid"),
        ({"iss": "https://other.test"}, "issuer"),
        ({"aud": "other"}, "audience"),
        ({"aud": None}, "invalid"),
        ({"lanes": ["express"]}, "claims"),
        ({"tenant": "a b"}, "claims"),
        ({"tenant": None}, "no_inference"),
        ({"note": "x" * 20_000}, "too_long"),
    ],
)
def test_invalid_tokens_are_refused(issuer, log, changes, reason):
    found, token = jwt_access(issuer), issuer.token(**changes)
    with pytest.raises((Unauthenticated, PermissionDenied)) as caught:
        found.caller(f"Bearer {token}")
    assert refused(found) == {reason: 1}
    assert token.split(".")[2] not in "".join([*log.lines, str(caught.value)])


def test_tokens_with_a_foreign_signature_are_refused(issuer):
    found = jwt_access(issuer)
    for token in (
        issuer.token(key=ec.generate_private_key(ec.SECP256R1())),
        # Uses the public key as a shared secret.
        jwt.utils.base64url_encode(b'{"alg":"HS256"}').decode() + ".e30.e30",
        jwt.utils.base64url_encode(b'{"alg":"none"}').decode() + ".e30.",
        "a.b.c",
    ):
        with pytest.raises(Unauthenticated, match="not valid here"):
            found.caller(f"Bearer {token}")


def test_a_key_set_is_searched_by_key_id(issuer):
    second = ed25519.Ed25519PrivateKey.generate()
    first_jwk = json.loads(jwt.algorithms.ECAlgorithm.to_jwk(issuer.key.public_key()))
    second_jwk = json.loads(jwt.algorithms.OKPAlgorithm.to_jwk(second.public_key()))
    keys = [{**first_jwk, "kid": "a"}, {**second_jwk, "kid": "b", "alg": "EdDSA"}]
    issuer.file.write_text(json.dumps({"keys": keys}))
    found = jwt_access(issuer)
    found.caller(f"Bearer {issuer.token(headers={'kid': 'a'})}")
    found.caller(f"Bearer {issuer.token(key=second, algorithm='EdDSA', headers={'kid': 'b'})}")
    with pytest.raises(Unauthenticated):
        found.caller(f"Bearer {issuer.token(headers={'kid': 'c'})}")
    # After the issuer has withdrawn a key, its tokens are refused.
    good = issuer.token(headers={"kid": "a"})
    found.caller(f"Bearer {good}")
    issuer.file.write_text(json.dumps({"keys": keys[1:]}))
    with pytest.raises(Unauthenticated):
        found.caller(f"Bearer {good}")


@pytest.mark.parametrize("wrong", [b"nothing", b"\xff\xfe"])
def test_a_file_without_a_public_key_is_refused_at_start(issuer, wrong):
    issuer.file.write_bytes(wrong)
    with pytest.raises(ConfigError, match="neither a public key in PEM nor a JWKS"):
        jwt_access(issuer)
