"""The web dashboard: one page, and what it draws as JSON."""

from __future__ import annotations

from pathlib import Path

# What the page is made of, by the path that it is served at, below /dashboard.
_FILES = {
    "": ("index.html", "text/html; charset=utf-8"),
    "style.css": ("style.css", "text/css; charset=utf-8"),
    "charts.js": ("charts.js", "text/javascript; charset=utf-8"),
    "page.js": ("page.js", "text/javascript; charset=utf-8"),
}


def files() -> dict[str, tuple[bytes, str]]:
    """Contents and media types, read once."""
    folder = Path(__file__).parent
    return {path: ((folder / name).read_bytes(), kind) for path, (name, kind) in _FILES.items()}
