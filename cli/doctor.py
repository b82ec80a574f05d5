"""`baton doctor`: finds what is slow now, in which stage, with evidence and a first remedy."""

from __future__ import annotations

from dataclasses import asdict

import typer

from baton.cli import options


def doctor(address: options.Address = None, as_json: options.Json = False) -> None:
    """Find out what is slow now, and what to change first.

    Each finding names the slow stage and the evidence.

    Exit codes: 0 healthy, 1 there are findings.
    """
    from baton.cli.admin_calls import call_admin
    from baton.cli.output import print_json
    from baton.client.doctor import diagnose, summary

    status = call_admin(address, lambda admin: admin.get_status())
    findings = diagnose(status)
    if as_json:
        told = "" if findings else summary(status)
        print_json(
            {
                "healthy": not findings,
                "summary": told,
                "window_s": status.window.ToNanoseconds() / 1e9,
                "findings": [asdict(one) for one in findings],
            }
        )
    elif not findings:
        print(summary(status))
    else:
        for number, one in enumerate(findings, start=1):
            print(f"{number}. {one.what} [{one.kind}]")
            print(f"   stage: {one.stage}")
            for line in one.evidence:
                print(f"   - {line}")
            print(f"   first: {one.first}")
    raise typer.Exit(1 if findings else 0)
