"""A gateway in the test's event loop, and a client for its metrics."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import urllib.request

from baton.cli.gateway import bind
from baton.gateway.server import CellEndpoints, serve
from baton.runtime.config import HttpConfig
from baton.runtime.security.security_config import SecurityConfig

# Longest wait for an event that must happen; long enough for a busy machine.
WAIT_S = 120.0


@contextlib.asynccontextmanager
async def gateway(coordinator, pki=None, security=None, **limits):
    """Runs a gateway in front of a coordinator, with TLS if `pki` is given; yields host:port."""
    options = security or {}
    found = SecurityConfig(**(pki.server(**options) if pki else options))
    listener, url = bind("127.0.0.1:0")
    ready, stop = asyncio.Event(), asyncio.Event()
    task = asyncio.create_task(
        serve(
            HttpConfig(drain_timeout_s=1.0, **limits),
            [CellEndpoints([coordinator])],
            listener,
            ready=ready.set,
            resume_timeout_s=WAIT_S,
            stop=stop,
            security=found,
        )
    )
    await asyncio.wait_for(ready.wait(), WAIT_S)
    try:
        yield url.removeprefix("http://")
    finally:
        stop.set()
        assert await task == 0


def metrics(address, pki=None, stem="", token=""):
    """Metrics page, fetched with that certificate and token; raises OSError."""
    context = ssl.create_default_context(cafile=pki.file("ca.pem")) if pki else None
    if stem:
        context.load_cert_chain(pki.file(f"{stem}.pem"), pki.file(f"{stem}.key"))
    request = urllib.request.Request(f"{'https' if pki else 'http'}://{address}/metrics")
    if token:
        request.add_header("authorization", f"Bearer {token}")
    with urllib.request.urlopen(request, timeout=WAIT_S, context=context) as answer:
        return answer.read().decode()
