"""A start that is interrupted, as by Ctrl-C while the model loads, begins nothing more."""

import pytest

pytestmark = [pytest.mark.vllm]


def test_an_engine_that_is_stopped_while_it_is_configured_starts_no_process(run_program):
    """The worker's process could not end before the engine had loaded, and was killed for it."""
    done = run_program("interrupted_start_program.py")
    assert done.stdout.split() == ["0"], done.stderr
