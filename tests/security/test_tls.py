"""Certificates on real connections: which clients servers accept, and renewal of files."""

import asyncio
import contextlib
import dataclasses
import math
import socket
import ssl

import grpc
import pytest
from cryptography import x509

from baton.client import AdminClient, BatonClient, Tls
from baton.client.errors import PermissionDeniedError, UnavailableError
from baton.runtime.network import rpc
from baton.runtime.security.dev_certs import CLIENT_NAME, CLUSTER_NAME, Authority
from baton.runtime.security.dial import Dial
from baton.runtime.security.tls import Handshakes, TlsFiles
from baton.v1 import cluster_pb2, cluster_pb2_grpc

# Longest wait for an event that must happen; long enough for a busy machine.
WAIT_S = 120.0


def mtls(pki, **options):
    return pki.server(client_auth="require", **options)


async def model(address, tls):
    async with BatonClient(address, tls=tls) as client:
        return (await client.model(WAIT_S)).name


def shown_certificate(address: str, pki, stem: str = "client") -> x509.Certificate:
    host, port = address.rsplit(":", 1)
    context = ssl.create_default_context(cafile=pki.file("ca.pem"))
    context.load_cert_chain(pki.file(f"{stem}.pem"), pki.file(f"{stem}.key"))
    with (
        socket.create_connection((host, int(port)), timeout=WAIT_S) as plain,
        context.wrap_socket(plain, server_hostname=host) as wrapped,
    ):
        return x509.load_der_x509_certificate(wrapped.getpeercert(binary_form=True))


def handshake(server: ssl.SSLContext, client: ssl.SSLContext, session=None) -> ssl.SSLObject:
    """Connects in memory and sends one message to the client; returns the client's side.

    Raises:
        ssl.SSLError: One side refused the other.
    """
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    serving = server.wrap_bio(to_server, to_client, server_side=True)
    calling = client.wrap_bio(to_client, to_server, session=session)

    def both(*steps):
        left = list(steps)
        # Each turn delivers one flight of messages, and no handshake has as many.
        for _ in range(10):
            for step in tuple(left):
                with contextlib.suppress(ssl.SSLWantReadError):
                    step()
                    left.remove(step)
        assert not left

    both(calling.do_handshake, serving.do_handshake)
    # With TLS 1.3, the client gets its session tickets with the first data.
    serving.write(b"hello")
    assert calling.read() == b"hello"
    # OpenSSL forgets a session whose connection is not closed in an orderly way.
    both(serving.unwrap, calling.unwrap)
    return calling


def attach(channel):
    return cluster_pb2_grpc.ClusterStub(channel).Attach(
        iter([cluster_pb2.WorkerMessage(hello=cluster_pb2.Hello(worker_id="w"))])
    )


async def test_a_server_with_tls_serves_clients_that_trust_its_ca(start_coordinator, pki):
    async with start_coordinator(pki.server()) as running:
        assert await model(running.address, pki.tls()) == "demo"
        assert await model(running.address, pki.tls("client")) == "demo"


@pytest.mark.parametrize("stem", ["", "wrong", "expired", "plain"])
async def test_a_client_without_a_valid_certificate_is_refused_logged_and_counted(
    start_coordinator, count_refusals, pki, log, stem
):
    async with start_coordinator(mtls(pki)) as running:
        tls = None if stem == "plain" else pki.tls(stem)
        with pytest.raises(UnavailableError):
            await model(running.address, tls)
        # Clients with a valid certificate are served.
        assert await model(running.address, pki.tls("client")) == "demo"
        handshakes = running._access.refusals.handshakes
        async with asyncio.timeout(WAIT_S):
            # Simulates that the time for the first call has passed.
            while handshakes.num_refused < 1:
                handshakes.expire(math.inf)
                await asyncio.sleep(0.01)
        assert (await count_refusals(running))["TLS", "handshake"] >= 1
        assert any("TLS handshakes were not followed by a call" in line for line in log.lines)


async def test_a_client_that_calls_is_not_counted(start_coordinator, count_refusals, pki):
    async with start_coordinator(mtls(pki)) as running:
        for _ in range(3):
            await model(running.address, pki.tls("client"))
        running._access.refusals.handshakes.expire(math.inf)
        assert (await count_refusals(running))["TLS", "handshake"] == 0


async def test_a_client_refuses_servers_with_other_certificates(start_coordinator, pki, fresh_pki):
    async with start_coordinator(pki.server()) as running:
        with pytest.raises(UnavailableError):
            await model(running.address, fresh_pki.tls())
        named = Tls(pki.file("ca.pem"), server_name="somebody.else")
        with pytest.raises(UnavailableError):
            await model(running.address, named)
        named = Tls(pki.file("ca.pem"), server_name=CLUSTER_NAME)
        assert await model(running.address, named) == "demo"


async def test_rights_depend_on_the_name_in_the_certificate(
    start_coordinator, count_refusals, pki, log
):
    async with start_coordinator(mtls(pki)) as running:
        async with AdminClient(running.address, tls=pki.tls("client")) as admin:
            with pytest.raises(PermissionDeniedError, match="admin_names"):
                await admin.list_pools()
        async with AdminClient(running.address, tls=pki.tls("admin")) as admin:
            assert (await admin.list_pools()).model.name == "demo"
        for stem, code in (
            ("client", grpc.StatusCode.PERMISSION_DENIED),
            # Accepted as a worker; its Hello is then invalid.
            ("server", grpc.StatusCode.INVALID_ARGUMENT),
        ):
            files = pki.tls(stem)
            dial = Dial(TlsFiles(files.ca_file, files.cert_file, files.key_file))
            async with rpc.channel(running.address, dial=dial) as channel:
                assert await attach(channel).code() is code
        found = await count_refusals(running)
        assert found["Admin", "certificate_name"] == found["Cluster", "certificate_name"] == 1
        assert log.reasons() == {"certificate_name"}


async def test_renewed_certificates_are_used(start_coordinator, fresh_pki, log):
    pki = fresh_pki
    async with start_coordinator(mtls(pki)) as running:
        tls = pki.tls("client")
        async with BatonClient(running.address, tls=tls) as client:
            before = await asyncio.to_thread(shown_certificate, running.address, pki)
            await client.model()
            # Replaces the certificates of the server and of the client.
            pki.issue("server", CLUSTER_NAME, serves=True)
            pki.issue("client", "baton-client")
            after = await asyncio.to_thread(shown_certificate, running.address, pki)
            assert before.serial_number != after.serial_number
            assert (await client.model()).name == "demo"
        assert any("changed files are now in use" in line for line in log.lines)


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_a_client_of_a_removed_ca_cannot_resume_its_session(fresh_pki, version):
    pki = fresh_pki
    files = TlsFiles(*(pki.file(name) for name in ("ca.pem", "server.pem", "server.key")))
    server = files.server_context(client_auth=True)

    def client() -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = context.maximum_version = version
        # The client accepts every server, so that only the server refuses.
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.load_cert_chain(pki.file("client.pem"), pki.file("client.key"))
        return context

    old, session = client(), None
    if version is ssl.TLSVersion.TLSv1_3:
        session = handshake(server, old).session
        assert not handshake(server, old, session).session_reused
    else:
        # Python cannot switch off the session IDs of TLS 1.2.
        with pytest.raises(ssl.SSLError):
            session = handshake(server, old).session
    renewed = dataclasses.replace(pki, authority=Authority.make("another CA"))
    renewed.authority.write(renewed.directory / "ca.pem", renewed.directory / "ca.key")
    renewed.issue("server", CLUSTER_NAME, serves=True)
    renewed.issue("client", CLIENT_NAME)
    with pytest.raises(ssl.SSLError):
        handshake(server, old, session)
    if version is ssl.TLSVersion.TLSv1_3:
        handshake(server, client())


async def test_files_that_do_not_match_change_nothing(start_coordinator, fresh_pki, log):
    pki = fresh_pki
    async with start_coordinator(pki.server()) as running:
        before = await asyncio.to_thread(shown_certificate, running.address, pki)
        # A new certificate whose key is not written yet.
        fitting = (pki.directory / "server.pem").read_text()
        for num_told in (1, 2):
            (pki.directory / "server.pem").write_text((pki.directory / "admin.pem").read_text())
            for _ in range(3):
                after = await asyncio.to_thread(shown_certificate, running.address, pki)
                assert before.serial_number == after.serial_number
            # Logged once, and not at each handshake.
            assert sum("cannot be used" in line for line in log.lines) == num_told
            (pki.directory / "server.pem").write_text(fitting)
            await asyncio.to_thread(shown_certificate, running.address, pki)
        assert not any("PRIVATE" in line for line in log.lines)


def test_failed_handshakes_are_all_counted_and_do_not_fill_the_log(log):
    now = 0.0
    handshakes = Handshakes("coordinator.listen", 0.0, clock=lambda: now)
    # A worker with a wrong certificate tries several times a second.
    for number in range(300):
        now = number / 5
        handshakes.started()
    assert handshakes.num_refused == 300
    assert 1 < len(log.lines) < 10
