"""docs/clients.md names parameters that exist."""

import inspect
import re
from pathlib import Path

from baton.client import BatonClient

PAGE = Path(__file__).parents[2] / "docs" / "clients.md"


def test_parameters_in_the_table_of_the_python_client_exist():
    section = PAGE.read_text().split("\n## Python\n")[1].split("\n## ")[0]
    named = re.findall(r"^\| `(\w+)=` \|", section, re.M)
    assert named
    assert set(named) <= inspect.signature(BatonClient).parameters.keys()
