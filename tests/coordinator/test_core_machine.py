"""Random sequences of events: every request ends exactly once, and no worker keeps a request."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.coordinator.state import events as ev
from baton.runtime.config import BatchLaneConfig, InteractiveLaneConfig, LanesConfig, TenantConfig
from baton.v1 import cluster_pb2, common_pb2

DRAINING = cluster_pb2.WORKER_STATE_DRAINING


def machine(World, output) -> type[RuleBasedStateMachine]:
    class CoreMachine(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            lanes = LanesConfig(
                interactive=InteractiveLaneConfig(max_queued=8, max_queue_s=20.0),
                batch=BatchLaneConfig(max_queued=8, max_queue_s=20.0, max_running=3),
            )
            tenants = {"narrow": TenantConfig(max_concurrent=1), "heavy": TenantConfig(weight=2)}
            self.world = World(lanes=lanes, tenants=tenants, max_request_s=40.0)
            self.incarnations: dict[str, int] = {}
            # Streams whose session was lost before their end; they get no final effect.
            self.unheard: set = set()
            # Request ID of each stream.
            self.request_ids: dict = {}

        @rule(
            session=st.integers(1, 3),
            known=st.sampled_from([(), (5,), (5, 6)]),
            max_tokens=st.integers(1, 4),
            lane=st.sampled_from([common_pb2.LANE_INTERACTIVE, common_pb2.LANE_BATCH]),
            tenant=st.sampled_from(["default", "narrow", "heavy"]),
            timeout_s=st.sampled_from([None, 3.0, 15.0]),
        )
        def submit(self, session, known, max_tokens, lane, tenant, timeout_s):
            to = self.world.submit(
                session,
                known_token_ids=known,
                sampling={"max_tokens": max_tokens},
                lane=lane,
                tenant=tenant,
                timeout_s=timeout_s,
            )
            self.request_ids[to] = f"r{to.stream}"

        @precondition(lambda self: self.world.core.running())
        @rule(data=st.data(), session=st.integers(1, 3))
        def resume(self, data, session):
            """The client resumes its request; over the same session the core refuses that."""
            older = data.draw(st.sampled_from(self.world.core.running())).submission
            request = self.world.core.running_request(older.request_id, older.tenant)
            to = self.world.submit(
                session,
                request_id=older.request_id,
                known_token_ids=tuple(request.token_ids),
                sampling={"max_tokens": older.sampling.max_tokens},
                lane=older.lane,
                tenant=older.tenant,
            )
            self.request_ids[to] = older.request_id

        @rule(worker=st.sampled_from(["p1", "p2", "d1", "d2"]), fresh=st.booleans())
        def attach(self, worker, fresh):
            if fresh or worker not in self.incarnations:
                self.incarnations[worker] = self.incarnations.get(worker, 0) + 1
            role = common_pb2.ROLE_PREFILL if worker[0] == "p" else common_pb2.ROLE_DECODE
            self.world.attach(worker, role, self.incarnations[worker])

        @rule(worker=st.sampled_from(["p1", "p2", "d1", "d2"]), kind=st.integers(0, 2))
        def lose(self, worker, kind):
            key = (worker, self.incarnations.get(worker, 0))
            if kind == 0:
                self.world.handle(ev.WorkerLost(worker, "was killed"))
            elif kind == 1:
                self.world.handle(ev.WorkerDetached(key))
            else:
                self.world.handle(ev.WorkerHeard(key))

        @rule(
            worker=st.sampled_from(["p1", "p2", "d1", "d2"]),
            role=st.sampled_from([common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE]),
        )
        def flip(self, worker, role):
            self.world.handle(ev.FlipRequested(worker, role))

        @rule(worker=st.sampled_from(["p1", "p2", "d1", "d2"]))
        def obey(self, worker):
            """The worker reports that it carried out its last SetRoleCommand or DrainCommand."""
            key, change = (worker, self.incarnations.get(worker, 0)), None
            for command in self.world.commands[worker]:
                if isinstance(command, cluster_pb2.SetRoleCommand):
                    change = cluster_pb2.WorkerStateChanged(role=command.role)
                elif isinstance(command, cluster_pb2.DrainCommand):
                    change = cluster_pb2.WorkerStateChanged(state=DRAINING)
            if change is not None:
                self.world.handle(ev.WorkerChanged(key, change))
            self.world.handle(ev.LoadReported(key, cluster_pb2.LoadReport(num_running=1)))

        @rule(worker=st.sampled_from(["p2", "d2"]))
        def drain(self, worker):
            self.world.handle(ev.DrainRequested(worker, 2.0, "test"))

        @precondition(lambda self: self.world.core.running())
        @rule(
            data=st.data(),
            count=st.integers(0, 2),
            shift=st.sampled_from([0, 0, 0, 0, -1, 1]),
            finish=st.sampled_from([None, None, 0, 1, 2]),
            side=st.booleans(),
            plain=st.booleans(),
        )
        def produce(self, data, count, shift, finish, side, plain):
            request = data.draw(st.sampled_from(self.world.core.running()))
            worker = request.prefill if side else request.decode
            if worker is None:
                return
            offset = max(0, len(request.token_ids) + shift)
            if plain and finish is None:
                tokens = [(request.handle, at, at) for at in range(offset, offset + count)]
                self.world.step_columns(worker[0], *tokens, incarnation=worker[1])
                return
            tokens = list(range(offset, offset + count))
            message = output(
                request.key, tokens, offset, finish=finish, attempt=max(1, request.attempt_number)
            )
            self.world.step(worker[0], message, incarnation=worker[1])

        @precondition(lambda self: self.request_ids)
        @rule(data=st.data(), how=st.integers(0, 2))
        def end(self, data, how):
            to = data.draw(st.sampled_from(list(self.request_ids)))
            if how == 0:
                self.world.handle(ev.StreamCancelled(to))
            elif how == 1:
                request = self.world.core.running_request(self.request_ids[to])
                self.world.handle(ev.RequestCancelled(request.key if request else "r0"))
            else:
                running = (request.submission.to for request in self.world.core.running())
                self.unheard.update(one for one in running if one.session == to.session)
                self.world.handle(ev.SessionLost(to.session))

        @rule(seconds=st.sampled_from([0.01, 1.0, 6.0]))
        def wait(self, seconds):
            self.world.after(seconds)

        @invariant()
        def each_token_is_sent_once(self):
            for to, effects in self.world.sent.items():
                offset = None
                for effect in effects:
                    if hasattr(effect, "delta") and effect.delta.token_ids:
                        assert offset in (None, effect.delta.offset)
                        offset = effect.delta.offset + len(effect.delta.token_ids)
                        assert list(effect.delta.token_ids) == list(
                            range(effect.delta.offset, offset)
                        ), to

        def teardown(self):
            world = self.world
            world.after(100.0)
            assert world.core.num_requests == 0
            assert world.core.next_deadline() is None
            assert all(not len(worker.ledger) for worker in world.core.workers)
            assert all(world.core.num_running(lane) == 0 for lane in world.core.stats.lanes)
            for to, request_id in self.request_ids.items():
                kinds = world.kinds(to)
                ends = kinds.count("Finished") + kinds.count("Failed")
                record = world.core.request(request_id)
                assert ends == (to not in self.unheard), kinds
                if ends:
                    assert kinds[-1] in ("Finished", "Failed")
                if record is not None:
                    budget = record.budget
                    assert sum(one.duration_us for one in budget.stages) == budget.total_us
                    at = 0
                    for one in budget.stages:
                        assert one.start_us == at
                        at += one.duration_us

    return CoreMachine


def test_every_request_ends_exactly_once_in_any_order_of_events(new_world, out):
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(
        machine(new_world, out),
        settings=settings(
            max_examples=60,
            stateful_step_count=40,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
