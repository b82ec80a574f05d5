"""The `baton` command.

Exit codes: 0 done; 1 failed; 2 wrong usage, configuration or request; 3 unavailable (no coordinator
answers, or no worker serves); 130 interrupted.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from typing import Annotated

import typer

from baton import __version__
from baton.cli import connection
from baton.cli.commands import CommandGroup
from baton.runtime.process import output_streams, quick_exit

app = typer.Typer(
    name="baton",
    cls=CommandGroup,
    help="Disaggregated prefill/decode serving for large language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"baton {__version__}")
        raise typer.Exit


@app.callback()
def root(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
    tls_ca: connection.TlsCa = "",
    tls_cert: connection.TlsCert = "",
    tls_key: connection.TlsKey = "",
    tls_server_name: connection.TlsServerName = "",
    api_key_file: connection.ApiKeyFile = "",
    api_key: connection.ApiKeyVariable = "",
) -> None:
    source = context.get_parameter_source("api_key_file")
    if source is not None and source.name == "COMMANDLINE":
        # The option --api-key-file takes precedence over the variable BATON_API_KEY.
        api_key = ""
    options = connection.Connection(
        tls_ca, tls_cert, tls_key, tls_server_name, api_key_file, api_key
    )
    context.with_resource(connection.used(options))


def main() -> None:
    """Runs the command in sys.argv and exits; expected errors print one line and no traceback."""
    quick_exit.skip_final_gc()
    # gRPC's own log lines repeat errors that the command already reports in one line.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    _open_standard_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Characters that the terminal's encoding lacks are printed as ? and raise no error.
        sys.stdout.reconfigure(errors="replace")
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        if isinstance(error, OSError) and error.errno in (errno.EPIPE, errno.ENOSPC):
            # The pipe's reader has gone or the disk is full: avoid a second error at exit.
            with contextlib.suppress(OSError):
                sys.stdout.flush()
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            if error.errno == errno.ENOSPC:
                output_streams.stderr.write(f"baton: cannot write: {error.strerror}\n")
            sys.exit(1)
        # Imported here: `baton --help` needs no gRPC, whose errors the module knows.
        from baton.cli import exit_codes

        code = exit_codes.exit_code(error)
        if code is None:
            raise
        for line in exit_codes.message(error).splitlines():
            output_streams.stderr.write(f"baton: {line}\n")
        sys.exit(code)


def _open_standard_streams() -> None:
    """Opens /dev/null for standard streams that the parent process has closed.

    Otherwise a socket could get descriptor 0, 1 or 2, and libuv aborts when it closes this socket.
    """
    for descriptor, stream in enumerate((sys.stdin, sys.stdout, sys.stderr)):
        if stream is None:
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, descriptor)
            os.set_inheritable(descriptor, True)
            if null != descriptor:
                os.close(null)
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8")  # noqa: SIM115


if __name__ == "__main__":
    main()
