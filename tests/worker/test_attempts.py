"""An attempt on one worker, as its engine gets it."""

import math
from time import monotonic

from baton.v1 import cluster_pb2, common_pb2
from baton.worker.attempts import Attempt


def attempt(**spec: object) -> Attempt:
    made = cluster_pb2.RequestSpec(request_id="r", prompt_token_ids=[1, 2], **spec)
    return Attempt(made, common_pb2.ROLE_PREFILL, None)


def test_time_that_an_attempt_has_waited_on_the_worker_counts_for_its_ttft_target():
    waited = attempt(first_token_due_us=2_000_000)
    waited.arrived_at = monotonic() - 5.0
    assert waited.engine_request().due_in_s <= -3.0


def test_an_attempt_without_a_ttft_target_is_never_due():
    assert math.isinf(attempt().engine_request().due_in_s)
