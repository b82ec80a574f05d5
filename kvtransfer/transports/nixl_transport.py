"""NIXL between two services: the receiver reads from the sender's staging, by RDMA where there is.

UCX chooses the wire, among InfiniBand, RoCE, shared memory by the kernel, and TCP; its environment
variables, such as UCX_TLS and UCX_NET_DEVICES, apply. Bytes are not encrypted.

An end that NIXL reports is a fence, and nothing else is: bytes land after a handle was released,
and in memory that was deregistered. So a read whose state is not known counts as under way, for
ever, and an agent is only removed while none of its reads is under way.

Loading NIXL takes seconds, so where shared memory is preferred, the agent starts only when a
handoff could not use that.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import importlib.util
import logging
import os
import secrets
import time
from dataclasses import dataclass
from typing import Any, NamedTuple

import grpc

from baton.kvtransfer import frames
from baton.kvtransfer.errors import TransferError
from baton.kvtransfer.transports.pull import Puller, PullTransport
from baton.kvtransfer.transports.transport import EndedPull, Pull, ServiceContext, TransportHandler
from baton.runtime.process import quick_exit
from baton.v1 import kv_transfer_pb2 as pb

# Time in microseconds for which the thread of UCX sleeps between two looks at its wires. NIXL's own
# choice is 0, with which the thread takes a whole core while nothing happens.
PROGRESS_DELAY_US = 100
# Seconds for which a sender whose memory could not be read is not tried again.
RETRY_AFTER_S = 30.0
# Seconds without an end of any read from a sender after which more reads are not begun.
STUCK_AFTER_S = 5.0
# Seconds after which an unused sender's agent is removed. The next handoff would connect again.
IDLE_TIMEOUT_S = 300.0
# Most unused senders whose agents are kept. When there are more, the agent that has been unused for
# the longest time is removed.
MAX_IDLE_PEERS = 1024
# Packages of NIXL's builds, of which each holds the whole Python API.
_BUILDS = ("nixl_cu12", "nixl_cu13", "nixl_rocm")
_NOT_ENCRYPTED = "it has no TLS; security.allow_plain_links: true allows it"

logger = logging.getLogger(__name__)


class NixlSource(NamedTuple):
    """Memory of another service: the metadata of its agent, and the address of its segment."""

    agent: bytes
    address: int


@dataclass(slots=True)
class _Read:
    """A read under way.

    Attributes:
        agent: Metadata of the agent whose memory is read.
        state: NIXL's PROC, DONE or ERR; or LOST when NIXL no longer tells.
        digest: Checksum of the bytes that landed, once the read is done.
    """

    agent: bytes
    pull: Pull
    handle: Any
    state: str
    digest: int | None = None


class NixlPuller(Puller[NixlSource]):
    """One NIXL agent with the UCX backend.

    Args:
        memory: This service's segment.

    Attributes:
        metadata: Data that other services need to read from this agent; empty before `open`.
        address: Address of the segment.
    """

    poll_s = 0.0002

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self.metadata = b""
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._agent: Any = None
        self._disconnected: type[Exception] = Exception
        self._names: dict[bytes, str] = {}
        # Agents with a failed read. NIXL does not connect to them again unless they are removed.
        self._broken: set[bytes] = set()
        self._reads: list[_Read] = []
        self._failed: list[EndedPull] = []
        self._kept: memoryview | None = None

    def open(self) -> None:
        os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
        # Staging is host memory, so UCX leaves the GPUs alone.
        os.environ.setdefault("UCX_TLS", "^cuda")
        try:
            api = _api()
            self._disconnected = api.nixlBind.nixlRemoteDisconnectError
            agent = _patient_agent(api, f"baton-{secrets.token_hex(8)}")
            agent.register_memory([(self.address, len(self._memory), 0, "")], "DRAM")
            self._agent, self.metadata = agent, agent.get_agent_metadata()
        except Exception as error:
            raise TransferError(f"NIXL does not work here: {error}") from error

    def start(self, source: NixlSource, pull: Pull) -> None:
        try:
            handle = self._handle(source, pull)
        except Exception as error:
            logger.warning("a read by NIXL could not begin: %s", error)
            self._failed.append(EndedPull(pull.serial, None))
            return
        read = _Read(source.agent, pull, handle, "PROC")
        self._look(read, self._agent.transfer)
        self._reads.append(read)

    def ended(self) -> list[EndedPull]:
        ended, self._failed = self._failed, []
        under_way = []
        for read in self._reads:
            if read.state == "PROC":
                self._look(read, self._agent.check_xfer_state)
            if read.state in ("PROC", "LOST"):
                under_way.append(read)
                continue
            if read.digest is None:
                self._broken.add(read.agent)
            ended.append(EndedPull(read.pull.serial, read.digest))
        self._reads = under_way
        return ended

    def forget(self, source: NixlSource) -> None:
        self._broken.discard(source.agent)
        if (name := self._names.pop(source.agent, None)) is not None:
            try:
                self._agent.remove_remote_agent(name)
            except Exception as error:
                logger.info("an agent of NIXL could not be removed: %s", error)

    def close(self) -> None:
        if self._reads:
            # Bytes may land until the process ends, so its memory stays mapped until then.
            self._kept = self._memory[:]
            quick_exit.skip_cleanup(0)
        else:
            self._agent = None

    def _handle(self, source: NixlSource, pull: Pull) -> Any:
        agent = self._agent
        if source.agent in self._broken and all(r.agent != source.agent for r in self._reads):
            self.forget(source)
        if (name := self._names.get(source.agent)) is None:
            name = self._names[source.agent] = agent.add_remote_agent(source.agent)
        here = self.address + pull.target
        there = source.address + pull.source
        return agent.initialize_xfer(
            "READ",
            agent.get_xfer_descs([(here, pull.num_bytes, 0)], "DRAM"),
            agent.get_xfer_descs([(there, pull.num_bytes, 0)], "DRAM"),
            name,
        )

    def _look(self, read: _Read, call: Any) -> None:
        """Updates the state of a read by a call of the agent."""
        try:
            read.state = call(read.handle)
        except self._disconnected:
            # UCX has closed the connection, so nothing lands any more.
            read.state = "ERR"
        except Exception as error:
            logger.warning("the state of a read by NIXL is not known: %s", error)
            read.state = "LOST"
        if read.state == "DONE":
            # At once: the bytes may still be in the core's cache.
            begin, end = read.pull.target, read.pull.target + read.pull.num_bytes
            read.digest = frames.checksum(self._memory[begin:end])


def _api() -> Any:
    """Returns NIXL's Python API.

    The package `nixl` chooses among the installed builds. Without CUDA it imports torch for that,
    which takes seconds of CPU time and 200 MB. Where only one build is installed, there is no
    choice, so it is imported itself.
    """
    installed = [name for name in _BUILDS if importlib.util.find_spec(name) is not None]
    package = installed[0] if len(installed) == 1 else "nixl"
    importlib.import_module(package)
    return importlib.import_module(f"{package}._api")


def _patient_agent(api: Any, name: str) -> Any:
    """Returns an agent whose thread sleeps PROGRESS_DELAY_US; NIXL's Python API has no argument."""
    made_by = api.nixlBind.nixlAgentConfig

    class PatientConfig(made_by):  # type: ignore[misc, valid-type]
        def __setattr__(self, key: str, value: Any) -> None:
            super().__setattr__(key, PROGRESS_DELAY_US if key == "pthrDelay" else value)

    api.nixlBind.nixlAgentConfig = PatientConfig
    try:
        return api.nixl_agent(name, api.nixl_agent_config(backends=["UCX"]))
    finally:
        api.nixlBind.nixlAgentConfig = made_by


@dataclass(slots=True)
class _Peer:
    """The streams and pulls of this service that read from another one.

    Attributes:
        num_users: Number of its streams, and of pulls that have not ended.
        num_pulls: Number of those pulls.
        last_end: When the latest pull ended, or the first of the pulls under way began.
        refused_until: Time until which no handoff is accepted, because a read failed.
    """

    num_users: int = 0
    num_pulls: int = 0
    last_end: float = 0.0
    refused_until: float = 0.0


class NixlTransport(PullTransport[NixlSource]):
    """Sends references on the stream; the receiver reads the blocks with NIXL."""

    def __init__(self, name: str, service: ServiceContext) -> None:
        super().__init__(name, service)
        if importlib.util.find_spec("nixl") is None:
            raise TransferError("not installed (pip install 'baton[nixl]')")
        if service.within_host:
            raise TransferError(_NOT_ENCRYPTED)
        names = service.config.transports
        self._is_eager = name not in names or "shm" not in names[: names.index(name)]
        self._running: NixlPuller | None = None
        self._peers: dict[NixlSource, _Peer] = {}
        # Peers without users, in the order in which they lost the last one. The timers forget them.
        self._idle: dict[NixlSource, asyncio.TimerHandle] = {}

    def serve(self, server: grpc.aio.Server, handler: TransportHandler) -> None:
        self._handler = handler
        if self._is_eager:
            self._start()

    async def close(self) -> None:
        for timer in self._idle.values():
            timer.cancel()
        await super().close()

    def passed_over(self) -> None:
        self._start()

    def offer(self, target: str) -> pb.TransportOffer:
        if self._running is None:
            # The receiver prefers shared memory. If it has none, both start their agents.
            return pb.TransportOffer(name=self.name)
        self._check_thread()
        return pb.TransportOffer(
            name=self.name,
            nixl_agent=self._running.metadata,
            nixl_address=self._running.address,
            nixl_bytes=len(self._service.memory),
        )

    def accept(self, stream: int, offer: pb.TransportOffer) -> int:
        self._start()
        self._check_thread()
        if not offer.nixl_agent:
            raise TransferError("is starting at the sender")
        source = NixlSource(offer.nixl_agent, offer.nixl_address)
        self._check(source)
        self._sources[stream] = source
        self._use(source)
        return int(offer.nixl_bytes)

    def pull(self, pull: Pull) -> None:
        peer = self._use(self._sources[pull.stream])
        if not peer.num_pulls:
            peer.last_end = time.monotonic()
        peer.num_pulls += 1
        super().pull(pull)

    def _puller(self) -> NixlPuller:
        self._running = NixlPuller(self._service.memory)
        return self._running

    def _start(self) -> None:
        if self._thread is None:
            self._start_thread()

    def _check(self, source: NixlSource) -> None:
        """Raises TransferError while reads from a sender fail or do not end."""
        peer, now = self._peers.get(source), time.monotonic()
        if peer is None:
            return
        if now < peer.refused_until:
            raise TransferError("reads from this sender failed")
        if peer.num_pulls and now - peer.last_end > STUCK_AFTER_S:
            raise TransferError("reads from this sender do not end")

    def _use(self, source: NixlSource) -> _Peer:
        peer = self._peers.setdefault(source, _Peer())
        peer.num_users += 1
        if (timer := self._idle.pop(source, None)) is not None:
            timer.cancel()
        return peer

    def _released(self, source: NixlSource) -> None:
        peer = self._peers[source]
        peer.num_users -= 1
        if peer.num_users:
            return
        loop = asyncio.get_running_loop()
        self._idle[source] = loop.call_later(IDLE_TIMEOUT_S, self._forget, source)
        if len(self._idle) > MAX_IDLE_PEERS:
            self._forget(next(iter(self._idle)))

    def _forget(self, source: NixlSource) -> None:
        self._idle.pop(source).cancel()
        del self._peers[source]
        assert self._thread is not None
        self._thread.forget(source)

    def _take_ended(self, ended: list[EndedPull]) -> None:
        now = time.monotonic()
        for each in ended:
            peer = self._peers[self._pulled[each.serial]]
            peer.num_pulls -= 1
            peer.last_end = now
            if each.digest is None:
                peer.refused_until = now + RETRY_AFTER_S
        super()._take_ended(ended)
