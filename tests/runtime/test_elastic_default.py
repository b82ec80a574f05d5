"""When workers have strict roles, and when any worker computes prompts and decodes."""

import pytest

from baton.runtime.config import parse


@pytest.mark.parametrize(
    ("values", "is_elastic"),
    [
        ({}, True),
        ({"engine_args": {"max_num_seqs": 8}}, True),
        # Explicit values that say the same.
        (
            {
                "prefill": {"engine_args": {"max_num_seqs": 8}},
                "decode": {"engine_args": {"max_num_seqs": 8}},
            },
            True,
        ),
        ({"prefill": {"engine_args": {"max_num_seqs": None}}}, True),
        ({"decode": {"engine_args": {"max_num_seqs": 8}}}, False),
        ({"decode": {"local_prefill": False}}, False),
        ({"steps": {"scheduler": "vllm"}}, False),
        # Each step would hold a whole prompt.
        ({"engine_args": {"enable_chunked_prefill": False}}, False),
        ({"engine_args": {"enable_chunked_prefill": True}}, True),
        ({"elastic": False}, False),
        ({"elastic": True, "decode": {"engine_args": {"max_num_seqs": 8}}}, True),
    ],
)
def test_a_cell_is_elastic_where_both_pools_have_the_same_engines(values, is_elastic):
    assert parse(values, "test").is_elastic is is_elastic
