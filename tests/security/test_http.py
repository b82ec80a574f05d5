"""Authentication at the gateway's port, and at links without TLS."""

import asyncio
import contextlib
import http.client
import socket
import ssl
import urllib.error
import urllib.request
from types import SimpleNamespace

import httpx2 as httpx
import pytest

from baton.gateway import cell, coordinator_queries
from baton.kvtransfer.errors import TransferError
from baton.kvtransfer.transports import links as links_module
from baton.kvtransfer.transports.links import Links
from baton.v1 import kv_transfer_pb2
from tests.security.http_gateway import gateway, metrics

# Longest wait for an event that must happen; long enough for a busy machine.
WAIT_S = 120.0


async def test_http_can_require_certificates(start_coordinator, pki, log):
    required = {"http_client_auth": "require", "handshake_timeout_s": 1.0}
    async with (
        start_coordinator(pki.server()) as running,
        gateway(running.address, pki, required) as address,
    ):
        for stem in ("", "wrong", "expired"):
            with pytest.raises((ssl.SSLError, urllib.error.URLError, ConnectionError)):
                await asyncio.to_thread(metrics, address, pki, stem)
        counted = 'baton_access_refusals_total{reason="handshake",service="TLS"} 3.0'
        async with asyncio.timeout(WAIT_S):
            while counted not in await asyncio.to_thread(metrics, address, pki, "client"):
                await asyncio.sleep(0.1)
        assert any("TLS handshakes were not followed by a call" in line for line in log.lines)


async def test_metrics_of_the_gateway_need_a_token_if_requests_need_a_key(
    start_coordinator, keys, tmp_path
):
    keys.add("one", tenant="a")
    file = tmp_path / "token"
    file.write_text("scraper")
    known = {"api_keys_file": keys.path}
    async with start_coordinator(known) as running:
        async with gateway(running.address, security=known) as address:
            with pytest.raises(urllib.error.HTTPError, match="401"):
                await asyncio.to_thread(metrics, address)
        known["metrics_token_file"] = str(file)
        async with gateway(running.address, security=known) as address:
            for token in ("", "guess"):
                with pytest.raises(urllib.error.HTTPError, match="401"):
                    await asyncio.to_thread(metrics, address, token=token)
            shown = await asyncio.to_thread(metrics, address, token="scraper")
            assert 'baton_access_refusals_total{reason="unknown",service="metrics"} 1.0' in shown


@pytest.mark.parametrize("path", ["/dashboard/data", "/dashboard/requests/r1"])
async def test_the_dashboard_is_for_operators_only(start_coordinator, keys, path):
    """An answer for one operator is not shown to the next caller."""
    user, operator = keys.add("search", tenant="a"), keys.add("ops", admin=True)
    known = {"api_keys_file": keys.path}
    async with (
        start_coordinator(known) as running,
        gateway(running.address, security=known) as address,
    ):

        def status(key: str) -> int:
            request = urllib.request.Request(f"http://{address}{path}")
            if key:
                request.add_header("authorization", f"Bearer {key}")
            try:
                with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
                    return int(answer.status)
            except urllib.error.HTTPError as error:
                return error.code

        there = 200 if path.endswith("data") else 404
        shown = [await asyncio.to_thread(status, key) for key in (operator, "", user, operator)]
        assert shown == [there, 401, 403, there]
        page = urllib.request.Request(f"http://{address}/dashboard")
        with await asyncio.to_thread(urllib.request.urlopen, page, timeout=WAIT_S) as answer:
            # The page itself contains no data of the cell.
            assert answer.status == 200


async def test_only_admitted_callers_store_files_and_see_their_own(
    start_coordinator, keys, tmp_path
):
    one, other = keys.add("one", tenant="a"), keys.add("other", tenant="b")
    known, batches = {"api_keys_file": keys.path}, {"dir": str(tmp_path / "batches")}
    async with (
        start_coordinator(known) as running,
        gateway(running.address, security=known, batches=batches) as address,
        httpx.AsyncClient(base_url=f"http://{address}", timeout=WAIT_S) as http,
    ):

        def bearer(key: str) -> dict[str, str]:
            return {"authorization": f"Bearer {key}"} if key else {}

        async def upload(key: str) -> httpx.Response:
            form = {"data": {"purpose": "batch"}, "files": {"file": ("a", b"{}")}}
            return await http.post("/v1/files", headers=bearer(key), **form)

        for key in ("", "guess"):
            assert (await upload(key)).status_code == 401
            assert (await http.post("/v1/batches", headers=bearer(key), json={})).status_code == 401
        stored = await upload(one)
        assert stored.status_code == 200, stored.text
        path = f"/v1/files/{stored.json()['id']}"
        seen = [(await http.get(path, headers=bearer(key))).status_code for key in (one, other, "")]
        assert seen == [200, 404, 401]
        assert (await http.delete(path, headers=bearer(other))).status_code == 404


async def test_spellings_of_one_key_share_its_files_and_places(start_coordinator, keys, tmp_path):
    one, other = keys.add("one", tenant="a"), keys.add("other", tenant="b")
    known, batches = {"api_keys_file": keys.path}, {"dir": str(tmp_path / "b"), "max_files": 8}
    async with (
        start_coordinator(known) as running,
        gateway(running.address, security=known, batches=batches) as address,
        httpx.AsyncClient(base_url=f"http://{address}", timeout=WAIT_S) as http,
    ):

        async def upload(authorization: str) -> int:
            form = {"data": {"purpose": "batch"}, "files": {"file": ("a", b"{}")}}
            headers = {"authorization": authorization}
            return (await http.post("/v1/files", headers=headers, **form)).status_code

        spellings = [f"Bearer {' ' * number}{one}" for number in range(8)] + [f"bearer {one}"]
        assert {await upload(spelling) for spelling in spellings} == {200, 507}
        assert await upload(f"Bearer {other}") == 200
        listed = [
            (await http.get("/v1/files", headers={"authorization": spelling})).json()["data"]
            for spelling in (f"Bearer {one}", f"bearer   {one}")
        ]
        assert listed[0] == listed[1] != []


async def test_slow_uploads_of_one_caller_leave_room_for_others(start_coordinator, keys, tmp_path):
    slow, other = keys.add("slow", tenant="a"), keys.add("other", tenant="b")
    known, batches = {"api_keys_file": keys.path}, {"dir": str(tmp_path / "batches")}
    field = b"--b\r\ncontent-disposition: form-data; name="
    begin = field + b'"purpose"\r\n\r\nbatch\r\n'
    end = field + b'"file"; filename="f"\r\n\r\n{}\r\n--b--\r\n'
    async with contextlib.AsyncExitStack() as stack:
        running = await stack.enter_async_context(start_coordinator(known))
        address = await stack.enter_async_context(
            gateway(running.address, security=known, batches=batches)
        )
        host, port = address.rsplit(":", 1)

        async def begin_upload(key):
            """Sends half an upload; returns its writer, and a task that waits for the status."""
            reader, writer = await asyncio.open_connection(host, int(port))
            stack.callback(writer.close)
            head = (
                f"POST /v1/files HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {key}\r\n"
                "content-type: multipart/form-data; boundary=b\r\n"
                f"content-length: {len(begin + end)}\r\n\r\n"
            )
            writer.write(head.encode() + begin)
            return writer, asyncio.create_task(reader.readline())

        writers = dict([(await begin_upload(slow))[::-1] for _ in range(9)])
        (refused,), waiting = await asyncio.wait(
            writers, timeout=WAIT_S, return_when=asyncio.FIRST_COMPLETED
        )
        assert refused.result().split()[1] == b"429"
        writer, status = await begin_upload(other)
        writer.write(end)
        assert (await asyncio.wait_for(status, WAIT_S)).split()[1] == b"200"
        for status in waiting:
            writers[status].write(end)
            assert (await asyncio.wait_for(status, WAIT_S)).split()[1] == b"200"


async def test_a_removed_key_reads_deletes_and_cancels_nothing(
    start_coordinator, keys, tmp_path, monkeypatch
):
    # The gateway asks the coordinator about the credential of each request.
    monkeypatch.setattr(cell, "_MODEL_TTL_S", 0.0)
    monkeypatch.setattr(coordinator_queries, "_ERROR_TTL_S", 0.0)
    key = keys.add("search", tenant="a")
    known, batches = {"api_keys_file": keys.path}, {"dir": str(tmp_path / "batches")}
    bearer = {"authorization": f"Bearer {key}"}
    async with (
        start_coordinator(known) as running,
        gateway(running.address, security=known, batches=batches) as address,
        httpx.AsyncClient(base_url=f"http://{address}", timeout=WAIT_S, headers=bearer) as http,
    ):
        form = {"data": {"purpose": "batch"}, "files": {"file": ("a", b"{}")}}
        file = (await http.post("/v1/files", **form)).json()["id"]
        body = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
        batch = (await http.post("/v1/batches", json=body)).json()["id"]
        requests = [
            ("GET", "/v1/files"),
            ("GET", f"/v1/files/{file}"),
            ("GET", f"/v1/files/{file}/content"),
            ("GET", "/v1/batches"),
            ("GET", f"/v1/batches/{batch}"),
        ]
        for method, path in requests:
            assert (await http.request(method, path)).status_code == 200
        requests += [
            ("POST", f"/v1/batches/{batch}/cancel"),
            ("DELETE", f"/v1/files/{file}"),
            ("GET", "/v1/responses/resp_1"),
            ("DELETE", "/v1/responses/resp_1"),
        ]
        keys.remove("search")
        answers = {one: (await http.request(*one)).status_code for one in requests}
        assert answers == dict.fromkeys(requests, 401)


async def test_stored_objects_are_not_shown_while_no_coordinator_checks_credentials(tmp_path):
    batches = {"dir": str(tmp_path / "batches")}
    # A bound socket that does not listen refuses connections.
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        host, port = bound.getsockname()
        async with (
            gateway(f"{host}:{port}", batches=batches) as address,
            httpx.AsyncClient(base_url=f"http://{address}", timeout=WAIT_S) as http,
        ):
            for path in ("/v1/files", "/v1/batches", "/v1/responses/resp_1"):
                assert (await http.get(path)).status_code == 503


async def test_a_credential_that_cannot_be_sent_is_refused(start_coordinator, keys, log):
    keys.add("search", tenant="a")
    known = {"api_keys_file": keys.path}

    def ask(address, path, credential) -> int:
        connection = http.client.HTTPConnection(address, timeout=WAIT_S)
        with contextlib.closing(connection):
            connection.request("GET", path, headers={"authorization": credential})
            return connection.getresponse().status

    async with (
        start_coordinator(known) as running,
        gateway(running.address, security=known) as address,
    ):
        for path in ("/v1/models", "/v1/models/m", "/dashboard/data", "/dashboard/requests/r"):
            for credential in ("Bearer \xe9", "\x80", "Bearer a\tb", "x" * 20_000):
                assert await asyncio.to_thread(ask, address, path, credential) == 401
    # These refusals do not fill the log.
    assert not any("failed" in line for line in log.lines)


async def test_files_that_become_invalid_before_the_first_handshake_change_nothing(
    start_coordinator, fresh_pki
):
    async with (
        start_coordinator(fresh_pki.server()) as running,
        gateway(running.address, fresh_pki) as address,
    ):
        (fresh_pki.directory / "server.pem").write_text("half a certificate")
        assert "baton_http" in await asyncio.to_thread(metrics, address, fresh_pki)


async def test_links_without_tls_do_not_leave_the_host(monkeypatch):
    fingerprint = kv_transfer_pb2.KvFingerprint(block_bytes=64)
    limits = {"open_timeout_s": 1.0, "frame_timeout_s": 1.0}
    handler = SimpleNamespace(fingerprint=lambda: fingerprint)
    inside = Links("gloo", handler, memoryview(b""), **limits, within_host=True)
    # Simulates a route to the target over a network interface.
    monkeypatch.setattr(links_module, "local_address", lambda host, port: "192.0.2.9")
    await asyncio.wait_for(inside.wait_decided("127.0.0.1:1"), WAIT_S)
    with pytest.raises(TransferError, match=r"no TLS.*security.allow_plain_links: true"):
        inside.link_id("127.0.0.1:1")
    monkeypatch.setattr(links_module, "local_address", lambda host, port: "127.0.0.1")
    await asyncio.wait_for(inside.wait_decided("127.0.0.1:2"), WAIT_S)
    with pytest.raises(TransferError) as caught:
        inside.link_id("127.0.0.1:2")
    # The link was dialled, and no peer listens there.
    assert "no TLS" not in str(caught.value)
    await inside.close()
