"""Answers of the Admin service's calls, by a core under a virtual clock."""

from __future__ import annotations

import pytest

from baton.coordinator.server.admin_rollout import RolloutCalls
from baton.coordinator.server.admin_scaling import ScalingCalls
from baton.coordinator.state import events as ev
from baton.coordinator.state.pools import Pool
from baton.coordinator.state.revision import Revision
from baton.runtime import errors
from baton.runtime.config import BatonConfig
from baton.v1 import admin_pb2, common_pb2
from tests.coordinator.launched_world import Launched

STOP = common_pb2.FINISH_REASON_STOP


class WorldShell:
    """The part of a Shell that the calls use, in front of a test's world."""

    def __init__(self, world) -> None:
        self._world, self.core = world, world.core

    def post(self, event) -> None:
        self._world.handle(event)

    def now(self) -> float:
        return self._world.now


def promote(world):
    calls = RolloutCalls(WorldShell(world), BatonConfig())
    return calls.promote(admin_pb2.PromoteRolloutRequest()).message


def test_a_promotion_of_a_canary_that_is_found_to_be_worse_is_not_confirmed(two_fleets):
    """The rollout would have been aborted a moment later without the call."""
    cell = two_fleets(None)
    cell.world.handle(ev.RolloutRequested(Revision("r2"), 0.5, {}, abort_if_worse=True))
    for number in range(100):
        to = cell.world.submit(session_id=f"s{number}")
        if cell.fleet_name(to) == "r2":
            cell.world.handle(ev.RequestFailed(cell.request(to).key, errors.Internal("broken")))
        else:
            cell.first_token(to)
            cell.token(to, finish=STOP)
    with pytest.raises(errors.Aborted, match="revision 'r2' was aborted: the canary is worse"):
        promote(cell.world)
    assert cell.core.fleets.stable.name == "1"


def test_a_promotion_that_waits_for_a_worker_of_the_old_revision_says_so(new_world, out):
    made = Launched(new_world)
    made.come_up()
    to = made.world.submit()
    request = made.core.request(f"r{to.stream}")
    made.world.step(request.prefill[0], out(request.id, [7], text="a", finish=0))
    made.world.handle(ev.RolloutRequested(Revision("r2"), 0.1, {}))
    made.come_up()
    made.world.handle(ev.DrainRequested("decode-0", 100.0, "test"))
    made.wait(2)
    assert "decode-1" in made.started
    message = promote(made.world)
    assert message.startswith(
        "revision r2 becomes the stable one when the starting worker of revision 1 serves, which "
        "running outputs need; then the workers of 1 finish their requests and leave"
    )


def test_the_answer_to_a_drain_says_whether_another_worker_takes_its_place(new_world):
    """A worker of `baton up`, two that an operator started, a canary's, and one of an old fleet."""
    made = Launched(new_world)
    made.come_up()
    made.world.handle(ev.RolloutRequested(Revision("r2"), 0.1, {}))
    made.come_up()
    made.world.attach("by-hand", common_pb2.ROLE_DECODE)
    made.world.attach("canary-by-hand", common_pb2.ROLE_DECODE, revision="r2")
    made.world.attach("third", common_pb2.ROLE_DECODE, revision="r3")
    made.wait(2)
    calls = ScalingCalls(WorldShell(made.world), 30.0, None, None)
    for worker_id, place, replaced in (
        ("by-hand", "", []),
        ("third", "", []),
        ("canary-by-hand", "", []),
        (
            "decode-0",
            "; the target size of the decode pool is 1, so another worker takes its place: to "
            "keep one worker less, use `baton scale`",
            ["decode-1"],
        ),
        (
            "decode-r2-0",
            "; the target size of revision r2's decode pool is 1, so another worker takes its "
            "place",
            ["decode-r2-1"],
        ),
    ):
        num_started = len(made.started)
        answer = calls.drain(admin_pb2.DrainWorkerRequest(worker_id=worker_id))
        assert answer.message == (
            f"{worker_id} gets no new requests; its requests (0) end or move to other workers"
            + place
        )
        made.wait(5)
        assert made.started[num_started:] == replaced
        made.come_up()
    assert made.core.scaler.desired(Pool.DECODE) == 1
