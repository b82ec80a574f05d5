"""Keys and tokens on real connections: each service accepts only valid ones."""

import asyncio
import urllib.error
import urllib.request

import grpc
import pytest

from baton.client import AdminClient, BatonClient
from baton.client.errors import (
    PermissionDeniedError,
    RemoteError,
    UnauthenticatedError,
    UnavailableError,
)
from baton.coordinator.server import inference
from baton.runtime.network import rpc
from baton.v1 import cluster_pb2, cluster_pb2_grpc, inference_pb2, inference_pb2_grpc
from tests.security.accepted_requests import WAIT_S, accepted, outcome


@pytest.fixture
def grants(keys, tmp_path):
    """Keys of several kinds, and the security section that accepts them."""
    token = tmp_path / "cluster-token"
    token.write_text("the-cluster-token\n")
    made = {
        "search": keys.add("search", tenant="search"),
        "batch": keys.add("batch", tenant="reports", lanes=["batch"]),
        "admin": keys.add("ops", admin=True),
    }
    security = {"api_keys_file": keys.path, "cluster_token_file": str(token)}
    return made, security


async def test_each_request_of_a_session_has_its_own_credential(
    start_coordinator, count_refusals, grants, keys, log
):
    made, security = grants
    async with start_coordinator(security) as running:
        async with BatonClient(running.address) as client:
            await accepted(client, authorization=f"Bearer {made['search']}", tenant="search")
            asked = {
                "missing": {},
                "unknown": {"authorization": "Bearer nonsense-of-somebody"},
                "tenant": {"authorization": f"Bearer {made['search']}", "tenant": "reports"},
                "lane": {"authorization": f"Bearer {made['batch']}"},
                "no_inference": {"authorization": f"Bearer {made['admin']}"},
            }
            found = await asyncio.gather(*(outcome(client, **one) for one in asked.values()))
        codes = dict(zip(asked, (error.name for error in found), strict=True))
        assert codes == {
            "missing": "UNAUTHENTICATED",
            "unknown": "UNAUTHENTICATED",
            "tenant": "PERMISSION_DENIED",
            "lane": "PERMISSION_DENIED",
            "no_inference": "PERMISSION_DENIED",
        }
        reasons = set(asked)
        counted = await count_refusals(running)
        assert {reason: counted["Inference", reason] for reason in reasons} == dict.fromkeys(
            reasons, 1
        )
        assert log.reasons() == reasons
        text = "".join([*log.lines, *map(str, found)])
        assert not any(secret[-40:] in text for secret in [*keys.secrets, "nonsense-of-somebody"])


async def test_a_request_is_accounted_to_the_tenant_of_its_key(start_coordinator, grants):
    made, security = grants
    async with (
        start_coordinator(security) as running,
        BatonClient(running.address, api_key=made["search"]) as client,
        AdminClient(running.address, api_key=made["admin"]) as admin,
    ):
        await accepted(client)
        (ended,) = await admin.list_requests(include_ended=True)
        assert ended.tenant == "search"


async def test_plain_calls_carry_the_credential_as_metadata(start_coordinator, grants):
    made, security = grants
    request = inference_pb2.GenerateRequest(tokens=inference_pb2.TokenIds(ids=[1]))
    async with (
        start_coordinator(security) as running,
        rpc.channel(running.address) as channel,
    ):
        stub = inference_pb2_grpc.InferenceStub(channel)

        async def code(metadata, timeout_s=WAIT_S):
            call = stub.Generate(request, timeout=timeout_s, metadata=metadata)
            return await call.code()

        good = [("authorization", f"Bearer {made['search']}")]
        assert await code(()) is grpc.StatusCode.UNAUTHENTICATED
        assert await code([("authorization", "Bearer x")]) is grpc.StatusCode.UNAUTHENTICATED
        assert await code(good, 0.5) is grpc.StatusCode.DEADLINE_EXCEEDED
        with pytest.raises(grpc.RpcError):
            await stub.GetModel(inference_pb2.GetModelRequest())
        model = await stub.GetModel(inference_pb2.GetModelRequest(), metadata=good)
        assert model.name == "demo"


async def test_operators_need_admin_rights(start_coordinator, count_refusals, grants, log, keys):
    made, security = grants
    async with start_coordinator(security) as running:
        for key, error in (
            ("", UnauthenticatedError),
            ("baton_000000000000_" + "x" * 43, UnauthenticatedError),
            (made["search"], PermissionDeniedError),
        ):
            async with AdminClient(running.address, api_key=key) as admin:
                with pytest.raises(error):
                    await admin.list_pools()
        async with AdminClient(running.address, api_key=made["admin"]) as admin:
            await admin.list_pools()
        found = await count_refusals(running)
        assert {found["Admin", reason] for reason in ("missing", "unknown", "not_admin")} == {1}
        assert not any(key[-40:] in line for line in log.lines for key in keys.secrets)


async def test_workers_need_the_cluster_token(start_coordinator, count_refusals, grants, log):
    made, security = grants
    async with start_coordinator(security) as running, rpc.channel(running.address) as channel:
        stub = cluster_pb2_grpc.ClusterStub(channel)

        async def code(*metadata):
            hello = cluster_pb2.WorkerMessage(hello=cluster_pb2.Hello(worker_id="w"))
            return await stub.Attach(iter([hello]), metadata=metadata).code()

        assert await code() is grpc.StatusCode.UNAUTHENTICATED
        for wrong in ("guess-of-somebody", made["search"], made["admin"]):
            refused = await code(("authorization", f"Bearer {wrong}"))
            assert refused is grpc.StatusCode.UNAUTHENTICATED
        known = await code(("authorization", "Bearer the-cluster-token"))
        # The token is accepted, so the coordinator checks the (invalid) Hello.
        assert known is grpc.StatusCode.INVALID_ARGUMENT
        found = await count_refusals(running)
        assert (found["Cluster", "missing"], found["Cluster", "unknown"]) == (1, 3)
        text = "".join(log.lines)
        assert "guess-of-somebody" not in text
        assert "the-cluster-token" not in text


async def test_a_session_without_a_credential_is_ended(start_coordinator, grants, monkeypatch):
    _, security = grants
    monkeypatch.setattr(inference, "_CHARGE_TIMEOUT_S", 0.1)
    async with start_coordinator(security) as running, rpc.channel(running.address) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Session()
        async with asyncio.timeout(WAIT_S):
            assert await call.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_revoked_key_is_refused_at_once(start_coordinator, grants, keys):
    made, security = grants
    async with (
        start_coordinator(security) as running,
        BatonClient(running.address, api_key=made["search"]) as client,
    ):
        await accepted(client)
        keys.remove("search")
        assert (await outcome(client)).name == "UNAUTHENTICATED"


async def test_a_concurrency_slot_is_released(start_coordinator, keys):
    key = keys.add("one", tenant="a", max_concurrent=1)
    async with (
        start_coordinator({"api_keys_file": keys.path}) as running,
        BatonClient(running.address, api_key=key) as client,
    ):
        for _ in range(2):
            first = client.generate([1, 2], max_tokens=1)
            # Requests of one client arrive in the order in which they were sent.
            error = await outcome(client)
            assert (error.name, error.reason) == ("RESOURCE_EXHAUSTED", "CREDENTIAL_CONCURRENCY")
            await first.aclose()
        await accepted(client)


async def test_a_resumed_request_reuses_its_slot(start_coordinator, keys):
    key = keys.add("one", tenant="a", max_concurrent=1)
    metadata = [("authorization", f"Bearer {key}")]
    async with (
        start_coordinator({"api_keys_file": keys.path}) as running,
        rpc.channel(running.address) as channel,
    ):
        stub = inference_pb2_grpc.InferenceStub(channel)

        def ask(name, known=()):
            request = inference_pb2.GenerateRequest(request_id=name)
            request.tokens.ids.append(1)
            request.resume.token_ids.extend(known)
            return stub.Generate(request, timeout=WAIT_S, metadata=metadata)

        # The client has stopped reading, and the coordinator has not noticed.
        call = ask("r")
        assert (await call.read()).HasField("accepted")
        for known in ([7], [7, 8]):
            resumed = ask("r", known)
            assert (await resumed.read()).HasField("accepted")
            assert await call.code() is grpc.StatusCode.ABORTED
            call = resumed
        assert await ask("s", [7]).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        call.cancel()


async def test_metrics_need_their_token(start_coordinator, count_refusals, tmp_path):
    file = tmp_path / "token"
    file.write_text("scraper")
    async with start_coordinator({"metrics_token_file": str(file)}) as running:

        def scrape(token):
            request = urllib.request.Request(f"http://{running.metrics_address}/metrics")
            if token:
                request.add_header("Authorization", f"Bearer {token}")
            try:
                with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
                    return answer.status, answer.read().decode()
            except urllib.error.HTTPError as error:
                with error:
                    return error.code, ""

        assert (await asyncio.to_thread(scrape, ""))[0] == 401
        assert (await asyncio.to_thread(scrape, "wrong"))[0] == 401
        status, text = await asyncio.to_thread(scrape, "scraper")
        assert status == 200
        assert 'baton_access_refusals_total{reason="missing",service="metrics"} 1.0' in text


async def test_a_key_that_cannot_be_sent_is_not_quoted():
    async with BatonClient("127.0.0.1:1") as client:
        with pytest.raises(RemoteError) as caught:
            client.generate([1], authorization="Bearer hunter2\ud800")
    assert "hunter2" not in str(caught.value)


async def test_a_connection_error_does_not_show_the_key(grants):
    made, _ = grants
    async with BatonClient("127.0.0.1:1", api_key=made["search"]) as client:
        with pytest.raises(UnavailableError) as caught:
            await client.complete([1], max_tokens=1)
    assert made["search"] not in str(caught.value)
