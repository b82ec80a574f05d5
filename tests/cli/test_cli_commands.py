"""The table of commands, whose modules are imported when a command runs."""

import subprocess
import sys

import pytest
import typer

from baton.cli.commands import COMMANDS
from baton.cli.main import app

HANG_S = 120.0
GROUP = typer.main.get_command(app)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_line_of_a_command_is_the_first_one_of_its_help(name):
    _, help_line = COMMANDS[name]
    assert GROUP.commands[name].load().help.splitlines()[0] == help_line


@pytest.mark.parametrize(
    ("command", "option"),
    [
        (("generate",), "--stop TEXT"),
        (("certs",), "--host HOST"),
        (("keys", "add"), "--lane interactive|batch"),
    ],
)
def test_the_help_of_a_repeatable_option_shows_the_value_that_it_takes(baton_here, command, option):
    told = baton_here(*command, "--help").out
    assert option in told
    assert "list[" not in told


def test_the_help_of_baton_imports_no_command():
    code = (
        "import sys\n"
        "from baton.cli.commands import COMMANDS\n"
        "from baton.cli.main import main\n"
        "sys.argv = ['baton', '--help']\n"
        "try:\n"
        "    main()\n"
        "except SystemExit:\n"
        "    pass\n"
        "modules = {f'baton.cli.{place.partition(\":\")[0]}' for place, _ in COMMANDS.values()}\n"
        "sys.exit(f'imported {found}' if (found := modules & {*sys.modules}) else 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG_S
    )
    assert done.returncode == 0, done.stderr
    assert [name for name in COMMANDS if f"\n  {name} " not in done.stdout] == []
