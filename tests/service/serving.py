"""A real `reflogp serve` in a process of its own, for the time of a `with` block."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import psutil


class Service:
    """A running service: its URL, its process, its workers' processes, its log."""

    def __init__(self, *arguments: object) -> None:
        command = [sys.executable, "-c", "from reflogp_client.cli import main; main()", "serve", *map(str, arguments)]
        if "--port" not in arguments:
            command += ["--port", "0"]
        self._state = tempfile.TemporaryDirectory()  # where the settings name no folder for jobs
        environment = {**os.environ, "XDG_STATE_HOME": self._state.name}
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        self.log: deque[str] = deque(maxlen=5000)
        for line in self.process.stderr:
            self.log.append(line)
            if found := re.search(r"running on (http://[0-9.:]+)", line):
                self.url = found[1]
                break
        else:
            raise AssertionError("".join(self.log))
        threading.Thread(target=self._drain, daemon=True).start()

    def _drain(self) -> None:
        for line in self.process.stderr:
            self.log.append(line)

    def workers(self) -> list[psutil.Process]:
        """Its worker processes that are alive."""
        try:
            children = psutil.Process(self.process.pid).children()
            return [child for child in children if "reflogp_service.worker" in " ".join(child.cmdline())]
        except psutil.Error:
            return []

    def worker_ready(self, timeout: float = 240, token: str = "") -> None:
        """Wait until a worker takes work."""
        stop, headers = time.monotonic() + timeout, {"authorization": f"Bearer {token}"} if token else {}
        while "reflogp_workers_ready 1.0" not in httpx.get(f"{self.url}/metrics", headers=headers).text:
            assert time.monotonic() < stop, "".join(self.log)
            time.sleep(0.05)

    def kill(self) -> None:
        """kill -9 the service; its workers find out by themselves."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> int:
        """SIGTERM, and wait; the exit code."""
        self.process.terminate()
        return self.process.wait(timeout=60)


@contextmanager
def running(*arguments: object) -> Iterator[Service]:
    """A service with its process at hand."""
    service = Service(*arguments)
    try:
        yield service
    finally:
        if service.process.poll() is None:
            service.stop()


@contextmanager
def serving(*arguments: object) -> Iterator[str]:
    """Start a service on a free port; gives its URL."""
    with running(*arguments) as service:
        yield service.url
