"""Generates the table of docs/models.md: run `python docs/proofs/generate.py`.

Tests with the mark `proves` say which ability of which kind of model they prove. A run of whole
test files with `pytest -m proves FILES --proofs docs/proofs/results.json` records their outcomes;
run the files one by one, because vLLM takes all cores. kinds.toml has the rows, the columns, and
the reasons of cells that no test proves. A test checks that the committed table equals the
generated one, and that the recorded tests exist with their marks.
"""

from __future__ import annotations

import json
import tomllib
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PAGE = HERE.parent / "models.md"
BEGIN = "<!-- begin: docs/proofs/generate.py makes this part -->\n"
END = "<!-- end of the generated part -->\n"
# Ways of proof, with the stronger one first.
WAYS = {
    "compared": "compared",
    "layout": "layout test",
}


class WrongProofs(ValueError):
    """The results and kinds.toml do not fit each other, or a recorded test has failed."""


@dataclass
class Cell:
    """The proofs of one ability of one kind of model."""

    # Devices by way of proof.
    devices: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    files: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))

    def text(self) -> str:
        """Returns the strongest way of proof, or an empty text if there is none."""
        for way, shown in WAYS.items():
            if devices := self.devices.get(way):
                gpus = sorted(devices - {"CPU"})
                where = ", ".join([*(["CPU"] if "CPU" in devices else []), *gpus])
                return shown if where == "CPU" else f"{shown} ({where})"
        return ""


def cells(results: dict[str, Any], rows: dict[str, str]) -> dict[tuple[str, str], Cell]:
    """Returns the cells that passed tests prove, by row and column.

    Args:
        results: As tests/conftest.py writes them: test files by device.
        rows: Title of the row by each name that tests use.

    Raises:
        WrongProofs: A test has failed, or names an unknown kind or way.
    """
    made = defaultdict[tuple[str, str], Cell](Cell)
    for device, files in results.items():
        for file, of_file in files.items():
            for name, test in of_file["tests"].items():
                if test["outcome"] == "failed":
                    raise WrongProofs(f"{file}::{name} has failed on {device}: run {file} again")
                for proof in test["proves"] if test["outcome"] == "passed" else ():
                    kind, what, how = proof.split("; ")
                    if kind not in rows or how not in WAYS:
                        raise WrongProofs(f"{file}::{name} proves '{proof}': not in kinds.toml")
                    cell = made[rows[kind], what]
                    cell.devices[how].add(device)
                    cell.files[how].add(file)
    return made


def table(kinds: dict[str, Any], results: dict[str, Any]) -> str:
    """Returns the generated part of the page.

    Raises:
        WrongProofs: A cell has neither a proof nor a reason, or both; or see `cells`.
    """
    columns, reasons = kinds["columns"], kinds["reasons"]
    rows = {name: row["title"] for row in kinds["kinds"] for name in row["names"]}
    proven = cells(results, rows)
    if unknown := {what for _, what in proven} - columns.keys():
        raise WrongProofs(f"tests prove {sorted(unknown)}, which are no columns of kinds.toml")
    numbers: dict[str, int] = {}
    lines = [
        "| " + " | ".join(["kind", *columns.values()]) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for row in kinds["kinds"]:
        shown = []
        for what in columns:
            text = proven[row["title"], what].text()
            reason = row.get("reasons", {}).get(what)
            if bool(text) == bool(reason):
                state = "a proof and a reason" if text else "neither a proof nor a reason"
                raise WrongProofs(f"{row['title']}, {what}: {state}")
            if reason is not None:
                number = numbers.setdefault(reason, len(numbers) + 1)
                shown.append(f"{reasons[reason]['status']} ({number})")
            else:
                note = row.get("notes", {}).get(what)
                shown.append(f"{text}, {note}" if note else text)
        lines.append("| " + " | ".join([row["title"], *shown]) + " |")
    if unused := reasons.keys() - numbers.keys():
        raise WrongProofs(f"no cell has the reasons {sorted(unused)}")
    return "\n".join([*lines, "", *_explained(reasons, numbers), "", *_tests(columns, proven)])


def _explained(reasons: dict[str, Any], numbers: dict[str, int]) -> list[str]:
    return [f"{number}. {reasons[name]['text']}" for name, number in numbers.items()]


def _tests(columns: dict[str, str], proven: dict[tuple[str, str], Cell]) -> list[str]:
    """Returns a table of the test files of each column."""
    lines = ["| column | compared by | layout tests |", "|---|---|---|"]
    for what, title in columns.items():
        files = {
            way: sorted({file for (_, of), cell in proven.items() if of == what
                         for file in cell.files[way]})
            for way in WAYS
        }  # fmt: skip
        named = [", ".join(f"`{Path(one).name}`" for one in files[way]) for way in WAYS]
        lines.append("| " + " | ".join([title, *named]) + " |")
    return lines


def versions(results: dict[str, Any]) -> str:
    """Returns the devices on which the tests ran, with vLLM's versions."""
    ran = {
        device: sorted({of_file["vllm"] for of_file in files.values()})
        for device, files in results.items()
    }
    return "; ".join(
        f"{device} with vLLM {', '.join(found)}" for device, found in sorted(ran.items())
    )


def page(text: str, made: str) -> str:
    """Returns the text of the page with the generated part."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{made}\n\n{END}{after}"


def read() -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the rows and columns, and the recorded results."""
    kinds = tomllib.loads((HERE / "kinds.toml").read_text(encoding="utf-8"))
    results = json.loads((HERE / "results.json").read_text(encoding="utf-8"))
    return kinds, results


def generated() -> str:
    """Returns what docs/models.md should be."""
    kinds, results = read()
    made = f"{table(kinds, results)}\n\nDevices of these results: {versions(results)}."
    return page(PAGE.read_text(encoding="utf-8"), made)


if __name__ == "__main__":
    PAGE.write_text(generated(), encoding="utf-8")
