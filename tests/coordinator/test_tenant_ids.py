"""Two tenants may use the same request id at the same time."""

from __future__ import annotations

import grpc
import pytest

from baton.coordinator.state import events as ev
from baton.runtime.errors import AlreadyExists, InvalidArgument, from_rpc_error
from baton.v1 import admin_pb2, admin_pb2_grpc, common_pb2, inference_pb2, inference_pb2_grpc
from baton.v1.cluster_pb2 import CancelCommand, PrefillCommand
from tests.coordinator.scripted_worker import WAIT_S, attached

PREFILL, DECODE = common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE
LENGTH = common_pb2.FINISH_REASON_LENGTH
TENANTS = ("default", "a", "b")


def begun(world) -> dict[str, ev.StreamKey]:
    """Submits request r1 of three tenants; returns their streams."""
    streams = {
        tenant: world.submit(request_id="r1", tenant=tenant, session=number)
        for number, tenant in enumerate(TENANTS, 1)
    }
    names = [command.spec.request_id for command in world.commands["p"]]
    assert len(set(names)) == len(names) == 3
    return streams


def names(world) -> dict[str, str]:
    """Returns the request names that workers use, by tenant."""
    specs = [one.spec for one in world.commands["p"] if isinstance(one, PrefillCommand)]
    return {spec.tenant: spec.request_id for spec in specs}


def test_each_tenant_gets_its_own_tokens(world, out):
    streams = begun(world)
    called = names(world)
    for number, tenant in enumerate(TENANTS, 1):
        world.step("p", out(called[tenant], [number * 10], finish=0))
    outputs = [
        out(called[tenant], [number * 10 + 1], 1, finish=LENGTH)
        for number, tenant in enumerate(TENANTS, 1)
    ]
    world.step("d", *outputs)
    for number, tenant in enumerate(TENANTS, 1):
        assert world.tokens(streams[tenant]) == [number * 10, number * 10 + 1]
        # The client gets the id that it gave.
        assert world.sent[streams[tenant]][0].request_id == "r1"
        assert world.last(streams[tenant]).reason == LENGTH
        record = world.core.request("r1", tenant)
        assert (record.request_id, record.tenant) == ("r1", tenant)


def test_cancelling_one_tenants_request_leaves_the_others(world):
    streams = begun(world)
    world.handle(ev.StreamCancelled(streams["a"]))
    assert world.kinds(streams["a"]) == ["Accepted", "Finished"]
    cancelled = [one for one in world.commands["p"] if isinstance(one, CancelCommand)]
    assert {one.request_id for one in cancelled} == {names(world)["a"]}
    world.handle(ev.RequestCancelled(world.core.request("r1", "b").key))
    assert world.kinds(streams["b"]) == ["Accepted", "Finished"]
    assert world.kinds(streams["default"]) == ["Accepted"]


def test_a_tenant_cannot_use_a_running_id_again(world):
    begun(world)
    for tenant in TENANTS:
        error = world.last(world.submit(request_id="r1", tenant=tenant)).error
        assert isinstance(error, AlreadyExists)
        assert str(error) == "request r1 is running"


def test_a_resumed_request_replaces_only_its_tenants_request(world, out):
    streams = begun(world)
    world.step("p", out(names(world)["a"], [20], finish=0))
    again = world.submit(
        request_id="r1", tenant="a", session=9, known_token_ids=[20], known_text_chars=0
    )
    assert world.kinds(again) == ["Accepted"]
    assert world.core.request("r1", "a").submission.to == again
    for tenant in ("default", "b"):
        assert world.core.request("r1", tenant).submission.to == streams[tenant]


def test_a_lookup_without_tenant_names_the_tenants_of_an_ambiguous_id(world):
    begun(world)
    with pytest.raises(
        InvalidArgument, match="tenant is ''; tenants a, b, default each have a request r1"
    ):
        world.core.request("r1")
    assert world.core.request("r1", "unknown") is None
    only = world.submit(request_id="mine", tenant="b")
    assert world.core.request("mine").submission.to == only


async def test_operators_must_name_the_tenant_of_an_ambiguous_id(coordinator, channel, say_hello):
    hellos = say_hello("p", PREFILL), say_hello("d", DECODE)
    inference = inference_pb2_grpc.InferenceStub(channel)
    admin = admin_pb2_grpc.AdminStub(channel)

    def ask(tenant, max_tokens):
        sampling = common_pb2.SamplingParams(max_tokens=max_tokens)
        request = inference_pb2.GenerateRequest(
            text="the quick fox", sampling=sampling, request_id="one", tenant=tenant
        )
        return inference.Generate(request, timeout=WAIT_S)

    async with attached(coordinator.address, *hellos) as (prefill, _):
        answers = [[event async for event in ask(tenant, 3)] for tenant in ("a", "b")]
        for events in answers:
            assert events[0].accepted.request_id == "one"
            assert [token for event in events for token in event.delta.token_ids] == [0, 1, 2]
        with pytest.raises(grpc.RpcError) as caught:
            await admin.GetRequest(admin_pb2.GetRequestRequest(request_id="one"))
        error = from_rpc_error(caught.value)
        assert error.name == "INVALID_ARGUMENT"
        assert "a, b" in str(error)
        asked = admin_pb2.GetRequestRequest(request_id="one", tenant="b")
        info = await admin.GetRequest(asked)
        assert (info.request_id, info.tenant) == ("one", "b")
        # Only one request of this id runs: cancelling it needs no tenant.
        prefill.auto = False
        running = ask("a", 5)
        assert (await running.read()).accepted.request_id == "one"
        await admin.CancelRequest(admin_pb2.CancelRequestRequest(request_id="one"))
        while not (event := await running.read()).HasField("finished"):
            pass
        assert event.finished.reason == common_pb2.FINISH_REASON_CANCELLED
