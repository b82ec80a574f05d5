"""The screen of `baton top` fits the terminal and shows numbers with their units."""

import dataclasses
import io
import re

import pytest
from rich.cells import cell_len
from rich.console import Console

from baton.cli import top_tables
from baton.cli.listings import _show_pools
from baton.cli.top_view import draw
from baton.client.doctor import diagnose
from baton.client.watcher import View
from baton.v1 import admin_pb2, common_pb2
from tests.coordinator.live_status import LiveCell

SIZES = [(80, 24), (100, 30), (120, 24), (200, 60)]


def busy(num_workers: int = 2) -> LiveCell:
    cell = LiveCell(lanes={"interactive": {"ttft_ms": 900}})
    cell.workers(num_prefill=1, num_decode=num_workers - 1)
    return cell.load(14, 2000, 20).load(1, 100, 40, lane=common_pb2.LANE_BATCH).after(8)


def view(cell: LiveCell, decisions=None) -> View:
    status = cell.status()
    return View("127.0.0.1:7070", status, tuple(diagnose(status)), decisions)


def decision(number: int, seconds_ago: int, status) -> admin_pb2.ScalingDecision:
    made = admin_pb2.ScalingDecision(
        role=common_pb2.ROLE_PREFILL,
        from_workers=number,
        to_workers=number + 1,
        reason="12.3 s of prompts are queued for 2 workers, and 0.5 s are wanted: " + "more " * 40,
    )
    made.at.FromSeconds(status.at.seconds - seconds_ago)
    return made


def lines(shown, width, height, problem="", age_s=0.0) -> list[str]:
    out = io.StringIO()
    console = Console(file=out, width=width, height=height or 200, color_system=None)
    console.print(
        draw(
            shown,
            addresses="127.0.0.1:7070",
            problem=problem,
            age_s=age_s,
            width=width,
            height=height,
        )
    )
    return out.getvalue().splitlines()


@pytest.fixture(scope="module")
def many():
    return view(busy(30))


@pytest.fixture(scope="module")
def few():
    return view(busy())


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_it_fits_and_fills_the_terminal(many, few, width, height):
    decisions = tuple(decision(number, 10 * number, many.status) for number in range(1, 9))
    for shown in (many, View(many.address, many.status, many.findings, decisions), few):
        found = lines(shown, width, height)
        assert len(found) == height
        assert max(map(cell_len, found)) <= width
        assert found[-1].startswith("q quit")
        text = "\n".join(found)
        for word in ("prefill", "decode", "interactive", "batch", "TTFT", "ITL", "P99", "TARGET"):
            assert word in text
        for word in ("500 ms", "50 ms", "p0", "LAST SCALE EVENTS", "admission"):
            assert word in text


def test_hits_count_every_tier(few):
    status = admin_pb2.GetStatusResponse()
    status.CopyFrom(few.status)
    status.prompt_tokens.CopyFrom(admin_pb2.PromptTokens(device=10, host=20, disk=30, computed=40))
    shown = dataclasses.replace(few, status=status)
    assert "hits 60% (host 20%, disk 30%)" in lines(shown, 120, 24)[0]


def test_numbers_are_whole_and_have_units(many):
    text = "\n".join(lines(many, 80, 24))
    ttft = next(line for line in text.splitlines() if " TTFT " in line)
    numbers = ttft.split(" TTFT ")[1].split()
    assert numbers[1::2] == ["ms", "ms", "ms", "ms", "%"]
    assert "and 25 more" in text


@pytest.mark.parametrize("width", [40, 50, 60])
def test_a_narrow_screen_leaves_out_columns_and_cuts_none(many, width):
    text = "\n".join(line for line in lines(many, width, 30)[2:] if "…" in line)
    assert text.count("…") <= 2, text  # The list of scale events and the count of workers.
    found = "\n".join(lines(many, width, 30))
    for word in ("SERVING", "TTFT", "P95", "ATTAINED", "STATE", "p0"):
        assert word in found
    assert re.search(r"TTFT .*\d ms .*\d %", found)


def test_wanted_sizes_are_the_same_as_in_baton_pools(few, capsys):
    status = admin_pb2.GetStatusResponse.FromString(few.status.SerializeToString())
    # One pool has a size set by hand, one is scaled to 0 by the autoscaler, one has no autoscaler.
    by_hand, empty, _ = (status.pools.add(role=common_pb2.ROLE_DECODE) for _ in range(3))
    by_hand.max_workers, by_hand.desired, by_hand.size_by_hand = 4, 2, 2
    empty.max_workers = 4
    del status.pools[:-3]
    _show_pools(admin_pb2.ListPoolsResponse(pools=status.pools))
    listed = capsys.readouterr().out
    drawn = "\n".join(lines(View(few.address, status, (), None), 200, 60))
    for text in (listed, drawn):
        wanted = re.findall(r"^decode +0 +0 +0 +(\S+|\d by hand) +0 +0 +-", text, re.MULTILINE)
        assert wanted == ["2 by hand", "0", "-"], text


def test_more_room_shows_more(many):
    narrow, wide = lines(many, 80, 24), lines(many, 200, 60)
    assert not any("TOK/S" in line for line in narrow)
    assert any("TOK/S" in line for line in wide)
    assert not any(" more" in line for line in wide)


def test_drawn_once_it_shows_every_worker(many):
    for width in (80, 150):
        found = lines(many, width, 0)
        assert sum(line.startswith(("p", "d")) and "serving" in line for line in found) == 30
        assert found[-1].startswith("q quit")


def test_scale_events_say_when_and_why(many):
    shown = View(many.address, many.status, (), (decision(2, 30, many.status),))
    line = next(one for one in lines(shown, 80, 24) if "→" in one)
    assert re.match(r" *3[01] s ago  prefill 2 → 3  12\.3 s of prompts", line)
    assert line.endswith("…")
    assert any("not autoscaled" in one for one in lines(many, 80, 24))


def red_servings(status) -> list[str]:
    """Cells of the column SERVING that `baton top` prints in red."""
    table = top_tables.pools(status, 200)
    column = next(one for one in table.columns if one.header == "SERVING")
    return [cell.plain for cell in column.cells if cell.style == top_tables.BAD]


def test_a_pool_without_workers_is_red_where_its_work_is_not_done():
    status = LiveCell().workers(num_prefill=0, num_decode=2).after(1).status()
    assert red_servings(status) == ["0"]
    # Any worker of an elastic cell does any work.
    status.elastic = True
    assert red_servings(status) == []
    for pool in status.pools:
        pool.num_serving = 0
    assert red_servings(status) == ["0", "0"]
    for pool in status.pools:
        # Both pools have scaled to zero until a request arrives.
        pool.sizes_itself, pool.desired = True, 0
    assert red_servings(status) == []


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_empty_and_disconnected(few, width, height):
    empty = lines(view(LiveCell()), width, height)
    assert any("no workers are attached" in one for one in empty)
    assert empty[1].startswith("no_workers (+1)  no prefill worker serves")
    connecting = lines(None, width, height)
    assert "connecting" in connecting[1]
    away = lines(None, width, height, problem="cannot reach the coordinator at 127.0.0.1:7070")
    assert away[1].startswith("disconnected  cannot reach")
    stale = lines(few, width, height, problem="cannot reach it", age_s=7.0)
    assert "disconnected" in stale[1]
    assert "7 s ago" in stale[1]
    for found in (empty, connecting, away, stale):
        assert len(found) == height
        assert max(map(cell_len, found)) <= width
