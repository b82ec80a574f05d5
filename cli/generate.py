"""`baton generate`: sends one request and streams its output."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Annotated, Any

import typer

from baton.cli import credentials, interrupts, options
from baton.cli.output import print_json_line
from baton.cli.timeline import print_timeline
from baton.client import BatonClient, Event, Finished, Prompt, RequestOptions, Tokens, errors


def generate(
    prompt: Annotated[
        str | None,
        typer.Argument(metavar="PROMPT", help="Text of the prompt; - reads standard input."),
    ] = None,
    address: options.Address = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Send the prompt as the user's message of a chat.")
    ] = False,
    tokens: Annotated[
        str | None,
        typer.Option("--tokens", metavar="1,2,3", help="Token IDs instead of PROMPT."),
    ] = None,
    model: Annotated[
        str,
        typer.Option(
            "--model", help="Name of the model; empty: the model that the coordinator serves."
        ),
    ] = "",
    lane: Annotated[
        options.LaneName,
        typer.Option("--lane", help="Lane of the request: interactive goes first, batch can wait."),
    ] = options.LaneName.INTERACTIVE,
    tenant: Annotated[
        str, typer.Option("--tenant", help="Tenant of the request; empty: the default tenant.")
    ] = "",
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-tokens",
            help="Largest number of output tokens; left out: as many as the context allows.",
        ),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option("--temperature", help="Sampling temperature; 0 is greedy.")
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option("--seed", help="Seed of the sampling; the same seed gives the same output."),
    ] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option("--stop", metavar="TEXT", help="End the output before this text; repeatable."),
    ] = None,
    ignore_eos: Annotated[
        bool,
        typer.Option(
            "--ignore-eos", help="Generate --max-tokens tokens even if the model ends earlier."
        ),
    ] = False,
    timeout: Annotated[
        float | None,
        typer.Option(
            "--timeout",
            metavar="SECONDS",
            help="Fail with exit code 1 if the whole request takes longer than this.",
        ),
    ] = None,
    request_id: Annotated[
        str,
        typer.Option(
            "--request-id",
            help="Request ID for `baton explain`; left out: the coordinator makes one.",
        ),
    ] = "",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per event, one per line.")
    ] = False,
    timeline: Annotated[
        bool, typer.Option("--timeline", help="Print how long each stage of the request took.")
    ] = False,
) -> None:
    """Send a prompt and print the output as it is generated.

    Exit codes: 0 done, 1 failed, 2 wrong usage or request, 3 unavailable, 130 interrupted.
    """
    if as_json and timeline:
        raise typer.BadParameter(
            "cannot be used with --json, which prints the stages in its last object",
            param_hint="--timeline",
        )
    wanted: RequestOptions = {
        "model": model,
        "lane": lane.value,
        "tenant": tenant,
        "timeout_s": timeout,
        "request_id": request_id,
    }
    # Options that are not given are not sent, so that the engine's defaults apply.
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
        raise typer.BadParameter("set exactly one of PROMPT and --tokens", param_hint="PROMPT")
    if tokens is not None:
        if chat:
            raise typer.BadParameter("--chat needs text, not token IDs", param_hint="--tokens")
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
                f"{error.object[error.start]:#04x} that is not valid",
                param_hint="PROMPT",
            ) from None
    assert text is not None
    return [{"role": "user", "content": text}] if chat else text


async def _stream(
    addresses: list[str], prompt: Prompt, wanted: RequestOptions, *, as_json: bool, timeline: bool
) -> None:

    async with (
        BatonClient(addresses, tls=credentials.tls(), api_key=credentials.api_key()) as client,
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
                    # End the last line of the text, then print an empty line.
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
                print(
                    f"baton: the connection to the coordinator failed; the stream resumed {times}",
                    file=sys.stderr,
                )


def _print_event(event: Event) -> None:

    fields: dict[str, Any] = {"event": type(event).__name__.lower(), **asdict(event)}
    print_json_line(fields)
