"""Property test: worker IDs are unique, all processes end, and set sizes are reached."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton.coordinator.state import events as ev
from baton.coordinator.state.pools import Pool
from tests.coordinator.launched_world import ROLES, Launched

POOLS = st.sampled_from(list(Pool))
SIZES = st.integers(0, 4)
ANY = st.integers(0, 7)
ACTIONS = st.one_of(
    st.tuples(st.just("scale"), POOLS, SIZES),
    st.tuples(st.just("autoscale"), st.booleans()),
    st.tuples(st.just("wait"), st.sampled_from([1, 5, 40])),
    st.tuples(st.just("up")),
    st.tuples(st.just("kill"), ANY),
    st.tuples(st.just("drain"), ANY),
    st.tuples(st.just("flip"), ANY),
    st.tuples(st.just("submit")),
    st.tuples(st.just("other targets")),
)


def act(made: Launched, action) -> None:
    kind, *arguments = action
    if kind == "scale":
        made.world.handle(ev.ScaleRequested(*arguments))
    elif kind == "autoscale":
        made.world.handle(ev.AutoscaleRequested(*arguments))
    elif kind == "wait":
        made.wait(*arguments)
    elif kind == "up":
        made.come_up()
    elif kind == "submit":
        made.world.submit()
    elif kind == "other targets":
        made.world.handle(ev.TargetsRequested({}))
    else:
        alive = [one for one in made.started if one not in made.gone]
        if not alive:
            return
        worker_id = alive[arguments[0] % len(alive)]
        if kind == "kill":
            made.world.handle(ev.WorkerExited(worker_id, "was killed by SIGKILL"))
        elif kind == "drain":
            made.world.handle(ev.DrainRequested(worker_id, 5.0, "test"))
        elif (worker := made.core.workers.by_id(worker_id)) is not None:
            into = next(role for role in ROLES.values() if role != worker.role)
            made.world.handle(ev.FlipRequested(worker_id, into))
            made.answer_flips()


def check(made: Launched) -> None:
    assert len(set(made.started)) == len(made.started)
    assert len(set(made.ended)) == len(made.ended)
    assert set(made.ended) <= set(made.started)
    for pool in Pool:
        launches = made.core.scaler.launches
        assert launches.num_starting(pool) + len(made.ids(pool)) <= 4 + 4


@settings(max_examples=40, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(data=st.data(), autoscale=st.booleans(), prefill=SIZES, decode=SIZES)
def test_sizes_by_hand_come_true_after_anything(new_world, data, autoscale, prefill, decode):
    made = Launched(new_world, 1, 1, autoscale=autoscale, idle_s=20.0)
    for action in data.draw(st.lists(ACTIONS, max_size=25)):
        act(made, action)
        check(made)
    made.world.handle(ev.ScaleRequested(Pool.PREFILL, prefill))
    made.world.handle(ev.ScaleRequested(Pool.DECODE, decode))
    for _ in range(30):
        made.come_up()
        made.answer_flips()
        made.wait(5)
    check(made)
    assert (len(made.ids(Pool.PREFILL)), len(made.ids(Pool.DECODE))) == (prefill, decode)
    attached = {worker.id for worker in made.core.workers}
    assert attached == set(made.started) - set(made.ended)
    assert set(made.core.scaler.launches.worker_ids) == attached
    assert [made.core.scaler.launches.problem(pool) for pool in Pool] == ["", ""]
