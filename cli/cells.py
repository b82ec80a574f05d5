"""The cells that a gateway serves, by its configuration and its command line."""

from __future__ import annotations

from baton.cli import options
from baton.runtime.config import BatonConfig, CellConfig
from baton.runtime.config_error import ConfigError

# Configuration keys that choose vLLM's output parsers for the model of a cell.
PARSERS = ("tool_call_parser", "reasoning_parser")


def configured_cells(config: BatonConfig, coordinators: list[str]) -> list[CellConfig]:
    """The cells that a gateway serves; at least one, with normalized addresses.

    Args:
        config: Configuration; its http.cells count if the command line names no coordinator.
        coordinators: Values of --coordinator, one per cell.

    Raises:
        ConfigError: No cell is given, a cell is given twice, or an address is not host:port.
    """
    names = {key: getattr(config, key) for key in PARSERS}
    cells = [CellConfig(coordinators=one, **names) for one in coordinators if one]
    keys = ["--coordinator"] * len(cells)
    if not coordinators:
        cells = config.http.cells
        keys = [f"http.cells[{index}].coordinators" for index in range(len(cells))]
    if not cells:
        raise ConfigError("--coordinator: is missing; must be HOST:PORT, or set http.cells")
    found: dict[str, CellConfig] = {}
    for key, cell in zip(keys, cells, strict=True):
        place = ",".join(options.resolve_addresses(cell.coordinators, key))
        if place in found:
            raise ConfigError(
                f"{key}: is {place!r}, as for another cell; cells must have different coordinators"
            )
        found[place] = cell.model_copy(update={"coordinators": place})
    return list(found.values())
