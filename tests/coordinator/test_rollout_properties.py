"""Property test: during rollouts, no request uses workers of two fleets."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton.coordinator.state import events as ev
from baton.coordinator.state.revision import Revision
from baton.v1 import cluster_pb2, common_pb2
from tests.coordinator.two_fleets import TwoFleets

PREFILL, DECODE = common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE
STOP = common_pb2.FINISH_REASON_STOP


STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["submit", "first", "token", "end", "lose", "attach", "abort", "promote", "start"]
        ),
        st.integers(0, 10**6),
    ),
    min_size=20,
    max_size=60,
)


@settings(max_examples=80, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(share=st.sampled_from([0.3, 0.7, 1.0]), steps=STEPS)
def test_no_request_uses_workers_of_two_fleets(new_world, out, share, steps):
    """Both workers of a request are in its fleet, and an output never changes its fleet."""
    cell = TwoFleets(new_world, out, share)
    began: dict[str, str] = {}
    streams = []
    incarnations = dict.fromkeys(("p", "p2", "d", "d2", "cp", "cp2", "cd", "cd2"), 1)
    for step, number in steps:
        running = cell.core.running()
        one = running[number % len(running)] if running else None
        name = sorted(incarnations)[number % len(incarnations)]
        if step == "submit":
            streams.append(cell.world.submit(session_id=f"s{number % 50}"))
        elif step == "first" and one is not None and one.prefill and not one.prefill_done:
            message = out(one.id, [len(one.token_ids)], len(one.token_ids), finish=0)
            message.attempt = one.attempt
            cell.world.step(one.prefill[0], message, incarnation=one.prefill[1])
        elif step in ("token", "end") and one is not None and one.decode and one.prefill_done:
            offset = len(one.token_ids)
            finish = STOP if step == "end" else None
            message = out(one.id, [offset], offset, finish=finish, attempt=one.attempt)
            cell.world.step(one.decode[0], message, incarnation=one.decode[1])
        elif step == "lose":
            cell.world.handle(ev.WorkerLost(name, "was killed"))
        elif step == "attach" and cell.core.workers.by_id(name) is None:
            incarnations[name] += 1
            role = PREFILL if "p" in name else DECODE
            revision = "r2" if name.startswith("c") else "1"
            cell.world.attach(name, role, incarnations[name], revision=revision)
        elif step == "abort" and cell.core.rollouts.abort_error() is None:
            cell.world.handle(ev.AbortRequested("test"))
        elif step == "promote" and cell.core.rollouts.promote_error() is None:
            cell.world.handle(ev.PromotionRequested())
        elif step == "start":
            other = next(r for r in ("1", "r2") if r != cell.core.fleets.stable.name)
            if cell.core.rollouts.start_error(Revision(other), share, {}) is None:
                cell.world.handle(ev.RolloutRequested(Revision(other), share, {}))
        for request in cell.core.running():
            pair = [cell.core.workers.get(key) for key in (request.prefill, request.decode)]
            assert {worker.fleet.name for worker in pair if worker} <= {request.fleet.name}
            if len(request.token_ids):
                assert began.setdefault(request.id, request.fleet.name) == request.fleet.name
    for key, commands in cell.world.commands.items():
        for command in commands:
            if isinstance(command, cluster_pb2.PrefillCommand) and command.HasField("handoff"):
                target = command.handoff.target
                assert target.startswith("c") == key.startswith("c"), (key, target)
    for to in streams:
        kinds = cell.world.kinds(to)
        assert kinds.count("Finished") + kinds.count("Failed") <= 1
