"""A process that forks a program again and again; see fork_server.py.

    python fork_server_program.py MAIN [MODULE ...]

MAIN is the module whose `main` is the program. Standard input is a Unix socket. A request is JSON
[arguments, environment, directory] with the file descriptors of standard output and standard error.
The answers are JSON [PID, null] when a program has started, and [PID, exit code] when it has ended.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import socket
import sys

# Most bytes of a request.
MOST_BYTES = 2**20


def serve(requests: socket.socket) -> list[str]:
    """Forks a process for each request; in that process, returns the program's arguments.

    It exits when the process of the tests has ended.
    """
    # PIDs by the descriptors that tell when the processes end.
    running: dict[int, int] = {}
    while True:
        for ready in select.select([requests, *running], [], [])[0]:
            if ready is not requests:
                pid = running.pop(ready)
                os.close(ready)
                _, status = os.waitpid(pid, 0)
                answer(requests, pid, os.waitstatus_to_exitcode(status))
                continue
            data, files, _, _ = socket.recv_fds(requests, MOST_BYTES, 2)
            if not data:
                sys.exit()
            arguments, environment, directory = json.loads(data)
            if not (pid := os.fork()):
                for file in running:
                    os.close(file)
                become(files, environment, directory)
                return list(arguments)
            running[os.pidfd_open(pid)] = pid
            answer(requests, pid, None)
            for file in files:
                os.close(file)


def answer(requests: socket.socket, pid: int, code: int | None) -> None:
    try:
        requests.send(json.dumps([pid, code]).encode())
    except BrokenPipeError:
        sys.exit()


def become(files: list[int], environment: dict[str, str], directory: str) -> None:
    """Gives this process what a program has that subprocess.Popen starts in a new session."""
    os.setsid()
    for file, target in zip((os.open(os.devnull, os.O_RDONLY), *files), range(3), strict=True):
        os.dup2(file, target)
        os.close(file)
    # The server's own streams know whether its files were pipes.
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)


def main() -> None:
    # gRPC reads this when it is imported; `baton` sets it before.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    modules = [importlib.import_module(name) for name in sys.argv[1:]]
    gc.collect()
    gc.freeze()
    with socket.socket(fileno=os.dup(0)) as requests:
        arguments = serve(requests)
    gc.unfreeze()
    sys.argv = ["baton", *arguments]
    sys.exit(modules[0].main())


if __name__ == "__main__":
    main()
