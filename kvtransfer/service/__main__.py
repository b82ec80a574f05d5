"""The transfer service's process: `python -m baton.kvtransfer.service CONFIG`."""

import sys

from baton.runtime.process import quick_start


def main() -> int:
    """Runs the service and returns the process's exit code."""
    quick_start.collect_rarely()
    from baton.kvtransfer.service.service import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
