"""Placement of workers in a Ray cluster, tested without Ray."""

import pytest

from baton.coordinator.launchers.launchers import make_launcher
from baton.coordinator.launchers.ray_launch import wire
from baton.coordinator.launchers.ray_launch.placement import (
    Node,
    in_use,
    partner_node,
    shortage,
    unreachable,
)
from baton.runtime.config import parse
from baton.runtime.config_error import ConfigError

SMALL = Node("s", "10.0.0.1", {"CPU": 4.0, "GPU": 1.0})
LARGE = Node("l", "10.0.0.2", {"CPU": 2.0, "GPU": 8.0, "nvlink": 1.0})


@pytest.mark.parametrize(
    ("needs", "says"),
    [
        ({"CPU": 4.0}, ""),
        ({"CPU": 2.0, "GPU": 8.0, "nvlink": 1.0}, ""),
        ({"CPU": 1.0, "absent": 0.0}, ""),
        ({"CPU": 1.0, "GPU": 16.0}, "no node of Ray has GPU 16 (most: 8)"),
        ({"CPU": 1.0, "infiniband": 1.0}, "no node of Ray has infiniband 1 (most: 0)"),
        ({"CPU": 4.0, "GPU": 8.0}, "no node of Ray has all of CPU 4, GPU 8"),
    ],
)
def test_a_shortage_names_the_missing_resource(needs, says):
    assert shortage(needs, [SMALL, LARGE]) == says


def test_without_nodes_nothing_fits():
    assert shortage({"CPU": 1.0}, []) == "Ray has no nodes"


@pytest.mark.parametrize(
    ("role", "placed", "node"),
    [
        ("decode", [], None),
        ("decode", [("prefill", "a")], "a"),
        ("prefill", [("prefill", "a")], None),
        ("decode", [("prefill", "a"), ("decode", "a")], None),
        ("decode", [("prefill", "a"), ("decode", "a"), ("prefill", "b")], "b"),
        ("prefill", [("prefill", "a"), ("decode", "b"), ("decode", "b"), ("prefill", "b")], "b"),
    ],
)
def test_a_worker_is_placed_on_the_node_that_lacks_its_role(role, placed, node):
    assert partner_node(role, placed) == node


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "localhost"])
def test_a_coordinator_on_loopback_is_refused_where_there_are_other_hosts(host):
    own = {"10.0.0.1", "127.0.0.1"}
    assert unreachable(f"{host}:7070", [SMALL], own) == ""
    assert unreachable("10.0.0.1:7070", [SMALL, LARGE], own) == ""
    why = unreachable(f"{host}:7070", [SMALL, LARGE], own)
    assert why.startswith(f"coordinator.listen: workers would dial {host}:7070")
    assert "10.0.0.2 is one of 1" in why


def test_without_ray_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"launcher: is 'ray', .*install baton\[ray\]"):
        make_launcher(parse({"launcher": "ray"}, "test"), "127.0.0.1:7070", print)


def test_messages_survive_encoding_and_decoding():
    start = wire.Start("d1", "decode", 1.0, None, 2, {"nvlink": 1.0}, {}, "model: demo")
    exited = wire.Exited("d1", -9, last_line='"quoted"\n', lost="")
    for message in (start, exited, wire.Silent(7.5)):
        line = wire.encode(message)
        assert line.count(b"\n") == 1
        assert wire.decode(line) == message


@pytest.mark.parametrize("line", [b"", b"[]", b'{"kind": "Other"}', b'{"kind": "End", "x": 1}'])
def test_an_invalid_message_is_refused(line):
    with pytest.raises(ValueError, match=r"."):
        wire.decode(line)


def test_the_reason_for_waiting_names_needed_and_free_resources():
    free = {"CPU": 0.5, "memory": 2e9}
    assert in_use({"CPU": 1.0, "GPU": 2.0, "absent": 0.0}, free) == (
        "no node has all of CPU 1, GPU 2 free (together they have CPU 0.5, GPU 0), "
        "or its node is slow"
    )
    assert in_use({"CPU": 0.0}, free) == "its node is slow"
