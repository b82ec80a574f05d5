"""Goals, figures and tables of bench/soak.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from baton.bench.soak_handoffs import MIB, TRANSPORTS, Fault, Outcome
from baton.load import stats
from baton.load.stats import Goal

if TYPE_CHECKING:
    from baton.bench.soak import Soak


def goals_of(soak: Soak, growth_mib: float) -> list[Goal]:
    """Returns the goals of a finished soak with their measured values.

    Args:
        soak: A soak that has run.
        growth_mib: How much a service's memory may grow, in MiB.
    """
    grown = [growth for each in soak.everyone if (growth := each.growth_bytes()) is not None]
    offered = {name for names in TRANSPORTS for name in names}
    goals = [
        Goal("wrong digests", soak.count(Outcome.WRONG), 0),
        Goal("handoffs that hung", soak.count(Outcome.HUNG), 0),
        Goal("handoffs that failed without a cause", soak.count(Outcome.UNDUE), 0),
        Goal("things left behind", len(soak.left), 0),
        Goal("transports that moved nothing", len(offered - set(soak.committed_by)), 0),
    ]
    if grown:
        worst_mib = stats.worst(grown) / MIB
        goals.append(Goal("largest growth after warm-up", worst_mib, growth_mib, " MiB"))
    return goals


def figures(soak: Soak, wall_s: float, goals: Sequence[Goal]) -> dict[str, Any]:
    """Returns all measurements for JSON."""
    return {
        "num_handoffs": soak.outcomes.total(),
        "wall_s": wall_s,
        "num_bytes_loaded": soak.num_bytes_loaded,
        "outcomes": {
            fault.value: {
                outcome.value: soak.outcomes[fault, outcome]
                for outcome in Outcome
                if soak.outcomes[fault, outcome]
            }
            for fault in Fault
        },
        "committed_by": dict(soak.committed_by),
        "num_fallbacks": soak.num_fallbacks,
        "num_killed": sum(each.killed for each in soak.everyone),
        "workers": [
            {
                "place": each.place,
                "transports": TRANSPORTS[each.place],
                "killed": each.killed,
                "private_bytes": each.private_bytes,
                "num_files": each.num_files,
                "growth_bytes": each.growth_bytes(),
            }
            for each in soak.everyone
        ],
        "undue": soak.undue,
        "left": soak.left,
        "reaches": [asdict(one) | {"reached": one.reached} for one in goals],
    }


def show(results: dict[str, Any]) -> None:
    """Prints the tables of `figures`."""
    seen = [each for each in Outcome if any(each.value in n for n in results["outcomes"].values())]
    rows = [
        [fault, *(str(counts.get(outcome.value, "")) for outcome in seen)]
        for fault, counts in results["outcomes"].items()
    ]
    moved = ", ".join(f"{name or '?'} {n}" for name, n in results["committed_by"].items())
    title = (
        f"{results['num_handoffs']} handoffs in {results['wall_s']:.0f} s, "
        f"{results['num_killed']} workers killed; committed by {moved}; "
        f"{results['num_fallbacks']} fallbacks"
    )
    stats.print_table(title, ["fault", *(each.value for each in seen)], rows)
    rows = []
    for each in results["workers"]:
        if not each["private_bytes"]:
            continue
        memory = [each["private_bytes"][0], max(each["private_bytes"]), each["private_bytes"][-1]]
        growth = each["growth_bytes"]
        rows.append(
            [
                f"{each['place']}: {', '.join(each['transports'])}",
                "yes" if each["killed"] else "",
                *(f"{num_bytes / MIB:.1f}" for num_bytes in memory),
                "" if growth is None else f"{growth / MIB:.2f}",
                f"{each['num_files'][0]} to {each['num_files'][-1]}",
            ]
        )
    header = ["worker", "killed", "first MiB", "most", "last", "growth", "open files"]
    stats.print_table("Private resident memory of the services", header, rows)
    for line in [*results["undue"][:10], *results["left"][:10]]:
        print(line)
