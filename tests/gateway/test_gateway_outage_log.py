"""Log lines about an unreachable coordinator."""

import asyncio
import logging

import httpx2 as httpx
import pytest

from baton.client import errors
from baton.gateway.outage_log import OutageLog
from baton.runtime.errors import ResourceExhausted, Unavailable
from tests.client.scripted_inference import accepted, delta, finished, serving, unused_address

WAIT_S = 300.0


@pytest.fixture
def lines(caplog):
    """Returns a function that lists the log lines about outages, in order."""
    caplog.set_level(logging.INFO, logger="baton.gateway.outage_log")
    return lambda: [
        one.getMessage() for one in caplog.records if one.name == "baton.gateway.outage_log"
    ]


async def post(gateway):
    async with httpx.AsyncClient(timeout=WAIT_S) as http:
        return await http.post(f"{gateway.url}/v1/completions", json={"prompt": "a"})


async def test_an_outage_and_its_end_are_one_log_line_each(inference, start_gateway, lines):
    address = unused_address()
    async with start_gateway(address) as gateway:
        for _ in range(3):
            assert (await post(gateway)).status_code == 503
        (line,) = lines()
        assert f"cannot reach the coordinator at {address}" in line
        async with serving(inference, address):
            answers = [asyncio.create_task(post(gateway)) for _ in range(2)]
            connection = await inference.connection()
            for _ in answers:
                stream = (await connection.submitted()).stream
                connection.send(accepted(stream), delta(stream, 0, [1], "a"), finished(stream))
            for answer in answers:
                assert (await answer).status_code == 200
        assert len(lines()) == 2
        assert "serves again" in lines()[1]


async def test_a_health_probe_reports_the_outage(start_gateway, lines):
    address = unused_address()
    async with (
        start_gateway(address, query_timeout_s=2.0) as gateway,
        httpx.AsyncClient(timeout=WAIT_S) as http,
    ):
        assert (await http.get(f"{gateway.url}/health")).status_code == 503
    (line,) = lines()
    assert f"the coordinator at {address} is unreachable" in line


async def test_a_wrong_address_is_reported_before_the_first_request(start_gateway, caplog):
    address, reported = unused_address(), asyncio.Event()

    class Outages(logging.Handler):
        def emit(self, record):
            reported.set()

    logger = logging.getLogger("baton.gateway.outage_log")
    logger.addHandler(handler := Outages())
    try:
        async with start_gateway(address, query_timeout_s=0.5):
            await asyncio.wait_for(reported.wait(), WAIT_S)
    finally:
        logger.removeHandler(handler)
    assert f"the coordinator at {address} is unreachable" in caplog.text


def test_alternating_failures_and_successes_do_not_fill_the_log(lines):
    now = [0.0]
    outage = OutageLog(lambda: now[0])
    outage.failed(errors.from_baton(ResourceExhausted("full", reason="FULL", retry_after_s=1.0)))
    assert lines() == []
    for _ in range(50):
        outage.failed(errors.from_baton(Unavailable("no decode worker is attached")))
        now[0] += 0.5
        outage.served()
    assert len(lines()) == 2
    now[0] += 60
    outage.failed(errors.from_baton(Unavailable("no decode worker is attached")))
    assert len(lines()) == 3
