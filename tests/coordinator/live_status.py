"""A simulated cell with an Admin service, under a virtual clock."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

from baton.coordinator.server.admin import AdminService
from baton.coordinator.state.config import CoreConfig
from baton.runtime.config import BatonConfig, parse
from baton.runtime.steps.latency import LatencyModel
from baton.v1 import admin_pb2, common_pb2
from tests.coordinator.virtual_cell import VirtualCell, WorkerShape

PREFILL, DECODE = common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE
# A prompt of 1,000 tokens takes 55 ms, a decode step of ten requests takes 10 ms.
MODEL = LatencyModel(
    prefill_base_s=0.005,
    prefill_per_token_s=0.00005,
    prefill_per_token_squared_s=0.0,
    step_base_s=0.008,
    step_per_request_s=0.0002,
    step_per_kv_token_s=0.0,
)


class LiveCell(VirtualCell):
    """A cell with strict roles and an Admin service; `sections` are configuration sections."""

    def __init__(self, **sections: object) -> None:
        self.config: BatonConfig = parse(
            {
                "served_model_name": "simulated",
                "elastic": False,
                "decode": {"local_prefill": False},
                **sections,
            },
            "test",
        )
        super().__init__(CoreConfig.of(self.config))
        shell = SimpleNamespace(
            core=self.core,
            now=lambda: self.now,
            started_at=0.0,
            client_stalls=lambda *request: [],
        )
        intake = SimpleNamespace(model=common_pb2.ModelDescription)
        self._admin = AdminService(shell, intake, self.config)

    def workers(self, num_prefill: int = 1, num_decode: int = 1, **shape: object) -> LiveCell:
        for number in range(num_prefill):
            self.add_worker(f"p{number}", PREFILL, WorkerShape(**{"model": MODEL, **shape}))
        for number in range(num_decode):
            self.add_worker(f"d{number}", DECODE, WorkerShape(**{"model": MODEL, **shape}))
        return self

    def load(
        self, rate: float, num_prompt: int, num_output: int, lasts_s: float = 15.0, **request
    ) -> LiveCell:
        """Sends requests at a constant rate for a duration."""
        self.poisson(
            rate,
            self.now,
            self.now + lasts_s,
            lambda: self.submit(num_prompt, num_output, **request),
        )
        return self

    def after(self, seconds: float) -> LiveCell:
        self.run(self.now + seconds)
        return self

    def status(self, *, include_history: bool = False) -> admin_pb2.GetStatusResponse:
        asked = admin_pb2.GetStatusRequest(include_history=include_history)
        return asyncio.run(self._admin.GetStatus(asked, None))

    def list_workers(self) -> list[admin_pb2.WorkerInfo]:
        return list(
            asyncio.run(self._admin.ListWorkers(admin_pb2.ListWorkersRequest(), None)).workers
        )

    def list_requests(self) -> list[admin_pb2.RequestInfo]:
        asked = admin_pb2.ListRequestsRequest(include_ended=True)
        return list(asyncio.run(self._admin.ListRequests(asked, None)).requests)

    def sample(self) -> None:
        self._admin.sample()

    def explain(self, request_id: str) -> admin_pb2.RequestInfo:
        asked = admin_pb2.GetRequestRequest(request_id=request_id)
        return asyncio.run(self._admin.GetRequest(asked, None))
