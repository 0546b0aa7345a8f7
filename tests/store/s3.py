"""Run moto's S3 server on a port of this machine during a `with` block, and set the environment variables that reach it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from unittest import mock

# moto checks whether an object exists, and then writes it. So two writers at once may both be told that they were first, which
# S3 never does. Therefore conditional writes are made one after the other.
_SERVE = """
import logging, sys, threading
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import make_server
logging.getLogger("werkzeug").setLevel(logging.ERROR)
moto, turn = DomainDispatcherApplication(create_backend_app), threading.Lock()

def as_s3_does(environ, start_response):
    if "HTTP_IF_NONE_MATCH" not in environ or environ["REQUEST_METHOD"] not in ("PUT", "POST"):
        return moto(environ, start_response)
    with turn:
        return moto(environ, start_response)

server = make_server("127.0.0.1", 0, as_s3_does, threaded=True, request_handler=MotoRequestHandler)
threading.Thread(target=server.serve_forever, daemon=True).start()
print(server.server_port, flush=True)
sys.stdin.read()
"""


@contextmanager
def s3_server(bucket: str = "logps") -> Iterator[dict[str, str]]:
    """Start a server with one bucket, and yield the environment variables that reach it."""
    command = [sys.executable, "-c", _SERVE]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            port = int(process.stdout.readline())
            environment = {
                "AWS_ACCESS_KEY_ID": "tester",
                "AWS_SECRET_ACCESS_KEY": "not-a-secret",
                "AWS_REGION": "us-east-1",
                "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
                "AWS_ALLOW_HTTP": "true",
            }
            request = urllib.request.Request(f"http://127.0.0.1:{port}/{bucket}", method="PUT")
            urllib.request.urlopen(request, timeout=30)
            yield environment
        finally:
            process.kill()


def environment_of(variables: dict[str, str]) -> AbstractContextManager[object]:
    """Set variables in the environment of this process during a block."""
    return mock.patch.dict(os.environ, variables)


_RELAY = """
import asyncio, sys

async def copy(source, target):
    while data := await source.read(1 << 16):
        target.write(data)
        await target.drain()
    target.close()

async def pass_on(*client):
    server = await asyncio.open_connection("127.0.0.1", int(sys.argv[1]))
    await asyncio.gather(copy(client[0], server[1]), copy(server[0], client[1]))

async def main():
    listening = await asyncio.start_server(pass_on, "127.0.0.1", int(sys.argv[2]))
    print(listening.sockets[0].getsockname()[1], flush=True)
    await listening.serve_forever()

asyncio.run(main())
"""


class Relay:
    """A process that forwards connections to a port.

    It is a process of its own, because delta-rs holds Python's lock while it writes.
    """

    def __init__(self, to: int) -> None:
        self._to, self.port = to, 0
        self._start()

    def _start(self) -> None:
        command = [sys.executable, "-c", _RELAY, str(self._to), str(self.port)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.port = int(self._process.stdout.readline())

    def say(self, word: str) -> None:
        """`cut` the connections, `silence` them (they stay open, and nothing passes) or `mend` them."""
        if word == "silence":
            self._process.send_signal(signal.SIGSTOP)
        elif word == "cut":
            self.__exit__()
        elif self._process.poll() is None:
            self._process.send_signal(signal.SIGCONT)
        else:
            self._start()

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()
