"""A `python` that has already imported torch, transformers and reflogp, so that services and workers start in 0.1 s.

A zygote process imports the modules once and forks itself for each program. What takes the place of `python` is a launcher: it
hands its arguments, environment, folder and standard streams to the zygote, passes signals on, and ends as the program ends.
Program and launcher die together, however either is killed. What runs is the same code that `python -c …` and `python -m …`
run, in a process of its own.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

_MESSAGE = 1 << 18
#: What services, workers and command lines import sooner or later.
MODULES = [
    "torch",
    "transformers",
    "transformers.models.llama.modeling_llama",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "deltalake",
    "uvicorn.protocols.http.h11_impl",
    "uvicorn.lifespan.on",
    "reflogp.service.worker.units",
    "reflogp.service.worker.write_back",
    "reflogp.service.runner.run",
    "reflogp.service.app",
    "reflogp.service.run",
    "reflogp.scoring.runs.scheduler",
    "reflogp.cli.score",
    "reflogp.cli.serve",
]


class WarmPython:
    """A zygote that has imported the modules, and `executable`, the launcher that takes the place of `python`.

    Args:
        modules: imported at the start, in this order.
        python: of the environment whose modules these are.
        environment: of the imports.

    Attributes:
        environment: the same.
    """

    def __init__(
        self, modules: Sequence[str] = MODULES, python: str = sys.executable, environment: dict[str, str] | None = None
    ) -> None:
        self.environment = environment
        self._folder = tempfile.TemporaryDirectory(prefix="warm")  # a socket's path is short
        self._socket = f"{self._folder.name}/zygote"
        self.executable = f"{self._folder.name}/python"
        launcher = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        launcher += f"from warm_python import launch; launch({self._socket!r})\n"
        Path(self.executable).write_text(f"#!{sys.executable} -IS\n{launcher}")
        Path(self.executable).chmod(0o700)
        command = [python, str(Path(__file__).resolve()), self._socket, self.executable, *modules]
        self._zygote = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        self._zygote.wait()  # it goes on in a process that is no child of this one: tests count and kill their children
        assert self._zygote.stdout and self._zygote.stdout.readline() == b"ready\n"

    def program_of(self, launcher: int) -> int | None:
        """Process id of the program that a launcher started; None before it runs and after it has ended."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.connect(self._socket)
            connection.send(json.dumps({"program_of": launcher}).encode())
            return json.loads(connection.recv(_MESSAGE)) or None

    def close(self) -> None:
        """End the zygote and every program that still runs."""
        assert self._zygote.stdin and self._zygote.stdout
        self._zygote.stdin.close()
        self._zygote.stdout.read()  # ends with the zygote
        self._folder.cleanup()


def launch(place: str) -> None:
    """Run a program in the zygote's child; called by the launcher."""
    program = 0

    def pass_on(number: int, _: Any) -> None:
        if program:
            os.kill(program, number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, pass_on)
    streams = [int(stream.name) for stream in list(Path("/proc/self/fd").iterdir()) if stream.exists()]
    request = {"arguments": sys.argv[1:], "environment": dict(os.environ), "folder": str(Path.cwd()), "streams": streams}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(place)
        socket.send_fds(connection, [json.dumps(request).encode()], streams)
        program = int(connection.recv(_MESSAGE))
        for stream in streams:  # a pipe must end when the program ends, not when the launcher does
            os.close(stream)
        status = int(connection.recv(_MESSAGE) or b"256")
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.WEXITSTATUS(status))


class _Zygote:
    """Forks programs, and tells their launchers how they ended."""

    def __init__(self, place: str) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(place)
        self._listener.listen(64)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(0, selectors.EVENT_READ)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started it closes its standard input
        self._programs: dict[int, int] = {}  # process id of a launcher -> of its program

    def run(self) -> None:
        """Serve until standard input ends."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj == 0:
                    for program in self._programs.values():
                        os.kill(program, signal.SIGKILL)
                    return
                if key.fileobj is self._listener:
                    self._take()
                elif key.data[0] in self._programs:
                    self._end(*key.data)

    def _take(self) -> None:
        connection, _ = self._listener.accept()
        message, streams, *_ = socket.recv_fds(connection, _MESSAGE, 64)
        if not message:
            connection.close()
            return
        request = json.loads(message)
        if "program_of" in request:
            connection.send(json.dumps(self._programs.get(request["program_of"], 0)).encode())
            connection.close()
            return
        launcher = int.from_bytes(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)[:4], sys.byteorder)
        program = os.fork()
        if not program:
            _run_and_exit(request, streams)
        for stream in streams:
            os.close(stream)
        self._programs[launcher] = program
        handle = os.pidfd_open(program)
        for end in (connection, handle):
            self._selector.register(end, selectors.EVENT_READ, (launcher, program, connection, handle))
        connection.send(str(program).encode())

    def _end(self, launcher: int, program: int, connection: socket.socket, handle: int) -> None:
        """The program has ended, or its launcher, which it does not outlive."""
        os.kill(program, signal.SIGKILL)
        _, status = os.waitpid(program, 0)
        del self._programs[launcher]
        for end in (connection, handle):
            self._selector.unregister(end)
        with suppress(OSError):  # the launcher went first
            connection.send(str(status).encode())
        connection.close()
        os.close(handle)


def _run_and_exit(request: dict[str, Any], streams: list[int]) -> None:
    """Be the program, in the zygote's child."""
    import atexit
    import fcntl
    import runpy
    import threading
    import traceback

    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.setsid()
    streams = [fcntl.fcntl(stream, fcntl.F_DUPFD, 1024) for stream in streams]  # away from where they belong
    os.closerange(0, 1024)
    for number, stream in zip(request["streams"], streams, strict=True):
        os.dup2(stream, number)
    os.closerange(1024, 4096)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    status = 0
    try:
        match [argument for argument in request["arguments"] if argument not in ("-B", "-u")]:
            case ["-c", code, *arguments]:
                sys.argv = ["-c", *arguments]
                exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
            case ["-m", module, *arguments]:
                sys.argv = [module, *arguments]
                runpy.run_module(module, run_name="__main__", alter_sys=True)
            case other:
                raise AssertionError(f"python {other}")
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _main(place: str, executable: str, *modules: str) -> None:
    import gc
    import importlib

    if os.fork():
        os._exit(0)
    answers = os.fdopen(os.dup(1), "w")  # ends with this process: no program has it
    os.dup2(2, 1)  # what imports print is no answer
    sys.path.pop(0)  # this folder
    sys.executable = executable  # of the programs that a program starts
    for module in modules:
        importlib.import_module(module)
    gc.freeze()
    zygote = _Zygote(place)
    print("ready", file=answers, flush=True)
    zygote.run()
    os._exit(0)


if __name__ == "__main__":
    _main(*sys.argv[1:])
