"""A gateway in the test's own loop, and a plain question to it."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import urllib.request

from baton.cli.gateway import bind
from baton.gateway.server import CellEndpoints, serve
from baton.runtime.config import HttpConfig
from baton.runtime.security_config import SecurityConfig

WAIT_S = 30.0


@contextlib.asynccontextmanager
async def gateway(coordinator, pki=None, security=None, **limits):
    """Its host:port, in front of a coordinator; with TLS where there is a `pki`."""
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
    """What it tells, asked by whoever has that certificate and token; raises OSError."""
    context = ssl.create_default_context(cafile=pki.file("ca.pem")) if pki else None
    if stem:
        context.load_cert_chain(pki.file(f"{stem}.pem"), pki.file(f"{stem}.key"))
    request = urllib.request.Request(f"{'https' if pki else 'http'}://{address}/metrics")
    if token:
        request.add_header("authorization", f"Bearer {token}")
    with urllib.request.urlopen(request, timeout=WAIT_S, context=context) as answer:
        return answer.read().decode()
