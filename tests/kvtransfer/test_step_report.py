"""The connector's report on a step, as vLLM carries it to Baton's engine."""

from __future__ import annotations

import msgspec

from baton.kvtransfer.block_changes import CacheChange
from baton.kvtransfer.connector.step_report import Dropped, HostLoad, StepReport, TierLoad
from baton.kvtransfer.connector.step_work import StepWork

FULL = StepReport(
    work=StepWork(12.5, 2048, 2048**2, 7, 9000),
    cache=CacheChange([1, 2], [3], cleared=True),
    host_cache=CacheChange([], [2**64 - 1]),
    disk_cache=CacheChange([4], []),
    num_wrong_files=2,
    disk_failed=True,
    host_loads={"a#1": HostLoad(96, 32)},
    tier_loads={"host": TierLoad(4096, 0.25), "disk": TierLoad(2048, 1.5)},
    dropped={7: Dropped(1, 2, 3, has_files_left=True)},
    gone={"a#1": 0, "b#2": 48},
    is_cut_off=True,
)


def carried(report: StepReport) -> StepReport:
    """The report after the way through msgpack, in which vLLM sends its statistics."""
    return StepReport.decode(msgspec.msgpack.decode(msgspec.msgpack.encode(report.encode())))


def test_every_field_arrives():
    names = FULL.__dataclass_fields__
    assert all(getattr(FULL, name) != getattr(StepReport(), name) for name in names)
    assert carried(FULL) == FULL


def test_a_report_that_says_nothing_is_empty():
    assert StepReport().encode() == {}
    assert carried(StepReport()) == StepReport()


def test_fields_that_say_nothing_are_not_sent():
    work = StepReport(work=StepWork(0.0, 0, 0, 0, 0))
    assert list(work.encode()) == ["work"]
    assert carried(work) == work
