"""A running cell that accepts an identity provider's tokens, over gRPC and HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request

import pytest
import yaml

from baton.client import AdminClient, BatonClient, errors

# Longest wait for an event that must happen; long enough for a busy machine.
WAIT_S = 120.0
PROMPT = list(range(5, 25))


@contextlib.contextmanager
def running(directory, model, **sections):
    """Runs `baton up`; yields addresses of gRPC and HTTP, the metrics URL, and a log reader."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        metrics = f"127.0.0.1:{probe.getsockname()[1]}"
    config = {
        "model": model,
        "served_model_name": "demo",
        "engine": "simulated",
        "simulated": {"time_scale": 0},
        "kv_transfer": {"send_bytes": 2**22, "receive_bytes": 2**22},
        "coordinator": {"listen": "127.0.0.1:0", "metrics_listen": metrics},
        "http": {"listen": "127.0.0.1:0"},
        **sections,
    }
    path, log = directory / "baton.yaml", directory / "log"
    path.write_text(yaml.safe_dump(config))
    env = {key: value for key, value in os.environ.items() if not key.startswith("BATON_")}
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "baton.cli", "up", "--config", str(path)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=env | {"HOME": str(directory)},
            process_group=0,
        )
    try:
        told = re.match(r"ready grpc=(\S+) http=(\S+)", process.stdout.readline())
        assert told, log.read_text()[-3000:]
        yield told[1], told[2], f"http://{metrics}/metrics", log.read_text
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) == 0, log.read_text()[-3000:]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        process.stdout.close()


def post(url, token):
    """Status and body of a completion over HTTP."""
    body = json.dumps({"prompt": PROMPT, "max_tokens": 3}).encode()
    headers = {"content-type": "application/json", "authorization": f"Bearer {token}"}
    request = urllib.request.Request(f"{url}/v1/completions", body, headers)
    try:
        with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def refusals(url):
    with urllib.request.urlopen(url, timeout=WAIT_S) as answer:
        text = answer.read().decode()
    pattern = r'^baton_access_refusals_total\{reason="(\w+)",service="(\w+)"\} (\d+)'
    return {(m[2], m[1]): int(m[3]) for m in re.finditer(pattern, text, re.MULTILINE)}


async def test_tokens_of_an_identity_provider(issuer, model, tmp_path):
    stranger = type(issuer)(tmp_path / "stranger.pem")
    good, operator = issuer.token(), issuer.token(sub="ops", tenant=None, admin=True)
    bad = {
        "expired": issuer.token(exp=1000),
        "audience": issuer.token(aud="another service"),
        "issuer": issuer.token(iss="https://elsewhere.test"),
        "invalid": stranger.token(),
        "claims": issuer.token(lanes=["express"]),
    }
    with running(tmp_path, model, security={"jwt": issuer.config}) as (grpc, http, metrics, log):
        async with BatonClient(grpc, api_key=good) as client:
            answer = await client.complete(PROMPT, max_tokens=3, timeout_s=WAIT_S)
            assert answer.usage.completion_tokens == 3
            told = "tenant is 'finance'; this credential may use "
            with pytest.raises(errors.PermissionDeniedError, match=told):
                await client.complete(PROMPT, max_tokens=3, tenant="finance", timeout_s=WAIT_S)
        status, body = await asyncio.to_thread(post, http, good)
        assert (status, body["usage"]["completion_tokens"]) == (200, 3)
        for reason, token in bad.items():
            told = "has expired" if reason == "expired" else "not valid here"
            async with BatonClient(grpc, api_key=token) as client:
                with pytest.raises(errors.UnauthenticatedError, match=told):
                    await client.complete(PROMPT, max_tokens=3, timeout_s=WAIT_S)
            status, body = await asyncio.to_thread(post, http, token)
            assert (status, body["error"]["code"]) == (401, "invalid_api_key")
        # The right to send requests does not include the Admin service, nor the reverse.
        async with AdminClient(grpc, api_key=operator) as admin:
            tenants = {one.tenant for one in await admin.list_requests(include_ended=True)}
            assert tenants == {"search"}
        async with AdminClient(grpc, api_key=good) as admin:
            with pytest.raises(errors.PermissionDeniedError):
                await admin.list_workers()
        async with BatonClient(grpc, api_key=operator) as client:
            with pytest.raises(errors.PermissionDeniedError, match="names no tenant"):
                await client.complete(PROMPT, max_tokens=3, timeout_s=WAIT_S)
        assert await asyncio.to_thread(refusals, metrics) == {
            **{("Inference", reason): 2 for reason in bad},
            ("Inference", "tenant"): 1,
            ("Inference", "no_inference"): 1,
            ("Admin", "not_admin"): 1,
        }
        said = log()
    for reason in (*bad, "tenant", "not_admin"):
        assert re.search(rf"refused .*reason={reason} ", said), reason
    assert "key=jwt:svc" in said
    for token in (good, operator, *bad.values()):
        for part in token.split("."):
            assert part not in said
