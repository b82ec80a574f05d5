"""A worker's link delivers every command once and in order, even if streams break."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baton.coordinator.server.link import MAX_BATCH_MESSAGES, WorkerLink
from baton.v1 import cluster_pb2


class _Worker:
    """The worker's end of the link: processes messages as specified in cluster.proto."""

    def __init__(self) -> None:
        self.processed: list[str] = []
        self.acknowledged = 0

    def take(self, encoded: bytes) -> int:
        """Processes a message; returns the number of commands in it."""
        message = cluster_pb2.CoordinatorMessage.FromString(encoded)
        assert not message.batch or (not message.seq and message.WhichOneof("message") is None)
        self.acknowledged = message.ack
        found = message.batch or [message]
        for one in found:
            assert not one.batch
            if one.seq > len(self.processed):
                assert one.seq == len(self.processed) + 1
                self.processed.append(one.cancel.request_id)
        return len(found)


@given(
    st.lists(st.sampled_from(["send", "carry", "ack", "stream"]), max_size=60),
    st.data(),
)
def test_whatever_streams_do_everything_arrives_once_in_order(
    actions: list[str], data: st.DataObject
) -> None:
    link, worker, sent = WorkerLink(("w", 1)), _Worker(), list[str]()

    def carry(at_most: int) -> None:
        while at_most and (encoded := link.next_to_send()) is not None:
            at_most -= 1
            worker.take(encoded)
            assert worker.acknowledged == link.received

    link.open(object())
    for action in actions:
        if action == "send":
            for _ in range(data.draw(st.integers(1, 4))):
                sent.append(f"r{len(sent)}")
                link.send(cluster_pb2.CancelCommand(request_id=sent[-1]))
        elif action == "carry":
            carry(data.draw(st.integers(1, 3)))
        elif action == "ack":
            link.acknowledge(data.draw(st.integers(0, len(worker.processed))))
            link.processed(link.received + 1)
        else:
            # Some messages in flight are lost; the worker acknowledges those it has received.
            link.acknowledge(len(worker.processed))
            link.open(object())
    carry(-1)
    assert worker.processed == sent


def test_waiting_commands_are_sent_as_one_message_of_bounded_size() -> None:
    link, worker = WorkerLink(("w", 1)), _Worker()
    for number in range(MAX_BATCH_MESSAGES + 1):
        link.send(cluster_pb2.CancelCommand(request_id=f"{number}"))
    sizes = []
    while (encoded := link.next_to_send()) is not None:
        sizes.append(worker.take(encoded))
    assert sizes == [MAX_BATCH_MESSAGES, 1]
    # Commands are combined only up to the size limit of a message.
    for number in range(4):
        link.send(cluster_pb2.CancelCommand(request_id=f"{number}" + "x" * 600_000))
    for _ in range(4):
        assert worker.take(link.next_to_send() or b"") == 1
    assert link.next_to_send() is None
