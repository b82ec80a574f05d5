"""The metrics endpoint of a process."""

import functools
import threading
import urllib.request

import pytest
from prometheus_client import CollectorRegistry

from baton.runtime import metrics


@pytest.mark.parametrize("asked", [False, True])
def test_it_ends_at_once_and_not_when_its_thread_looks_next(monkeypatch, asked):
    forever = functools.partialmethod(metrics._Server.serve_forever, poll_interval=3600.0)
    monkeypatch.setattr(metrics._Server, "serve_forever", forever)
    server = metrics.MetricsServer("127.0.0.1:0", "metrics_listen", CollectorRegistry())
    if asked:
        with urllib.request.urlopen(f"http://{server.address}/metrics", timeout=60) as answer:
            assert answer.status == 200
    # Not this thread: it would wait for as long.
    closing = threading.Thread(target=server.close, daemon=True)
    closing.start()
    closing.join(60)
    assert not closing.is_alive()
    assert not server._thread.is_alive()
