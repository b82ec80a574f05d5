"""A `baton` command as a process of a test."""

import os
import queue
import re
import signal
import subprocess
import sys
import threading

import psutil

# Bound hangs. No test may fail because a busy machine is slow.
START_S = STOP_S = 300.0


class Process:
    """A `baton` command; its output line by line."""

    def __init__(self, *arguments, directory):
        self._log = (directory / f"{arguments[0]}.log").open("w+")
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "baton.cli", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            process_group=0,
            env={**os.environ, "HOME": str(directory)},
        )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def ready(self, pattern):
        line = self._lines.get(timeout=START_S)
        found = re.search(pattern, line)
        assert found, f"{line!r}: {self.err()[-3000:]}"
        return found

    def err(self):
        self._log.seek(0)
        return self._log.read()

    def children(self):
        return psutil.Process(self.popen.pid).children(recursive=True)

    def stop(self, number=signal.SIGTERM):
        """Stops the process; returns its exit code and the child processes that it left behind."""
        children = self.children()
        self.popen.send_signal(number)
        code = self.popen.wait(STOP_S)
        _, left = psutil.wait_procs(children, STOP_S)
        return code, left

    def close(self):
        if self.popen.poll() is None:
            for child in self.children():
                child.kill()
            self.popen.kill()
        self.popen.wait()
        self._reader.join()
        self._log.close()

    def _read(self):
        with self.popen.stdout:
            for line in self.popen.stdout:
                self._lines.put(line)
        self._lines.put("")
