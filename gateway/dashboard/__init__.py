"""The web dashboard: one page and the JSON data that it draws."""

from __future__ import annotations

from pathlib import Path

# Files of the page, by their path below /dashboard.
_FILES = {
    "": ("index.html", "text/html; charset=utf-8"),
    "style.css": ("style.css", "text/css; charset=utf-8"),
    "charts.js": ("charts.js", "text/javascript; charset=utf-8"),
    "page.js": ("page.js", "text/javascript; charset=utf-8"),
}


def files() -> dict[str, tuple[bytes, str]]:
    """Returns the content and media type of each file, by path."""
    folder = Path(__file__).parent
    return {path: ((folder / name).read_bytes(), kind) for path, (name, kind) in _FILES.items()}
