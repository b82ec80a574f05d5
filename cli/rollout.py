"""`baton rollout`: tries another model or other engine arguments on a share of the traffic."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Annotated

import typer

from baton.cli import options
from baton.cli.admin_calls import call_admin, print_answer, print_progress
from baton.cli.engine_args import parse_engine_args
from baton.cli.output import plain, print_json, print_json_line, print_table, print_text
from baton.cli.pool_sizes import Wait
from baton.cli.watch import follow_changes, wait_until
from baton.client import AdminClient
from baton.runtime.enum_names import lane_name
from baton.runtime.errors import Aborted, FailedPrecondition
from baton.v1 import admin_pb2

app = typer.Typer(
    help="Try a model or engine arguments on a share of the traffic.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
Drain = Annotated[
    float | None,
    typer.Option(
        "--drain-timeout",
        min=0.001,
        metavar="SECONDS",
        help="Running requests of the removed revision fail after this time.",
    ),
]


def _share(text: str) -> float:
    """A share as 5% or 0.05."""
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise typer.BadParameter(f"{text!r} is not a share; must be 0% to 100%, or 0 to 1")
    return share


Share = Annotated[
    float,
    typer.Option(
        "--share",
        parser=_share,
        metavar="SHARE",
        help="Share of new sessions for the canary, such as 5%.",
    ),
]


@app.command()
def start(
    revision: Annotated[
        str, typer.Option("--revision", metavar="NAME", help="New name for the canary revision.")
    ],
    share: Share,
    model: Annotated[
        str,
        typer.Option(
            "--model",
            help="Directory or Hugging Face model ID; left out: the model of the stable revision.",
        ),
    ] = "",
    engine_arg: options.EngineArgs = None,
    prefill: Annotated[
        int | None,
        typer.Option(
            "--prefill",
            min=0,
            max=options.MOST,
            help="Number of prefill workers, including attached ones; by default, the attached "
            "ones, or 1.",
        ),
    ] = None,
    decode: Annotated[
        int | None,
        typer.Option(
            "--decode",
            min=0,
            max=options.MOST,
            help="Number of decode workers, including attached ones; by default, the attached "
            "ones, or 1.",
        ),
    ] = None,
    abort_if_worse: Annotated[
        bool,
        typer.Option(
            "--abort-if-worse",
            help="Abort the rollout if errors, TTFT or ITL are significantly worse.",
        ),
    ] = False,
    wait: Wait = 0.0,
    address: options.Address = None,
    as_json: options.Json = False,
) -> None:
    """Start a canary revision on a share of the new sessions.

    The command starts workers of the revision. Workers of the revision that are already attached
    are used too.
    """
    engine_args = parse_engine_args(engine_arg or [])

    async def question(admin: AdminClient) -> str:
        if wait:
            await _current_rollout(admin)
        message = await admin.start_rollout(
            revision,
            share=share,
            model=model,
            engine_args=engine_args,
            num_prefill=prefill,
            num_decode=decode,
            abort_if_worse=abort_if_worse,
        )
        if wait:
            print_progress(message, as_json=as_json)
            what = f"revision {revision} does not serve"
            await wait_until(
                admin,
                lambda event: _canary_serves(_rollout_in(event), revision),
                wait,
                what,
                lambda event: event.rollout.problem,
            )
            message = f"revision {revision} serves"
        return message

    print_answer(call_admin(address, question), as_json=as_json)


@app.command()
def share(
    share: Annotated[
        float,
        typer.Argument(
            parser=_share,
            metavar="SHARE",
            help="Share of new sessions for the canary, such as 25%.",
        ),
    ],
    address: options.Address = None,
    as_json: options.Json = False,
) -> None:
    """Change the canary's share of the new sessions.

    When the share grows, sessions that are already on the canary stay there.
    """
    print_answer(call_admin(address, lambda admin: admin.set_rollout_share(share)), as_json=as_json)


@app.command()
def status(
    watch: options.Watch = False,
    address: options.Address = None,
    as_json: options.Json = False,
) -> None:
    """Show both revisions, and whether the canary is worse."""
    if watch and as_json:
        return follow_changes(
            address, True, lambda event: print_json_line(plain(_rollout_in(event)))
        )
    if watch:
        return follow_changes(address, False, lambda event: _show(_rollout_in(event)))
    found = call_admin(address, lambda admin: admin.get_rollout())
    return print_json(plain(found)) if as_json else _show(found)


@app.command()
def promote(
    drain_timeout: Drain = None,
    wait: Wait = 0.0,
    address: options.Address = None,
    as_json: options.Json = False,
) -> None:
    """Make the canary the stable revision.

    The coordinator adds canary workers and then drains the other workers.
    """

    async def question(admin: AdminClient) -> str:
        canary = (await _current_rollout(admin)).canary.name if wait else ""
        message = await admin.promote_rollout(drain_timeout)
        if wait:
            print_progress(message, as_json=as_json)
            what = "the canary is not the stable revision"
            await wait_until(
                admin,
                lambda event: _is_promoted(_rollout_in(event), canary),
                wait,
                what,
                lambda event: event.rollout.problem,
            )
            message = f"revision {canary} is the stable one"
        return message

    print_answer(call_admin(address, question), as_json=as_json)


@app.command()
def abort(
    drain_timeout: Drain = None,
    address: options.Address = None,
    as_json: options.Json = False,
) -> None:
    """End the rollout and drain the canary's workers."""
    print_answer(
        call_admin(address, lambda admin: admin.abort_rollout(drain_timeout)), as_json=as_json
    )


async def _current_rollout(admin: AdminClient) -> admin_pb2.RolloutStatus:
    """Reads the state of the rollout from the coordinator's event stream; see `_rollout_in`."""
    async with contextlib.aclosing(admin.watch()) as events:
        return _rollout_in(await anext(events))


def _rollout_in(event: admin_pb2.WatchEvent) -> admin_pb2.RolloutStatus:
    """Returns the state of the rollout in an event.

    Raises:
        FailedPrecondition: The coordinator is too old to send the state of rollouts.
    """
    if not event.HasField("rollout"):
        raise FailedPrecondition(
            "this coordinator is older than this command and does not report rollouts: "
            "leave out --wait and --watch, and use `baton rollout status`"
        )
    return event.rollout


def _canary_serves(found: admin_pb2.RolloutStatus, revision: str) -> bool:
    """Whether the canary serves; raises Aborted if the rollout has ended."""
    # Between two events this rollout may have ended and another one may have begun.
    if _is_over(found, revision) and found.stable_revision != revision:
        raise Aborted(f"the rollout of {revision!r} has ended: {found.last or 'no rollout'}")
    return found.phase != admin_pb2.ROLLOUT_PHASE_WAITING


def _is_over(found: admin_pb2.RolloutStatus, revision: str) -> bool:
    """Whether the rollout of this revision has ended."""
    return not found.phase or found.canary.name != revision


def _is_promoted(found: admin_pb2.RolloutStatus, canary: str) -> bool:
    """Whether the canary is the stable revision now.

    Raises:
        Aborted: The rollout has ended without a promotion.
    """
    if not _is_over(found, canary):
        return False
    if found.stable_revision != canary:
        raise Aborted(f"the rollout of {canary!r} was not promoted: {found.last or 'no rollout'}")
    return True


def _show(found: admin_pb2.RolloutStatus) -> None:

    if not found.HasField("canary"):
        print(f"no rollout; the stable revision is {found.stable_revision}")
    else:
        phase = _phase(found)
        print_text(
            f"rollout of {found.canary.name}: {phase}, {100 * found.share:.3g} % of new sessions"
            + (", aborts automatically if the canary is worse" if found.abort_if_worse else "")
            if phase
            else f"no rollout runs: {found.last}; the stable revision is {found.stable_revision}"
        )
        for line in _changes(found.canary):
            print(f"  {line}")
    if found.problem:
        print_text(f"workers cannot be started: {found.problem}")
    print()
    compared = [found.stable, *([found.canary] if found.HasField("canary") else [])]
    sides = [(_is(one.name, found), one) for one in compared]
    sides += [("no new requests", one) for one in found.others]
    print_table(
        (
            "REVISION",
            "STATUS",
            "PREFILL",
            "DECODE",
            ">RUNNING",
            ">ADMITTED",
            ">ENDED",
            ">FAILED",
            ">RECOVERED",
            ">MOVED",
        ),
        [
            (
                one.name,
                what,
                *(_workers(pool) for pool in one.pools),
                str(one.num_running),
                str(one.num_admitted),
                str(one.num_ended),
                _errors(one),
                str(one.num_recoveries),
                str(one.num_moved),
            )
            for what, one in sides
        ],
        "no revisions",
        ("ADMITTED", "RECOVERED", "ENDED", "RUNNING", "MOVED"),
    )
    rows = [row for _, one in sides for row in _latencies(one)]
    if rows:
        print()
        print_table(
            (
                "REVISION",
                "LANE",
                ">REQUESTS",
                ">TTFT P50",
                ">P95",
                ">P99",
                ">GAPS",
                ">ITL P50",
                ">P95",
                ">P99",
            ),
            rows,
            "no requests",
            ("GAPS", "P99", "REQUESTS"),
        )
    if found.verdict_reason:
        since = f" (since {found.compared_for.ToSeconds()} s)" if _phase(found) else ""
        print()
        print_text(f"{found.verdict_reason}{since}")


def _is(name: str, found: admin_pb2.RolloutStatus) -> str:
    """Status of one of the two compared revisions."""
    if name == found.stable_revision:
        return "stable"
    return "canary" if found.phase else "no new requests"


def _phase(found: admin_pb2.RolloutStatus) -> str:
    """Phase of the rollout in words; empty if no rollout runs."""
    return {
        admin_pb2.ROLLOUT_PHASE_WAITING: "waiting for its workers, no traffic yet",
        admin_pb2.ROLLOUT_PHASE_RUNNING: "running",
        admin_pb2.ROLLOUT_PHASE_PROMOTING: "being promoted, waiting for its workers",
    }.get(found.phase, "")


def _changes(revision: admin_pb2.RevisionStatus) -> Iterator[str]:
    if revision.model:
        yield f"model: {revision.model}"
    for name in sorted(revision.engine_args):
        yield f"engine_args.{name}: {revision.engine_args[name]}"


def _workers(pool: admin_pb2.RevisionPool) -> str:
    found = [f"{pool.num_serving} serving"]
    found += [f"{pool.num_starting} starting"] if pool.num_starting else []
    found += [f"{pool.num_draining} draining"] if pool.num_draining else []
    return ", ".join(found)


def _errors(revision: admin_pb2.RevisionStatus) -> str:
    number = sum(revision.errors.values())
    if not number or not revision.num_ended:
        return str(number)
    return f"{number} ({number / revision.num_ended:.2%})"


def _latencies(revision: admin_pb2.RevisionStatus) -> Iterator[tuple[str, ...]]:

    for lane in revision.lanes:
        if not lane.ttft.num:
            continue
        yield (
            revision.name,
            lane_name(lane.lane),
            str(lane.ttft.num),
            *(_ms(us) for us in (lane.ttft.p50_us, lane.ttft.p95_us, lane.ttft.p99_us)),
            str(lane.itl.num),
            *(_ms(us) for us in (lane.itl.p50_us, lane.itl.p95_us, lane.itl.p99_us)),
        )


def _ms(us: int) -> str:
    return f"{us / 1e3:.3g} ms"
