import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.v1 import cluster_pb2
from baton.worker.outbox import Outbox


def message(number: int) -> cluster_pb2.WorkerMessage:
    return cluster_pb2.WorkerMessage(step=cluster_pb2.StepOutputs(step=number))


# Size of one of the first posted messages.
NUM_BYTES = cluster_pb2.WorkerMessage(seq=1, step=cluster_pb2.StepOutputs(step=1)).ByteSize()


def sent(outbox: Outbox, at_most: int | None = None) -> list[tuple[int, int]]:
    """(seq, step) of the messages that are sent now."""
    found = []
    while len(found) != at_most and (one := outbox.next_unsent()) is not None:
        found.append((one.seq, one.step.step))
    return found


def test_a_new_stream_continues_after_the_processed_messages() -> None:
    outbox = Outbox()
    for number in range(1, 5):
        outbox.post(message(number))
    assert sent(outbox) == [(1, 1), (2, 2), (3, 3), (4, 4)]
    outbox.acknowledge(1)
    outbox.mark_hello()
    outbox.resume(2)
    assert sent(outbox) == [(3, 3), (4, 4)]


def test_a_new_coordinator_gets_only_messages_after_its_hello() -> None:
    outbox = Outbox()
    outbox.post(message(1))
    outbox.post(message(2))
    sent(outbox)
    outbox.acknowledge(1)
    outbox.mark_hello()
    outbox.post(message(3))
    outbox.restart(())
    assert sent(outbox) == [(1, 3)]


def test_a_new_coordinator_gets_only_outputs_of_adopted_requests() -> None:
    outbox = Outbox()
    outbox.mark_hello()
    ids = [("kept", 2), ("kept", 1), ("ended", 1)]
    outputs = [cluster_pb2.RequestOutput(request_id=one, attempt=attempt) for one, attempt in ids]
    tokens = cluster_pb2.StepTokens(handles=[1], deltas=[b""])
    step = cluster_pb2.StepOutputs(outputs=outputs, tokens=tokens)
    outbox.post(cluster_pb2.WorkerMessage(step=step))
    outbox.restart({("kept", 2)})
    message = outbox.next_unsent()
    assert message is not None
    assert [(one.request_id, one.attempt) for one in message.step.outputs] == [("kept", 2)]
    assert not message.step.HasField("tokens")


def test_a_batch_is_bounded_and_a_large_message_is_sent_alone() -> None:
    outbox = Outbox()
    for number in range(1, 71):
        outbox.post(message(number))
    for _ in range(3):
        cache = cluster_pb2.CacheEvents(stored=[1] * 80_000)
        outbox.post(cluster_pb2.WorkerMessage(cache=cache))
    sizes = []
    while (one := outbox.next_batch()) is not None:
        sizes.append(len(one.batch) or 1)
    assert sizes == [64, 7, 1, 1]
    assert not outbox.has_unsent


@pytest.mark.parametrize("limit", [{"max_messages": 2}, {"max_bytes": 2 * NUM_BYTES}])
async def test_space_ends_at_a_limit_until_messages_are_acknowledged(
    limit: dict[str, int],
) -> None:
    outbox = Outbox(**limit)
    outbox.post(message(1))
    await outbox.wait_for_space()
    outbox.post(message(2))
    assert not outbox._has_space.is_set()
    sent(outbox)
    outbox.acknowledge(2)
    await outbox.wait_for_space()
    assert len(outbox) == 0


@given(
    st.lists(st.sampled_from(["post", "send", "batch", "ack", "stream"]), max_size=60), st.data()
)
def test_every_message_arrives_once_and_in_order_over_any_streams(
    actions: list[str], data: st.DataObject
) -> None:
    outbox, processed, posted = Outbox(), list[int](), 0

    def deliver(at_most: int | None) -> None:
        arrive(sent(outbox, at_most))

    def arrive(found: list[tuple[int, int]]) -> None:
        for seq, step in found:
            if seq > len(processed):
                assert seq == len(processed) + 1
                processed.append(step)

    for action in actions:
        if action == "post":
            posted += 1
            outbox.post(message(posted))
        elif action == "send":
            deliver(data.draw(st.integers(0, 3)))
        elif action == "batch":
            if (one := outbox.next_batch()) is not None:
                arrive([(each.seq, each.step.step) for each in one.batch or [one]])
        elif action == "ack":
            outbox.acknowledge(data.draw(st.integers(0, len(processed))))
        else:
            # The stream breaks with messages in flight; the coordinator acknowledges the others.
            outbox.mark_hello()
            outbox.resume(len(processed))
    deliver(None)
    assert processed == list(range(1, posted + 1))
