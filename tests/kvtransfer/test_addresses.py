"""The address on which a transfer service listens, and the address that others dial."""

import contextlib
import socket

import pytest

from baton.kvtransfer.addresses import advertised, bind, with_listen_address
from baton.runtime.config import KvTransferConfig
from baton.runtime.config_error import ConfigError
from baton.runtime.network import rpc
from baton.runtime.network.addresses import outward_address


@contextlib.contextmanager
def taken_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


def test_a_worker_listens_on_the_interface_to_the_coordinator():
    assert with_listen_address(KvTransferConfig(), "127.0.0.1:7070").listen == "127.0.0.1:0"
    outward = outward_address(socket.AF_INET)
    if outward is not None:
        assert with_listen_address(KvTransferConfig(), f"{outward}:7070").listen == f"{outward}:0"
    said = KvTransferConfig(listen="192.0.2.1:5")
    assert with_listen_address(said, "127.0.0.1:7070") is said
    with pytest.raises(
        ConfigError, match=r"no interface leads to the coordinator at nowhere.invalid:7070"
    ):
        with_listen_address(KvTransferConfig(), "nowhere.invalid:7070")


async def test_ports_come_from_the_range_and_only_from_there():
    server = rpc.server()
    with taken_port() as taken:
        one = KvTransferConfig(port_range=f"{taken}-{taken}")
        refused = rf":{taken}: Address already in use; no other port of {taken}-{taken} can be used"
        with pytest.raises(ConfigError, match=refused):
            bind(server, one)
        span = KvTransferConfig(port_range=f"{taken}-{min(taken + 20, 65535)}")
        address = bind(server, span)
    assert taken < int(address.split(":")[1]) <= taken + 20
    await server.stop(0)


def test_the_advertised_address_is_never_a_wildcard():
    assert advertised("0.0.0.0:5", "worker.test") == "worker.test:5"
    for host in ("2001:db8::1", "[2001:db8::1]"):
        assert advertised("[::]:5", host) == "[2001:db8::1]:5"
    outward = outward_address(socket.AF_INET)
    if outward is not None:
        assert advertised("0.0.0.0:5", "") == f"{outward}:5"
    else:
        with pytest.raises(ConfigError, match="advertise_host: is empty"):
            advertised("0.0.0.0:5", "")
    assert advertised("192.0.2.1:5", "") == "192.0.2.1:5"
