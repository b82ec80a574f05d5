"""The cells behind one gateway, and which of them a request goes to.

A cell serves one base model and its adapters, and shares nothing with other cells. A gateway in
front of several puts many models behind one address, and lets a model grow beyond what one
coordinator carries.
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
from baton.v1 import common_pb2

# Statuses of a cell that gives no answer.
_UNREACHABLE_STATUSES = (503, 504)
# How long one wait for a cell to serve lasts, and the pause after one that failed.
_WAIT_S, _PAUSE_S = 60.0, 1.0


class Cells(AsyncClosing):
    """One cell or several. A gateway in front of a single one asks it nothing before a request.

    Of several cells that serve a model, rendezvous hashing says which one a session's requests go
    to, so that they find their KV cache again; a cell that comes or goes moves no sessions but
    those that it takes or leaves. One that cannot be reached is tried last until it serves again.

    Their clients are opened and closed by whoever adds them.

    Attributes:
        failovers: requests that another cell has taken, by the name of the one that was away.
    """

    def __init__(self) -> None:
        self.failovers: Counter[str] = Counter()
        self._cells: list[Cell] = []
        # What each cell served when it last said so, whoever had asked.
        self._served: dict[str, list[str]] = {}
        # Of cells that are away: what waits for them.
        self._return_tasks: dict[str, asyncio.Task[None]] = {}

    def __iter__(self) -> Iterator[Cell]:
        return iter(self._cells)

    def add(self, cell: Cell) -> None:
        """One more, of a name that the others do not have."""
        self._cells.append(cell)

    async def aclose(self) -> None:
        """Waits for no cell any more; idempotent."""
        return_tasks, self._return_tasks = self._return_tasks, {}
        for task in return_tasks.values():
            task.cancel()
        await asyncio.gather(*return_tasks.values(), return_exceptions=True)

    def is_unreachable(self, cell: Cell) -> bool:
        """Whether it could not be reached, and has not served since."""
        return cell.name in self._return_tasks

    async def candidates(
        self, model: str | None, session: str, authorization: str
    ) -> Sequence[Cell]:
        """The cells to try for a request, in order; at least one.

        Args:
            model: that the request names; None: the first cell's base model.
            session: what keeps requests together: a conversation's id, or the request's own.
            authorization: of who asks; each cell is asked for its model with it.

        Raises:
            HttpError: no cell serves that model, lets the caller in or can be reached.
        """
        if len(self._cells) == 1:
            return self._cells
        served, refusal = await self._ask_all(authorization)
        if refusal is not None and not served:
            raise refusal
        wanted = model if model is not None else next(iter(served.values()))[0]
        found = [cell for cell in self._cells if wanted in served.get(cell.name, ())]
        if not found:
            # Of a cell that has never answered nobody knows what it serves.
            names = dict.fromkeys(name for names in served.values() for name in names)
            raise refusal or error_responses.model_not_found(wanted, names)
        return sorted(found, key=lambda cell: (self.is_unreachable(cell), _weight(cell, session)))

    async def models(self, authorization: str) -> list[common_pb2.ModelDescription]:
        """What the cells that answer serve, in their order; each base model once.

        Raises:
            HttpError: none answers.
        """
        asked = [cell for cell in self._cells if not self.is_unreachable(cell)] or self._cells
        answers = await asyncio.gather(*(self._model(cell, authorization) for cell in asked))
        found = [one for one in answers if isinstance(one, common_pb2.ModelDescription)]
        if not found:
            raise next(one for one in answers if isinstance(one, HttpError))
        return list({one.name: one for one in reversed(found)}.values())[::-1]

    async def ready(self) -> None:
        """Returns when one of the cells can serve. Raises HttpError when none can."""
        found = list[HttpError]()
        for cell in sorted(self._cells, key=self.is_unreachable):
            try:
                return await cell.ready()
            except HttpError as problem:
                found.append(problem)
        raise found[0]

    def other_client(self, away: Cell, model: str) -> BatonClient | None:
        """Of a cell that can go on with a request of another one, which is away or refuses it.

        Args:
            away: where the request was.
            model: that it needs; empty: the base model there.
        """
        if away.client.address is None:
            away.outage.began(f"requests have lost their session with {away.name}")
            self._mark_unreachable(away)
        wanted = model or next(iter(self._served.get(away.name, ())), None)
        found = [
            cell
            for cell in self._cells
            if cell is not away
            and not self.is_unreachable(cell)
            and wanted in self._served.get(cell.name, ())
        ]
        return random.choice(found).client if found else None

    def failed(self, cell: Cell, error: RemoteError) -> None:
        """A request failed there, for that."""
        cell.outage.failed(error)
        if error.code == code_pb2.UNAVAILABLE:
            self._mark_unreachable(cell)

    async def _ask_all(self, authorization: str) -> tuple[dict[str, list[str]], HttpError | None]:
        """What the cells serve.

        A cell that is away is not asked: what it served before is what it will serve again.

        Returns:
            The models of the cells that are known and let the caller in, by cell and in order. And
            why others are not among them: that one cannot be reached, sooner than that the caller
            may not use it.
        """
        asked = [cell for cell in self._cells if not self.is_unreachable(cell)]
        answers = await asyncio.gather(*(self._model(cell, authorization) for cell in asked))
        refused = {
            cell.name: answer
            for cell, answer in zip(asked, answers, strict=True)
            if isinstance(answer, HttpError)
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
        """The cell is tried last until it serves again."""
        if len(self._cells) > 1 and not self.is_unreachable(cell):
            task = asyncio.create_task(self._await_return(cell), name=f"return of {cell.name}")
            self._return_tasks[cell.name] = task

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
    """It is away and has never said what it serves."""
    message = f"the coordinator at {cell.name} cannot be reached"
    return error_responses.from_remote_error(errors.make(code_pb2.UNAVAILABLE, message))


def _weight(cell: Cell, session: str) -> int:
    """Rendezvous hashing: the cell with the least one has the session."""
    return xxhash.xxh3_64_intdigest(f"{cell.name} {session}".encode())
