"""Actors that a connecting driver finds in its namespace, without Ray."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import pytest

from baton.coordinator.launchers.ray_launch import wire

pytest.importorskip("ray")
cluster = pytest.importorskip("baton.coordinator.launchers.ray_launch.cluster")

OPENING = wire.Open(
    address="127.0.0.1:9",
    namespace="baton",
    runtime_env={},
    directory="",
    coordinator="127.0.0.1:9",
    command=[],
    stop_timeout_s=1.0,
    connect_timeout_s=60.0,
    placement_timeout_s=1.0,
)


class Ray:
    """Named actors with the coordinator that each one names; None: it has no place yet."""

    def __init__(self, coordinators: dict[str, str | None]) -> None:
        self._coordinators = coordinators
        self.killed: list[str] = []
        self.waited_s = 0.0

    def get_actor(self, name):
        return SimpleNamespace(name=name, coordinator=SimpleNamespace(remote=lambda: name))

    def wait(self, answers, num_returns, timeout):
        self.waited_s += timeout

    def get(self, answer, timeout):
        if (coordinator := self._coordinators[answer]) is None:
            raise TimeoutError
        return coordinator

    def kill(self, actor, no_restart):
        self.killed.append(actor.name)


def found(monkeypatch, coordinators):
    ray = Ray(coordinators)
    monkeypatch.setattr(cluster, "ray", ray)
    monkeypatch.setattr(cluster, "list_named_actors", lambda: list(coordinators))
    return ray


def test_a_driver_ends_no_actor_of_a_coordinator_that_runs(monkeypatch):
    """One of that coordinator's workers waits for room, so its actor does not answer."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        other = f"127.0.0.1:{listening.getsockname()[1]}"
        ray = found(monkeypatch, {"baton.d1.1": None, "baton.d2.2": other})
        with pytest.raises(cluster.Refused, match=f"the coordinator at {other} uses"):
            cluster._reap(OPENING)
    assert ray.killed == []


def test_a_driver_has_time_to_connect_after_it_waited_for_actors(monkeypatch):
    """Otherwise every attempt would end before the driver has ended an actor without a place."""
    ray = found(monkeypatch, {"baton.d1.1": None, "baton.d2.2": OPENING.coordinator, "other": None})
    cluster._reap(OPENING)
    assert ray.killed == ["baton.d1.1", "baton.d2.2"]
    assert ray.waited_s < OPENING.connect_timeout_s
