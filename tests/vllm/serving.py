"""A real vLLM server in a process of its own, for the time of a `with` block."""

import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx

from tests.vllm.conftest import VLLM_PYTHON

#: `vllm serve` itself asks for the version of a distribution named vllm, which the one for CPUs is not.
_SERVE = ["-m", "vllm.entrypoints.openai.api_server", "--enforce-eager", "--block-size", "32", "--max-model-len", "2048"]


class VllmServe:
    """A running server: its URL and its process."""

    def __init__(self, model: str, port: int, *arguments: str) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._log = tempfile.NamedTemporaryFile(prefix="vllm-serve-", suffix=".log")  # noqa: SIM115
        self.process = subprocess.Popen(
            [str(VLLM_PYTHON), *_SERVE, "--model", model, "--port", str(port), "--host", "127.0.0.1", *arguments],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_NUM_OF_RESERVED_CPU": "0", "VLLM_NO_USAGE_STATS": "1"},
            start_new_session=True,
        )

    def wait(self, timeout: float = 240) -> "VllmServe":
        """Until it answers."""
        stop = time.monotonic() + timeout
        while True:
            assert self.process.poll() is None and time.monotonic() < stop, Path(self._log.name).read_text()[-5000:]
            try:
                if httpx.get(f"{self.url}/health").status_code == 200:
                    return self
            except httpx.TransportError:
                time.sleep(0.5)

    def kill(self) -> None:
        """kill -9 the server and what it started, where that has not happened yet."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextmanager
def vllm_serve(model: str, port: int, *arguments: str) -> Iterator[VllmServe]:
    server = VllmServe(model, port, *arguments)
    try:
        yield server.wait()
    finally:
        server.kill()


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]
