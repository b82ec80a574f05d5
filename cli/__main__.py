"""`python -m baton.cli`, and the command `baton`."""

import sys

from baton.runtime.process import quick_start


def main() -> None:
    """Runs the command; Ctrl-C during the imports also ends with exit code 130."""
    quick_start.collect_rarely()
    try:
        from baton.cli.main import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
