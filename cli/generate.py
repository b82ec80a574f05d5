"""`baton generate`: one request, streamed."""

from __future__ import annotations

import sys
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from baton.cli import connection, options

if TYPE_CHECKING:
    from baton.client import Event, Prompt, RequestOptions


class LaneChoice(StrEnum):
    INTERACTIVE = "interactive"
    BATCH = "batch"


def generate(
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="Text; - reads standard input.")
    ] = None,
    address: options.Address = None,
    chat: Annotated[bool, typer.Option("--chat", help="Send it as a user's chat turn.")] = False,
    tokens: Annotated[
        str | None,
        typer.Option("--tokens", metavar="1,2,3", help="Token ids in place of PROMPT."),
    ] = None,
    model: Annotated[str, typer.Option("--model", help="Empty: what is served.")] = "",
    lane: Annotated[
        LaneChoice, typer.Option("--lane", help="Interactive goes first, batch can wait.")
    ] = LaneChoice.INTERACTIVE,
    tenant: Annotated[
        str, typer.Option("--tenant", help="Who to account to; empty: the default.")
    ] = "",
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", help="Left out: what the context has room for.")
    ] = None,
    temperature: Annotated[float | None, typer.Option("--temperature", help="0 is greedy.")] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", help="Of the sampling: the same one, the same output.")
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option("--stop", help="End before this text; repeatable.")
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on until --max-tokens.")
    ] = False,
    timeout: Annotated[
        float | None,
        typer.Option(
            "--timeout", metavar="SECONDS", help="Of the whole request; then exit code 1."
        ),
    ] = None,
    request_id: Annotated[
        str,
        typer.Option("--request-id", help="For `baton explain`; left out: the coordinator's own."),
    ] = "",
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object per event and line.")
    ] = False,
    timeline: Annotated[
        bool, typer.Option("--timeline", help="Print where the time went, by stage.")
    ] = False,
) -> None:
    """Generate text and print it as it comes.

    Exit codes: 0 done, 1 failed, 2 wrong usage or request, 3 unavailable, 130 interrupted.
    """
    from baton.cli import interrupts

    wanted: RequestOptions = {
        "model": model,
        "lane": lane.value,
        "tenant": tenant,
        "timeout_s": timeout,
        "request_id": request_id,
    }
    # Left out when not given: the engine's own defaults hold.
    if max_tokens is not None:
        wanted["max_tokens"] = max_tokens
    if temperature is not None:
        wanted["temperature"] = temperature
    if seed is not None:
        wanted["seed"] = seed
    if stop:
        wanted["stop"] = stop
    if ignore_eos:
        wanted["ignore_eos"] = True
    interrupts.run(
        _stream(
            options.resolve_addresses(address),
            _prompt(prompt, tokens, chat),
            wanted,
            as_json=as_json,
            timeline=timeline,
        )
    )


def _prompt(text: str | None, tokens: str | None, chat: bool) -> Prompt:
    if (text is None) == (tokens is None):
        raise typer.BadParameter("give either PROMPT or --tokens", param_hint="PROMPT")
    if tokens is not None:
        if chat:
            raise typer.BadParameter("a chat turn is text", param_hint="--tokens")
        try:
            return [int(token) for token in tokens.split(",") if token.strip()]
        except ValueError:
            raise typer.BadParameter(
                f"{tokens!r} is not a list of numbers", param_hint="--tokens"
            ) from None
    if text == "-":
        if sys.stdin is None:
            raise typer.BadParameter("- reads standard input, which is closed", param_hint="PROMPT")
        try:
            text = sys.stdin.read()
        except UnicodeDecodeError as error:
            raise typer.BadParameter(
                f"standard input must be {error.encoding} text; it has a byte "
                f"{error.object[error.start]:#04x} that is none",
                param_hint="PROMPT",
            ) from None
    assert text is not None
    return [{"role": "user", "content": text}] if chat else text


async def _stream(
    addresses: list[str], prompt: Prompt, wanted: RequestOptions, *, as_json: bool, timeline: bool
) -> None:
    from baton.cli.timeline import print_timeline
    from baton.client import BatonClient, Finished, Tokens, errors

    to = connection.current()
    async with (
        BatonClient(addresses, tls=to.tls(), api_key=to.key()) as client,
        client.generate(prompt, **wanted) as stream,
    ):
        ends_line = True
        try:
            async for event in stream:
                if as_json:
                    _print_event(event)
                elif isinstance(event, Tokens) and event.text:
                    sys.stdout.write(event.text)
                    sys.stdout.flush()
                    ends_line = event.text.endswith("\n")
                elif isinstance(event, Finished) and timeline:
                    # The text's last line, then an empty one.
                    print("\n" if not ends_line else "")
                    ends_line = True
                    print_timeline(event.budget)
                if isinstance(event, Finished) and event.reason == "cancelled":
                    raise errors.cancelled_elsewhere()
        finally:
            if not ends_line:
                print(flush=True)
            if stream.num_resumes:
                times = "once" if stream.num_resumes == 1 else f"{stream.num_resumes} times"
                print(f"baton: lost the coordinator and resumed {times}", file=sys.stderr)


def _print_event(event: Event) -> None:
    from dataclasses import asdict

    from baton.cli.output import print_json_line

    fields: dict[str, Any] = {"event": type(event).__name__.lower(), **asdict(event)}
    print_json_line(fields)
