"""Traces of Azure, Mooncake and plain JSON are read, checked, scaled and thinned."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from baton.load import traces
from baton.load.traces import Arrival

DATA = Path(__file__).parents[1] / "data"


def test_azure_is_read():
    found = traces.read(DATA / "azure" / "conv_first3000.csv")
    assert len(found) == 3000
    assert found[0] == Arrival(0.0, 374, 44)
    assert found[1].at_s == pytest.approx(4.314579)


@pytest.mark.parametrize("zone", ["UTC", "America/New_York"])
def test_azure_times_are_utc_in_any_time_zone(tmp_path, monkeypatch, zone):
    """The trace of 2024 writes the zone, the trace of 2023 does not.

    In New York, clocks went back one hour on 3 November 2024 at 06:00 UTC.
    """
    path = tmp_path / "trace.csv"
    rows = [
        "2024-11-03 04:59:59.500000+00:00",
        "2024-11-03 05:00:00+00:00",
        "2024-11-03 05:00:02.5+00:00",
        "2024-11-03 06:00:00.5000009",
    ]
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens", *(f"{row},7,2" for row in rows)]
    path.write_text("\n".join(lines))
    with monkeypatch.context() as patched:
        patched.setenv("TZ", zone)
        time.tzset()
        found = traces.read(path)
    time.tzset()
    assert [one.at_s for one in found] == [0.0, 0.5, 3.0, 3601.0]


def test_mooncake_is_read_with_shared_prefixes(tmp_path):
    path = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 0, "input_length": 700, "output_length": 5, "hash_ids": [0, 1]},
        {"timestamp": 0, "input_length": 600, "output_length": 6, "hash_ids": [0, 2]},
        {"timestamp": 3000, "input_length": 512, "output_length": 7, "hash_ids": [0]},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    found = traces.read(path)
    assert [one.at_s for one in found] == [0.0, 1.5, 3.0]
    first, second = found[0].prompt(1), found[1].prompt(2)
    assert (len(first), len(second)) == (700, 600)
    assert first[:512] == second[:512]
    assert first[512] != second[512]


def test_plain_json_is_read(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text('[{"start_time": 3.5, "prompt_len": 7, "output_len": 2}]')
    assert traces.read(path) == [Arrival(0.0, 7, 2)]


def test_lengths_may_be_floats_of_whole_numbers(tmp_path):
    """pandas writes so the whole numbers of a column that has empty cells."""
    path = tmp_path / "trace"
    for text in (
        '[{"start_time": 0, "prompt_len": 7.0, "output_len": 2e0}]',
        '{"timestamp": 0, "input_length": 7.0, "output_length": 2.0}',
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-01-01 00:00:00,7.0,2.0\n",
        "timestamp_ms,input_tokens,output_tokens,block_ids\n0,7.0,2.0,\n",
    ):
        path.write_text(text)
        assert traces.read(path) == [Arrival(0.0, 7, 2)]


AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-01-01 00:00:00,7,2\n\n"
MOONCAKE = '{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids":'
COMPACT = "timestamp_ms,input_tokens,output_tokens,block_ids\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a,b\n1,2\n", "TIMESTAMP, ContextTokens, GeneratedTokens"),
        ('[{"start_time": 0, "prompt_len": 0, "output_len": 2}]', "its prompt has 0 tokens"),
        ('[{"start_time": 0, "prompt_len": 1, "output_len": 1e12}]', "must be a whole number"),
        ('[{"start_time": 0, "prompt_len": 10.9, "output_len": 2}]', "its prompt has 10.9 tokens"),
        ('[{"start_time": 0, "prompt_len": 1, "output_len": true}]', "its output has True tokens"),
        ('[{"start_time": 0, "prompt_len": [7], "output_len": 2}]', r"its prompt has \[7\] tokens"),
        (f'[{{"start_time": 0, "prompt_len": 1{"0" * 400}}}]', "its prompt has 1000"),
        ('[{"start_time": "x", "prompt_len": 1, "output_len": 2}]', "start_time is 'x'"),
        ("[]", "has no request"),
        ("{nonsense", "not JSON"),
        ("[" * 100_000, "not JSON"),
        (f'[{{"start_time": 1{"0" * 400}}}]', "start_time is 1000"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2024-01-01 00:00:00,7\n", "its output has ''"),
        ("ContextTokens,GeneratedTokens,TIMESTAMP\n7,7\n", "TIMESTAMP is ''"),
        # Places are lines of the file, empty ones included.
        (f"{AZURE}2024-01-01 00:00:00,0,2\n", r"trace:4: its prompt has '0' tokens"),
        (f"{AZURE}2024-01-01 00:00:00,7,2.5\n", r"trace:4: its output has '2.5' tokens"),
        (f"{AZURE}2024-01-01 00:00:00,nan,2\n", r"trace:4: its prompt has 'nan' tokens"),
        (f"{AZURE}soon,7,2\n", r"trace:4: TIMESTAMP is 'soon'"),
        (f"{MOONCAKE} []}}\n\n{{nonsense", r"trace:3: not JSON"),
        ('{"timestamp": NaN, "input_length": 1, "output_length": 1}', "timestamp is nan"),
        ('{"timestamp": 0, "input_length": 1e999, "output_length": 1}', "its prompt has inf"),
        (f"{MOONCAKE} [7.5]}}", r"hash_ids is \[7.5\]"),
        (f"{MOONCAKE} [{2**64}]}}", "hash_ids is .* from 0 to 2147483647"),
        ("timestamp_ms,block_ids\n0,0\n", "timestamp_ms, input_tokens, output_tokens, block_ids"),
        (f"{COMPACT}soon,1,1,0\n", "timestamp_ms is 'soon'"),
        (f"{COMPACT}0,1,1,a-b\n", "block_ids are 'a-b'"),
        (f"{COMPACT}0,{'9' * 200_000},1,0\n", "not a CSV"),
        (f"{COMPACT}0,1,1,0-2147483647\n", "request 1: block_ids have 0-2147483647; .* at most"),
        (f"{COMPACT}" + "0,1,1,0-999999\n" * 9, "request 9: block_ids have 0-999999; .* at most"),
        (f"{COMPACT}0,1,1,7-3\n", "block_ids have 7-3; must be the lower ID first"),
    ],
)
def test_a_wrong_trace_is_refused_with_the_place_and_the_value(tmp_path, text, said):
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(traces.TraceError, match=said):
        traces.read(path)


def test_a_byte_order_mark_is_skipped(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("\ufeffTIMESTAMP,ContextTokens,GeneratedTokens\n2024-01-01 00:00:00,7,2\n")
    assert traces.read(path) == [Arrival(0.0, 7, 2)]


def test_a_scaled_trace_has_factor_times_as_many_requests():
    arrivals = [Arrival(number / 10, 400, 100) for number in range(1000)]
    found = traces.scaled(arrivals, 2.5)
    assert len(found) == pytest.approx(2500, rel=0.05)
    assert found == sorted(found, key=lambda one: one.at_s)
    tide = traces.tidal(arrivals, 100, 0.2)
    low = sum(one.at_s < 20 or one.at_s > 80 for one in tide)
    assert low < 0.5 * sum(30 < one.at_s < 70 for one in tide)


@pytest.mark.parametrize(
    ("factor", "said"), [(1e-9, "which leaves none of 1 requests"), (1e4, "at most")]
)
def test_a_too_small_or_too_large_factor_is_refused(factor, said):
    arrivals = [Arrival(0.0, 600, 5, (1, 2**22 + 1))]
    with pytest.raises(ValueError, match=f"--factor is .*{said}"):
        traces.scaled(arrivals, factor)


def test_copies_share_prefixes_only_with_copies_of_the_same_number():
    arrivals = [Arrival(0.0, 1024, 5, (0, number)) for number in (1, 1 + 2**22, 2**29)]
    found = traces.scaled(arrivals, 2.0)
    assert len({one.block_ids for one in found}) == 6
    assert {one.block_ids[0] for one in found} == {0}
