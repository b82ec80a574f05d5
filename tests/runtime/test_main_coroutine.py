"""Ctrl-C around the first step of a main coroutine."""

from __future__ import annotations

import asyncio
import gc
import signal
import warnings

import pytest
import uvloop

from baton.runtime.process import lifecycle, main_coroutine, quick_start


async def _answer() -> int:
    await asyncio.sleep(0)
    return 42


def _interrupted_before_the_loop():
    signal.raise_signal(signal.SIGINT)


class _InterruptedBeforeTheFirstStep(uvloop.Loop):
    interrupted = False

    def run_until_complete(self, future):
        if not self.interrupted:
            self.interrupted = True
            signal.raise_signal(signal.SIGINT)
        return super().run_until_complete(future)


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_main_coroutine_returns_its_result(new_loop):
    assert main_coroutine.run(_answer(), new_loop) == 42


@pytest.mark.parametrize("new_loop", [_interrupted_before_the_loop, _InterruptedBeforeTheFirstStep])
def test_ctrl_c_before_the_first_step_prints_no_warning(new_loop):
    assert _warnings_of_interrupted(lambda: main_coroutine.run(_answer(), new_loop)) == []


def test_ctrl_c_before_the_loop_of_a_process_prints_no_warning(monkeypatch):
    monkeypatch.setattr(quick_start, "collect_as_usual", _interrupted_before_the_loop)
    assert _warnings_of_interrupted(lambda: lifecycle.run(_answer())) == []


def _warnings_of_interrupted(call):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(KeyboardInterrupt):
            call()
        gc.collect()
    return [str(one.message) for one in caught]
