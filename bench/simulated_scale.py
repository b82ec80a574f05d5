"""Measures the simulator with a large cell: 200 workers and 500,000 requests in one hour.

`python -m baton.bench.simulated_scale`. The Azure conversation trace is repeated and scaled up, and
the workers are slow enough to need this many. The production core makes all decisions. Workers send
load reports every two seconds.
"""

from __future__ import annotations

import argparse
import gc
import resource
import time
from dataclasses import replace
from pathlib import Path

from baton.coordinator.state.config import CoreConfig
from baton.coordinator.state.pools import Pool
from baton.coordinator.state.scaling_config import PoolLimits, ScalingConfig, Targets
from baton.load import stats, traces
from baton.load.stats import Goal
from baton.runtime.config import parse
from baton.runtime.steps.latency import LatencyModel
from baton.simulator.cell import SimulatedCell
from baton.simulator.parts import Shape
from baton.simulator.policies import Baton
from baton.simulator.report import figures

TRACE = Path("tests/data/azure/conv_first3000.csv")
MODEL = LatencyModel(0.02, 0.0004, 0.0, 0.04, 0.0005, 5e-7)
HEARTBEAT_S = 2.0
MAX_MINUTES, MAX_GB = 10.0, 4.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=500_000)
    parser.add_argument("--minutes", type=float, default=60.0, help="simulated time")
    parser.add_argument("--prefill", type=int, default=90, help="workers at the beginning")
    parser.add_argument("--decode", type=int, default=110, help="workers at the beginning")
    arguments = parser.parse_args()
    began = time.monotonic()
    lasts_s = arguments.minutes * 60
    once = traces.repeated(traces.read(TRACE), lasts_s)
    arrivals = traces.scaled(once, arguments.requests / len(once))
    arrivals = [one for one in arrivals if one.at_s < lasts_s]
    # The arrivals live as long as the process, so the garbage collector need not scan them again.
    gc.freeze()
    limits = PoolLimits(1, 200)
    config = ScalingConfig(
        targets=(("interactive", Targets(2.0, 0.1)),),
        prefill=limits,
        decode=limits,
        max_gpus=arguments.prefill + arguments.decode,
    )
    free = {"max_queued": 10**6, "max_queue_s": 600}
    values = {
        "model": "simulated",
        "coordinator": {
            "max_running_requests": 10**6,
            "heartbeat_s": HEARTBEAT_S,
            "worker_silent_s": 3 * HEARTBEAT_S,
        },
        "decode": {"local_prefill": False},
        "lanes": {"interactive": free},
    }
    core = replace(CoreConfig.of(parse(values, "bench")), latency=MODEL)
    shape = Shape(
        MODEL,
        kv_tokens=120_000,
        max_num_batched_tokens=4096,
        follows_step_targets=True,
        flush_s=5.0,
    )
    cell = SimulatedCell(core, dict.fromkeys(Pool, shape), Baton(config), heartbeat_s=HEARTBEAT_S)
    sizes = {Pool.PREFILL: arguments.prefill, Pool.DECODE: arguments.decode}
    record = cell.run(arrivals, sizes, lasts_s)
    cell.core.check_integrity()
    found = figures(record, cell.gaps, dict(config.targets)["interactive"])
    minutes = (time.monotonic() - began) / 60
    # ru_maxrss is in KiB on Linux.
    gigabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    rows = [
        ["requests", f"{found.num_requests:,}"],
        ["failed", f"{found.num_failed:,}"],
        ["within the targets", f"{found.attained:.2%}"],
        ["GPU-hours", f"{found.gpu_hours:.1f}"],
        ["workers, on average", f"{found.gpu_hours * 3600 / found.lasted_s:.1f}"],
        ["TTFT p50, p95", f"{found.ttft_ms[50]:.0f}, {found.ttft_ms[95]:.0f} ms"],
        ["TPOT p50, p95", f"{found.tpot_ms[50]:.1f}, {found.tpot_ms[95]:.1f} ms"],
        ["tokens", f"{cell.gaps.total:,}"],
    ]
    stats.print_table("Simulated scale", ["what", "seen"], rows)
    stats.print_goals(
        [
            Goal("time", minutes, MAX_MINUTES, " min"),
            Goal("memory", gigabytes, MAX_GB, " GB"),
        ]
    )


if __name__ == "__main__":
    main()
