"""The metrics endpoint of a process."""

import functools
import threading
import urllib.request

import pytest
from prometheus_client import CollectorRegistry

from baton.runtime.telemetry import metrics


@pytest.mark.parametrize("asked", [False, True])
def test_close_does_not_wait_for_the_poll_interval(monkeypatch, asked):
    forever = functools.partialmethod(metrics._Server.serve_forever, poll_interval=3600.0)
    monkeypatch.setattr(metrics._Server, "serve_forever", forever)
    server = metrics.MetricsServer("127.0.0.1:0", "metrics_listen", CollectorRegistry())
    if asked:
        with urllib.request.urlopen(f"http://{server.address}/metrics", timeout=60) as answer:
            assert answer.status == 200
    # In another thread, because `close` would otherwise block this one on failure.
    closing = threading.Thread(target=server.close, daemon=True)
    closing.start()
    closing.join(120)
    assert not closing.is_alive()
    assert not server._thread.is_alive()
