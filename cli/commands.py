"""The commands of `baton`, whose modules are imported when a command runs."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_group

# Module of baton.cli with the command's function or its group (`app`), and the first line of the
# command's help.
COMMANDS = {
    "up": ("up:up", "Run a whole cell in the foreground; Ctrl-C drains it."),
    "coordinator": ("coordinator:coordinator", "Run a coordinator alone."),
    "worker": ("worker:worker", "Run one worker; SIGTERM drains it."),
    "gateway": ("gateway:gateway", "Run the OpenAI-compatible HTTP gateway alone."),
    "check": ("check:check", "Check whether Baton can serve a model."),
    "generate": ("generate:generate", "Send a prompt and print the output as it is generated."),
    "pools": ("listings:pools", "Show the two pools and the lanes."),
    "workers": ("listings:workers", "List the workers, and the transports of their handoffs."),
    "requests": ("listings:requests", "List the running requests."),
    "replay": ("replay:replay", "Send the requests of a trace to a live cell."),
    "top": ("top:top", "Watch the state of a cell live; q quits."),
    "explain": ("explain:explain", "Show where the time of a running or recent request went."),
    "cancel": ("explain:cancel", "Cancel a running request."),
    "doctor": ("doctor:doctor", "Find out what is slow now, and what to change first."),
    "scale": ("pool_sizes:scale", "Set the size of a pool."),
    "targets": ("pool_sizes:targets", "Show or change the latency targets of the lanes."),
    "autoscale": ("pool_sizes:autoscale", "Turn autoscaling on or off."),
    "drain": ("pool_sizes:drain", "Drain a worker."),
    "flip": ("pool_sizes:flip", "Move a worker to the other pool."),
    "why": ("pool_sizes:why", "Show the last autoscaling decisions and their reasons."),
    "profile": ("profile:profile", "Record a profile of a live worker."),
    "simulate": ("simulate:simulate", "Run a trace on simulated workers, under a virtual clock."),
    "certs": ("certs:certs", "Make a CA and certificates for development."),
    "bench": ("bench:app", "Put load on a live cell and print the figures."),
    "rollout": ("rollout:app", "Try a model or engine arguments on a share of the traffic."),
    "cache": ("cache:app", "Delete KV blocks that workers keep."),
    "config": ("config:app", "Check and show the configuration, and list all keys."),
    "keys": ("keys:app", "Add, list and remove API keys."),
}


class CommandGroup(TyperGroup):
    """The group of all commands."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for name, (target, help_line) in COMMANDS.items():
            self.commands[name] = _LazyCommand(name, target, help_line)

    def invoke(self, ctx: Any) -> Any:
        """Runs a command; an error of an option or argument shows the value and what is allowed."""
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            # Imported here: without a wrong value, `baton` needs no pydantic for most commands.
            from pydantic import ValidationError

            from baton.runtime.config_error import what_is_allowed

            if isinstance(error.__cause__, ValidationError):
                problem = error.__cause__.errors()[0]
                error.message = what_is_allowed(problem["msg"])
                # The messages of choices contain the value.
                if problem["type"] != "value_error":
                    error.message = f"is {problem['input']!r}; {error.message}"
            raise


class _LazyCommand(TyperCommand):
    """Stands for a command until the command's own arguments are parsed.

    Args:
        name: Name of the command.
        target: Where the command is, as in COMMANDS.
        help_line: First line of the command's help.
    """

    def __init__(self, name: str, target: str, help_line: str) -> None:
        super().__init__(name, help=help_line, rich_markup_mode=None)
        self._target = target

    def make_context(
        self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        return self.load().make_context(info_name, args, parent, **extra)

    def load(self) -> Any:
        """Imports the command's module and returns the command."""
        module, attribute = self._target.split(":")
        found = getattr(import_module(f"baton.cli.{module}"), attribute)
        app = typer.Typer(rich_markup_mode=None)
        if isinstance(found, typer.Typer):
            app.add_typer(found, name=self.name)
        else:
            app.command(self.name)(found)
        return get_group(app).commands[self.name or ""]
