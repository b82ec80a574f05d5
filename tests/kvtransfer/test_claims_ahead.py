"""Handoffs that are claimed before their commit: granted at the commit, held for a load."""

from dataclasses import replace

import pytest
from receiver_harness import IDS, LIMITS, Harness, kinds, open_message, rank_truth, refused

from baton.kvtransfer.receiving import LONG_HELD_S, ReceiveState
from baton.v1 import kv_transfer_pb2 as pb


@pytest.fixture
def harness():
    return Harness()


@pytest.mark.parametrize("when", ["before its open", "while it comes", "once it is committed"])
def test_a_claim_ahead_is_granted_with_the_commit_and_kept(harness, when):
    handoff_id, receiver = IDS[0], harness.receiver
    if when == "before its open":
        assert receiver.claim_ahead(handoff_id, harness.now) == []
    harness.deliver(1, open_message(handoff_id, 1, 2))
    if when == "while it comes":
        assert receiver.claim_ahead(handoff_id, harness.now) == []
    harness.send_all(1, handoff_id, 1, 2)
    if when == "once it is committed":
        assert not harness.granted
        harness.seen(receiver.claim_ahead(handoff_id, harness.now))
    assert harness.states[handoff_id] is ReceiveState.CLAIMED
    for rank, grant in enumerate(harness.granted):
        assert harness.bytes_of(grant) == rank_truth(grant, rank)
    # Neither a late cancel nor another epoch ends the claim.
    receiver.drop(handoff_id, harness.now)
    assert kinds(harness.deliver(2, open_message(handoff_id, 2, 2))) == refused(
        pb.REFUSAL_REASON_UNKNOWN_HANDOFF
    )
    # The claim lasts as long as a commit may wait, which is longer than a load.
    harness.tick(LIMITS.commit_ttl_s - 1)
    for rank, grant in enumerate(harness.granted):
        assert harness.bytes_of(grant) == rank_truth(grant, rank)
        harness.seen(receiver.release(handoff_id, rank, harness.now))
    harness.assert_empty()
    assert receiver.claim_ahead(handoff_id, harness.now) == []


def test_a_claim_ahead_without_a_load_expires(harness):
    harness.receiver.claim_ahead(IDS[0], harness.now)
    harness.deliver(1, open_message(IDS[0], 1, 2))
    harness.send_all(1, IDS[0], 1, 2)
    harness.tick(LIMITS.commit_ttl_s)
    harness.assert_empty()


def test_a_claim_ahead_lasts_for_a_load_even_if_commits_expire_sooner():
    """A load that begins at once is not announced, so the claim must outlast it."""
    harness = Harness(limits=replace(LIMITS, commit_ttl_s=0.5))
    harness.receiver.claim_ahead(IDS[0], harness.now)
    harness.deliver(1, open_message(IDS[0], 1, 2))
    harness.send_all(1, IDS[0], 1, 2)
    harness.tick(LONG_HELD_S + LIMITS.claim_timeout_s - 0.1)
    assert harness.states[IDS[0]] is ReceiveState.CLAIMED
    harness.tick(0.1)
    harness.assert_empty()


def test_an_announced_load_extends_a_claim_ahead(harness):
    harness.receiver.claim_ahead(IDS[0], harness.now)
    harness.deliver(1, open_message(IDS[0], 1, 2))
    harness.send_all(1, IDS[0], 1, 2)
    harness.tick(LIMITS.commit_ttl_s - 0.5)
    assert harness.receiver.claim_ahead(IDS[0], harness.now) == []
    harness.tick(LIMITS.claim_timeout_s - 0.5)
    assert harness.states[IDS[0]] is ReceiveState.CLAIMED
    harness.tick(0.5)
    assert harness.states[IDS[0]] is ReceiveState.FAILED
    harness.assert_empty()


def test_a_handoff_with_too_many_frames_for_one_message_is_claimed_by_rank():
    harness = Harness(replace(LIMITS, max_frames_ahead=7))
    harness.receiver.claim_ahead(IDS[0], harness.now)
    harness.deliver(1, open_message(IDS[0], 1, 2))
    harness.send_all(1, IDS[0], 1, 2)
    assert harness.receiver.claim_ahead(IDS[0], harness.now) == []
    assert harness.states[IDS[0]] is ReceiveState.COMMITTED
    for rank in range(2):
        grant, effects = harness.receiver.claim(IDS[0], rank, harness.now)
        harness.seen(effects)
        assert harness.bytes_of(grant) == rank_truth(grant, rank)
        harness.seen(harness.receiver.release(IDS[0], rank, harness.now))
    harness.assert_empty()


def test_claims_ahead_are_bounded(harness):
    for number in range(2 * LIMITS.max_tombstones):
        harness.receiver.claim_ahead(number.to_bytes(16, "big"), harness.now)
    harness.receiver.check_integrity()
