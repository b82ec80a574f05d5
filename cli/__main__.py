"""`python -m baton.cli`, and the command `baton`."""

import sys


def main() -> None:
    """Runs the command; Ctrl-C during the imports also ends with exit code 130."""
    try:
        from baton.cli.main import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
