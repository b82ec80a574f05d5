"""The cells behind one gateway, and the choice of the cell for each request.

A cell serves one base model and its adapters, and shares nothing with other cells. A gateway in
front of several cells offers many models at one address, and lets several coordinators serve the
same model.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator, Sequence

import xxhash
from google.rpc import code_pb2

from baton.client import BatonClient, errors
from baton.gateway import error_responses
from baton.gateway.cell import Cell
from baton.gateway.error_responses import HttpError
from baton.runtime.closing import AsyncClosing
from baton.runtime.errors import RemoteError
from baton.runtime.process.long_tasks import keep_running
from baton.v1 import common_pb2

# HTTP statuses that mean that a cell gave no response.
_UNREACHABLE_STATUSES = (503, 504)
# Timeout of one wait for an unreachable cell to serve again, and the pause before the next one.
_WAIT_S, _PAUSE_S = 60.0, 1.0


class Cells(AsyncClosing):
    """Chooses the cell of each request and tracks the cells that cannot be reached.

    With a single cell, the gateway queries nothing before it sends a request there.

    If several cells serve a model, rendezvous hashing chooses the cell of a session, so that the
    session's requests find their KV cache in the prefix cache. Adding or removing a cell moves only
    the sessions of that cell. A cell that cannot be reached is tried last until it serves again.

    The caller that adds a cell opens and closes the cell's clients.

    Attributes:
        failovers: Number of requests that another cell served, by the name of the unreachable cell.
    """

    def __init__(self) -> None:
        self.failovers: Counter[str] = Counter()
        self._cells: list[Cell] = []
        # Names of the models that each cell served in its latest response to any caller.
        self._served: dict[str, list[str]] = {}
        # Tasks that wait until an unreachable cell serves again, by cell name.
        self._return_tasks: dict[str, asyncio.Task[None]] = {}

    def __iter__(self) -> Iterator[Cell]:
        return iter(self._cells)

    def add(self, cell: Cell) -> None:
        """Adds a cell; its name must be unique."""
        self._cells.append(cell)

    async def aclose(self) -> None:
        """Stops waiting for unreachable cells; idempotent."""
        return_tasks, self._return_tasks = self._return_tasks, {}
        for task in return_tasks.values():
            task.cancel()
        await asyncio.gather(*return_tasks.values(), return_exceptions=True)

    def is_unreachable(self, cell: Cell) -> bool:
        """Whether the cell could not be reached and has not served since."""
        return cell.name in self._return_tasks

    async def candidates(
        self, model: str | None, session: str, authorization: str
    ) -> Sequence[Cell]:
        """Returns the cells to try for a request, in order; at least one.

        Args:
            model: Model that the request names; None: the base model of the first cell.
            session: Session ID, or the request ID of a request without a session.
            authorization: Credential of the caller, with which each cell's model is fetched.

        Raises:
            HttpError: No cell serves the model, admits the caller or can be reached.
        """
        if len(self._cells) == 1:
            return self._cells
        served, refusal = await self._fetch_all(authorization)
        if refusal is not None and not served:
            raise refusal
        wanted = model if model is not None else next(iter(served.values()))[0]
        found = [cell for cell in self._cells if wanted in served.get(cell.name, ())]
        if not found:
            # `refusal` is set if a cell has never responded: that cell may serve the model.
            names = dict.fromkeys(name for names in served.values() for name in names)
            raise refusal or error_responses.model_not_found(wanted, names)
        return sorted(found, key=lambda cell: (self.is_unreachable(cell), _weight(cell, session)))

    async def models(self, authorization: str) -> list[common_pb2.ModelDescription]:
        """Returns the models of all cells that respond, in the cells' order, without duplicates.

        Raises:
            HttpError: No cell responds. An unreachable cell takes precedence over a cell that
                refuses the caller, because the unreachable cell may admit the caller.
        """
        queried = [cell for cell in self._cells if not self.is_unreachable(cell)] or self._cells
        responses = await asyncio.gather(*(self._model(cell, authorization) for cell in queried))
        found = [one for one in responses if isinstance(one, common_pb2.ModelDescription)]
        if not found:
            problems = [one for one in responses if isinstance(one, HttpError)]
            problems += [_unreachable(cell) for cell in self._cells if cell not in queried]
            raise min(problems, key=lambda one: one.status not in _UNREACHABLE_STATUSES)
        return list({one.name: one for one in reversed(found)}.values())[::-1]

    async def ready(self) -> None:
        """Returns when one of the cells can serve. Raises HttpError when no cell can."""
        found = list[HttpError]()
        for cell in sorted(self._cells, key=self.is_unreachable):
            try:
                return await cell.ready()
            except HttpError as problem:
                found.append(problem)
        raise found[0]

    def other_client(self, lost: Cell, model: str) -> BatonClient | None:
        """Returns the client of a cell that can continue a request of another cell.

        Args:
            lost: Cell that lost the request's session or refuses the request.
            model: Model that the request needs; empty: the base model of `lost`.
        """
        wanted = model or next(iter(self._served.get(lost.name, ())), None)
        found = [
            cell
            for cell in self._cells
            if cell is not lost
            and not self.is_unreachable(cell)
            and wanted in self._served.get(cell.name, ())
        ]
        return random.choice(found).client if found else None

    def report_lost(self, cell: Cell) -> None:
        """Reports that a request lost its session with a cell, or that the cell refuses it.

        The cell stays reachable if its client has a session again by now.
        """
        if cell.client.draining:
            cell.outage.began(f"the coordinator at {cell.client.address} is restarting")
            self._mark_unreachable(cell)
        elif cell.client.address is None:
            cell.outage.began(f"requests lost their session with {cell.name}")
            self._mark_unreachable(cell)

    def report_failure(self, cell: Cell, error: RemoteError) -> None:
        """Reports that a request failed in a cell."""
        cell.outage.failed(error)
        if error.code == code_pb2.UNAVAILABLE:
            self._mark_unreachable(cell)

    async def _fetch_all(self, authorization: str) -> tuple[dict[str, list[str]], HttpError | None]:
        """Fetches the models of all cells.

        An unreachable cell is not queried; the models of its latest response are returned.

        Returns:
            The names of the models by cell name, in the cells' order, for the cells that admit the
            caller. And an error if a cell is missing there: an unreachable cell takes precedence
            over a cell that refuses the caller.
        """
        queried = [cell for cell in self._cells if not self.is_unreachable(cell)]
        responses = await asyncio.gather(*(self._model(cell, authorization) for cell in queried))
        refused = {
            cell.name: response
            for cell, response in zip(queried, responses, strict=True)
            if isinstance(response, HttpError)
        }
        served, refusal, unknown = dict[str, list[str]](), None, None
        for cell in self._cells:
            problem = refused.get(cell.name)
            if problem is not None and problem.status not in _UNREACHABLE_STATUSES:
                refusal = refusal or problem
            elif cell.name in self._served:
                served[cell.name] = self._served[cell.name]
            else:
                unknown = unknown or problem or _unreachable(cell)
        return served, unknown or refusal

    async def _model(
        self, cell: Cell, authorization: str
    ) -> common_pb2.ModelDescription | HttpError:
        try:
            model = await cell.model.get(authorization)
        except HttpError as problem:
            if problem.status in _UNREACHABLE_STATUSES:
                self._mark_unreachable(cell)
            return problem
        self._served[cell.name] = [model.name, *(one.name for one in model.adapters)]
        return model

    def _mark_unreachable(self, cell: Cell) -> None:
        """From now on the cell is tried last, until it serves again."""
        if len(self._cells) > 1 and not self.is_unreachable(cell):
            waiting = keep_running(f"return of {cell.name}", lambda: self._await_return(cell))
            self._return_tasks[cell.name] = asyncio.create_task(waiting)

    async def _await_return(self, cell: Cell) -> None:
        while True:
            try:
                await cell.client.wait_ready(_WAIT_S)
                break
            except RemoteError:
                await asyncio.sleep(_PAUSE_S)
        cell.outage.served()
        del self._return_tasks[cell.name]


def _unreachable(cell: Cell) -> HttpError:
    """The error for a cell that cannot be reached, without a query."""
    message = f"the coordinator at {cell.name} cannot be reached"
    return error_responses.from_remote_error(errors.make(code_pb2.UNAVAILABLE, message))


def _weight(cell: Cell, session: str) -> int:
    """Rendezvous hashing: the session belongs to the cell with the lowest weight."""
    return xxhash.xxh3_64_intdigest(f"{cell.name} {session}".encode())
