"""A whole cell with TLS, client certificates, keys and a cluster token, end to end."""

import asyncio
import json
import socket
import ssl
import urllib.error
import urllib.request
from contextlib import AsyncExitStack
from dataclasses import dataclass

import grpc
import pytest
from cryptography import x509
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.cli.gateway import bind
from baton.client import AdminClient, BatonClient, Tls
from baton.client.errors import PermissionDeniedError
from baton.coordinator.server.server import Coordinator
from baton.engine.sim_tokens import Vocabulary, expected_tokens
from baton.gateway.server import CellEndpoints
from baton.gateway.server import serve as serve_gateway
from baton.kvtransfer.grpc_methods import HANDOFF_METHOD
from baton.runtime.network import rpc
from baton.runtime.process import output_streams
from baton.runtime.security.dev_certs import CLUSTER_NAME, Authority
from baton.runtime.security.dial import Dial, bearer
from baton.runtime.security.tls import TlsFiles
from baton.v1 import common_pb2
from baton.worker.main import serve as serve_worker

# Longest wait for an event that must happen; long enough for a busy machine.
WAIT_S = 120.0
PROMPT = list(range(5, 45))


@dataclass
class Cell:
    """A cell in this process; only the workers' transfer services are separate processes."""

    pki: object
    coordinator: Coordinator
    http: str
    keys: dict[str, str]
    vocabulary: Vocabulary
    metrics: str

    @property
    def address(self):
        return self.coordinator.address

    def client(self, key="search"):
        return BatonClient(self.address, tls=self.pki.tls("client"), api_key=self.keys[key])

    def admin(self, key="ops"):
        return AdminClient(self.address, tls=self.pki.tls("client"), api_key=self.keys[key])

    @property
    def num_handoffs(self):
        return self.coordinator.shell.core.stats.handoffs["grpc"]

    async def has_handed_over(self, num_handoffs):
        """Waits until this many handoffs are reported; reports may come after the answers."""
        async with asyncio.timeout(WAIT_S):
            while self.num_handoffs < num_handoffs:
                await asyncio.sleep(0.01)
        return self.num_handoffs == num_handoffs

    async def post(self, key, **body):
        """Status, headers and JSON of a completion over HTTPS."""
        return await asyncio.to_thread(self._post, key, {"max_tokens": 4, **body})

    def _post(self, key, body):
        request = urllib.request.Request(
            f"https://{self.http}/v1/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        if key:
            request.add_header("authorization", f"Bearer {key}")
        context = ssl.create_default_context(cafile=self.pki.file("ca.pem"))
        try:
            with urllib.request.urlopen(request, timeout=WAIT_S, context=context) as answer:
                return answer.status, answer.headers, json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.headers, json.load(error)


def unused_address():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


@pytest.fixture
async def cell(model, fresh_pki, keys, coordinator_config, tmp_path):
    token, metrics_token = tmp_path / "cluster-token", tmp_path / "metrics-token"
    token.write_text("the-cluster-token")
    metrics_token.write_text("the-metrics-token")
    made = {
        "search": keys.add("search", tenant="search"),
        "batch": keys.add("batch", tenant="reports", lanes=["batch"]),
        "ops": keys.add("ops", admin=True),
    }
    security = fresh_pki.server(
        client_auth="require",
        api_keys_file=keys.path,
        cluster_token_file=str(token),
        metrics_token_file=str(metrics_token),
    )
    config = coordinator_config(
        security,
        log_level="error",
        kv_transfer={"transports": ["grpc"], "send_bytes": 2**22, "receive_bytes": 2**22},
        decode={"local_prefill": False},
        simulated={"time_scale": 0, "max_model_len": 1024, "kv_tokens": 8192},
        worker={"attach_timeout_s": WAIT_S, "drain_timeout_s": WAIT_S},
    )
    metrics = unused_address()
    # Simulates workers on another host, where the key file does not exist.
    elsewhere = {"api_keys_file": str(tmp_path / "not-here.yaml")}
    config_of_workers = config.model_copy(
        update={"security": config.security.model_copy(update=elsewhere)}
    )
    worker = config.worker.model_copy(update={"metrics_listen": metrics})
    decode_config = config_of_workers.model_copy(update={"worker": worker})
    async with AsyncExitStack() as stack:
        coordinator = await stack.enter_async_context(Coordinator(config))
        stop = asyncio.Event()
        tasks = [
            asyncio.create_task(serve_worker(own, role, coordinator.address, name, stop=stop))
            for own, role, name in (
                (config_of_workers, common_pb2.ROLE_PREFILL, "p"),
                (decode_config, common_pb2.ROLE_DECODE, "d"),
            )
        ]
        listener, url = bind("127.0.0.1:0")
        ready = asyncio.Event()
        tasks.append(
            asyncio.create_task(
                serve_gateway(
                    config.http,
                    [CellEndpoints([coordinator.address])],
                    listener,
                    ready=ready.set,
                    resume_timeout_s=WAIT_S,
                    stop=stop,
                    security=config_of_workers.security,
                )
            )
        )
        try:
            await asyncio.wait_for(coordinator.wait_serving(["p", "d"]), WAIT_S)
            await asyncio.wait_for(ready.wait(), WAIT_S)
            http = url.removeprefix("http://")
            yield Cell(fresh_pki, coordinator, http, made, Vocabulary.load(model), metrics)
        finally:
            stop.set()
            assert await asyncio.wait_for(asyncio.gather(*tasks), WAIT_S) == [0, 0, 0]


async def test_authorized_callers_can_use_the_whole_cell(cell):
    async with cell.client() as client, cell.admin() as admin:
        await client.wait_ready(WAIT_S)
        answer = await client.complete(PROMPT, max_tokens=8, temperature=0, timeout_s=WAIT_S)
        assert list(answer.token_ids) == expected_tokens(cell.vocabulary, PROMPT, 8)
        # The KV cache was handed over between the workers, over TLS.
        assert await cell.has_handed_over(1)
        workers = {worker.worker_id: worker for worker in await admin.list_workers()}
        assert set(workers) == {"p", "d"}
        # Over HTTPS with the same keys.
        good = await cell.post(cell.keys["search"], prompt=PROMPT, temperature=0)
        assert good[0] == 200
        assert good[2]["usage"]["completion_tokens"] == 4
        for key, status, code, said in (
            ("", 401, "invalid_api_key", {}),
            ("nonsense", 401, "invalid_api_key", {}),
            (cell.keys["ops"], 403, "permission_denied", {}),
            (cell.keys["batch"], 403, "permission_denied", {}),
        ):
            found, headers, body = await cell.post(key, prompt=PROMPT, **said)
            assert (found, body["error"]["code"]) == (status, code)
            assert (headers["www-authenticate"] == "Bearer") is (status == 401)
            assert key[-40:] not in body["error"]["message"] or not key
        assert (await cell.post(cell.keys["batch"], prompt=PROMPT, priority=1))[0] == 200
        async with cell.admin("search") as user:
            with pytest.raises(PermissionDeniedError):
                await user.list_workers()
            with pytest.raises(PermissionDeniedError):
                await anext(user.profile("d"))
        kinds = [event.WhichOneof("event") async for event in admin.profile("d", 1)]
        assert kinds == ["started", "file", "data"]
        await _only_members_send(cell, workers["d"].kv_address)
        await _is_counted(
            cell, 'baton_access_refusals_total{reason="unknown",service="KvTransfer"}'
        )


async def _is_counted(cell, series):
    """Waits until the decode worker's metrics, which need a certificate and a token, show it."""
    context = ssl.create_default_context(cafile=cell.pki.file("ca.pem"))
    context.load_cert_chain(cell.pki.file("client.pem"), cell.pki.file("client.key"))
    request = urllib.request.Request(f"https://{cell.metrics}/metrics")

    def scrape():
        with urllib.request.urlopen(request, timeout=WAIT_S, context=context) as answer:
            return answer.read().decode()

    with pytest.raises(urllib.error.HTTPError, match="401"):
        await asyncio.to_thread(scrape)
    request.add_header("authorization", "Bearer the-metrics-token")
    async with asyncio.timeout(WAIT_S):
        while series not in await asyncio.to_thread(scrape):
            await asyncio.sleep(0.05)


async def _only_members_send(cell, target):
    """Checks that a worker's port requires a certificate and the cluster token."""
    files = cell.pki.tls("client")
    tls = TlsFiles(files.ca_file, files.cert_file, files.key_file)
    for dial, code in (
        (Dial(), grpc.StatusCode.UNAVAILABLE),
        (Dial(tls), grpc.StatusCode.UNAUTHENTICATED),
        (Dial(tls, credential=bearer("guess")), grpc.StatusCode.UNAUTHENTICATED),
        (Dial(tls, credential=bearer("the-cluster-token")), None),
    ):
        async with rpc.channel(target, dial=dial) as channel:
            # Without an iterator of requests: gRPC cancels a call whose iterator ends after the
            # connection was lost and before the call ends.
            call = channel.stream_stream(HANDOFF_METHOD)(metadata=dial.metadata(), timeout=WAIT_S)
            if code is None:
                await call.done_writing()
            assert await call.code() is (code or grpc.StatusCode.OK)
    # Health needs only a certificate, because probes have no token.
    async with rpc.channel(target, dial=Dial(tls)) as channel:
        request = health_pb2.HealthCheckRequest()
        status = (await health_pb2_grpc.HealthStub(channel).Check(request)).status
        assert status == health_pb2.HealthCheckResponse.SERVING


async def test_a_worker_with_another_token_leaves_with_the_reason(cell, capfd, tmp_path):
    other = tmp_path / "other-token"
    other.write_text("a-guess-of-somebody")
    config = cell.coordinator._config
    security = config.security.model_copy(update={"cluster_token_file": str(other)})
    config = config.model_copy(update={"security": security})
    code = await serve_worker(
        config, common_pb2.ROLE_DECODE, cell.address, "stranger", stop=asyncio.Event()
    )
    await asyncio.to_thread(output_streams.flush)
    said = capfd.readouterr().err
    assert code == 1
    assert "refuses this worker: the credential is not valid here" in said
    assert "a-guess-of-somebody" not in said
    assert cell.coordinator._access.refusals.counts["Cluster", "unknown"] == 1


async def test_a_new_ca_takes_over_under_load(cell):
    async with cell.client() as client, cell.admin() as admin:
        before = await client.complete(PROMPT, max_tokens=8, temperature=0, timeout_s=WAIT_S)
        targets = [worker.kv_address for worker in await admin.list_workers()]
        long = client.generate(PROMPT, max_tokens=200, timeout_s=WAIT_S, ignore_eos=True)
        await anext(long)
        _replace_ca(cell.pki)
        for address in (*targets, cell.address, cell.http):
            await _shows_new(cell.pki, address)
        # Running requests continue, and new ones work between processes that trust only the new CA.
        assert (await long.complete()).usage.completion_tokens == 200
        handed_over = cell.num_handoffs
        after = await client.complete([*PROMPT, 3], max_tokens=8, temperature=0, timeout_s=WAIT_S)
        assert len(after.token_ids) == len(before.token_ids) == 8
        assert await cell.has_handed_over(handed_over + 1)
    async with cell.client() as fresh:
        await fresh.complete(PROMPT, max_tokens=2, timeout_s=WAIT_S)
    assert (await cell.post(cell.keys["search"], prompt=PROMPT))[0] == 200
    async with BatonClient(cell.address, tls=Tls(cell.pki.file("old-ca.pem"))) as behind:
        with pytest.raises(Exception, match="cannot reach"):
            await behind.model()


def _replace_ca(pki):
    (pki.directory / "old-ca.pem").write_bytes((pki.directory / "ca.pem").read_bytes())
    object.__setattr__(pki, "authority", Authority.make("the next CA"))
    pki.issue("server", CLUSTER_NAME, serves=True)
    pki.issue("client", "baton-client")
    pki.authority.write(pki.directory / "ca.pem", pki.directory / "ca.key")


async def _shows_new(pki, address):
    """Waits until a server uses the certificate that is in the file now."""
    wanted = x509.load_pem_x509_certificate((pki.directory / "server.pem").read_bytes())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.load_cert_chain(pki.file("client.pem"), pki.file("client.key"))
    host, _, port = address.rpartition(":")
    async with asyncio.timeout(WAIT_S):
        while True:
            _, writer = await asyncio.open_connection(host, int(port), ssl=context)
            tls = writer.get_extra_info("ssl_object")
            shown = x509.load_der_x509_certificate(tls.getpeercert(binary_form=True))
            writer.transport.abort()
            if shown.serial_number == wanted.serial_number:
                return
            await asyncio.sleep(0.05)
