"""`baton check`: says whether Baton can serve a model, before any weights are loaded."""

from __future__ import annotations

import signal
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from baton.cli import options
from baton.cli.effective_config import load_config
from baton.cli.exit_codes import USAGE
from baton.cli.output import print_json, print_table
from baton.runtime import demo_model
from baton.runtime.config import parse
from baton.runtime.process import quick_exit
from baton.worker import model_check

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@quick_exit.skip_cleanup_if_interrupted()
def check(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="Local directory or Hugging Face model ID; default: the model of --config, or "
            "glossary.",
        ),
    ] = None,
    config: options.ConfigFile = None,
    engine_arg: options.EngineArgs = None,
    prompt_tokens: Annotated[
        int,
        typer.Option(
            "--prompt-tokens", min=1, max=options.MOST, help="Length of the prompt to hand over."
        ),
    ] = 4000,
    write: Annotated[
        Path | None,
        typer.Option(
            "--write",
            metavar="FILE",
            help="Write a configuration for baton up to this file, which must not exist yet.",
        ),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Check whether Baton can serve a model.

    No weights are loaded. The command also prints the size of the KV cache, measures how long a
    handoff takes over the transports of this host, and says whether the staging holds the longest
    prompt.

    Exit codes: 0 the model can be served, 2 it is refused.
    """
    if write is not None and (write.exists() or write.is_symlink()):
        raise typer.BadParameter(f"{write} exists already", param_hint="--write")
    options.check_writable(write, "--write")
    given = load_config(config, model=model, engine_args=engine_arg)
    # As Ctrl-C: otherwise the temporary directory of the check would stay.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    directory = demo_model.ensure(given.model, weights=False)
    resolved = given.model_copy(update={"model": directory, "served_model_name": given.model_name})
    try:
        found = model_check.check(resolved, prompt_tokens)
    except model_check.Refused as refused:
        quick_exit.skip_cleanup(USAGE)
        if not as_json:
            raise
        print_json({"model": given.model, "can_be_served": False, "reason": str(refused)})
        raise typer.Exit(USAGE) from None
    if as_json:
        print_json({"can_be_served": True, **asdict(found), "model": given.model})
    else:
        _print(given.model, found)
    if write is not None:
        _write(write, model_check.starting_config(given, found))
        if not as_json:
            print(f"\nWritten to {write}. Start it with: baton up --config {write}")
    # vLLM's libraries take seconds to end, and print.
    quick_exit.skip_cleanup(0)


def _print(model: str, found: Any) -> None:
    """Prints a ModelCheck (worker/model_check.py)."""
    layout, staging = found.layout, found.staging
    ranks = f", {layout.num_ranks} ranks" if layout.num_ranks > 1 else ""
    print(f"{model} ({found.architecture}) can be served, on {found.device}{ranks}\n")
    prompt = f"prompt of {found.prompt_tokens:,} tokens"
    num_full = sum(each.num_layers for each in layout.groups if each.kind == "full")
    others = [
        (
            f"window of {each.window_tokens:,} tokens",
            _size(
                each.num_layers
                * each.block_bytes
                * layout.num_shards
                * (each.window_tokens / each.block_size_tokens)
            ),
            f"{each.num_layers} layers",
        )
        for each in layout.groups
        if each.kind == "window"
    ]
    others += [
        (
            "recurrent state",
            _size(each.num_layers * each.block_bytes * layout.num_shards),
            f"{each.num_layers} layers",
        )
        for each in layout.groups
        if each.kind == "state"
    ]
    rows = [
        ("token", _size(found.bytes_per_token), f"{num_full} layers, {layout.dtype}"),
        ("block", _size(found.bytes_per_block), f"{layout.block_size_tokens} tokens"),
        *others,
        (prompt, _size(found.prompt_bytes), f"{layout.num_blocks(found.prompt_tokens):,} blocks"),
    ]
    if found.images:
        print(f"Images in chats: {found.images}\n")
    print_table(("KV CACHE OF A", ">SIZE", "HOLDS"), rows, "")
    if found.draft:
        print(f"Speculative draft: {found.draft}")
    print()
    rows_of_transports = [
        (
            each.name,
            "-" if each.bytes_per_s is None else f"{each.bytes_per_s / 1e9:.2f} GB/s",
            "-" if each.handoff_s is None else f"{each.handoff_s * 1e3:.1f} ms",
            each.note,
        )
        for each in found.transports
    ]
    columns = ("TRANSPORT", ">SPEED", f">{found.prompt_tokens:,} TOKENS", "NOTE")
    print_table(columns, rows_of_transports, "")
    print("A request waits less: each layer is sent while the next layers are computed.\n")
    for key, size in (("send", staging.send_bytes), ("receive", staging.receive_bytes)):
        print(f"kv_transfer.{key}_bytes: {size} ({_size(size)})")
    print(
        f"Staging holds prompts of up to {staging.max_prompt_tokens:,} tokens; "
        f"max_model_len is {found.max_model_len:,}."
    )
    if not staging.fits:
        print("For longer prompts, one worker does all the work. To hand over prompts of up to")
        print(
            f"{staging.suggested_prompt_tokens:,} tokens, set both to {staging.suggested_bytes} "
            f"({_size(staging.suggested_bytes)})."
        )
        if staging.suggested_prompt_tokens < found.max_model_len:
            print(
                f"This host has {_size(staging.room_bytes)} for the staging of all workers (90 % "
                "of the free\n/dev/shm, at most half of the available memory). For longer prompts, "
                "enlarge /dev/shm\nor lower engine_args.max_model_len."
            )


def _size(num_bytes: float) -> str:
    unit = 0
    while num_bytes >= 1024 and unit < len(_UNITS) - 1:
        num_bytes, unit = num_bytes / 1024, unit + 1
    return f"{num_bytes:.1f} {_UNITS[unit]}"


def _write(path: Path, values: dict[str, Any]) -> None:
    """Writes a configuration file that does not exist yet.

    Raises:
        ConfigError: The values are no valid configuration.
        OSError: The file exists by now, or cannot be written.
    """
    parse(values, str(path))
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    with path.open("x", encoding="utf-8") as file:
        file.write(f"# Made by `baton check --write`; for `baton up --config`.\n{text}")
