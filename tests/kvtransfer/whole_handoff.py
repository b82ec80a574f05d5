"""One handoff between two workers, from the open to the load."""

from baton.v1 import kv_transfer_pb2 as pb

COMMITTED = pb.LocalSendState.STATE_COMMITTED


async def hand_over(sender, receiver, one):
    await one.open(sender, receiver.client.address)
    one.fill(sender)
    sent = await sender.sent(one.handoff_id)
    assert sent.state == COMMITTED, sent
    await receiver.received(one.handoff_id, pb.HANDOFF_STATE_COMMITTED)
    assert one.load(receiver) == one.data
    return sent


async def hand_over_together(sender, receiver, *handoffs):
    """Opens and fills all handoffs before the first one is loaded."""
    for each in handoffs:
        await each.open(sender, receiver.client.address)
        each.fill(sender)
    for each in handoffs:
        await receiver.received(each.handoff_id, pb.HANDOFF_STATE_COMMITTED)
        assert each.load(receiver) == each.data
