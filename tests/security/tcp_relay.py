"""A TCP relay in front of a coordinator."""

import asyncio
import contextlib


class Relay:
    """Relays bytes to a coordinator, counts the connections to it and can break them."""

    def __init__(self, target: str) -> None:
        self._target = target.rsplit(":", 1)
        self._tasks: set[asyncio.Task] = set()
        self._writers: list[asyncio.StreamWriter] = []
        self.num_connections = 0

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        self.address = f"{host}:{port}"
        return self

    async def __aexit__(self, *_):
        self._server.close()
        self.cut()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        """Breaks every connection; later ones are relayed."""
        for writer in self._writers:
            writer.close()
        self._writers.clear()

    async def _accept(self, reader, writer):
        self.num_connections += 1
        self._tasks.add(asyncio.current_task())
        there, back = await asyncio.open_connection(*self._target)
        self._writers += writer, back
        try:
            await asyncio.gather(self._pass(reader, back), self._pass(there, writer))
        finally:
            writer.close()
            back.close()

    @staticmethod
    async def _pass(reader, writer):
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
            writer.close()
