"""A real `reflogp serve` in a process of its own, for the time of a `with` block, and what jobs are made of."""

import hashlib
import json
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
from pathlib import Path

import httpx
import numpy as np
import psutil

from tests.service.warm_python import WarmPython

#: Constants of the service that `settings_file` takes like settings, and where they are.
CONSTANTS = {
    "commit_seconds": ("app", "_COMMIT_SECONDS"),
    "ledger_seconds": ("app", "_LEDGER_SECONDS"),
    "row_seconds": ("app", "_ROW_SECONDS"),
    "window_seconds": ("app", "_WINDOW_SECONDS"),
    "worker_late_seconds": ("pool", "_LATE_SECONDS"),
    "worker_silence_seconds": ("pool", "_SILENCE_SECONDS"),
    "max_body_bytes": ("bodies", "_MAX_BODY_BYTES"),
    "max_json_bytes": ("bodies", "_MAX_JSON_BYTES"),
    "max_large_requests": ("bodies", "_MOST_LARGE"),
    "max_json_values": ("routes.lookups", "_MAX_JSON_VALUES"),
    "max_lookup_keys": ("routes.lookups", "_MAX_KEYS"),
    "max_score_sequences": ("routes.scores", "_MAX_SEQUENCES"),
    "max_score_tokens": ("routes.scores", "_MAX_TOKENS"),
}
_ASIDE = "# constants: "


def command_line(*arguments: object, warm: WarmPython | None = None) -> list[str]:
    """The command that runs `reflogp` with these arguments, and with the constants that `settings_file` put into `--config`."""
    python, code = warm.executable if warm else sys.executable, "from reflogp.cli import main; "
    if "--config" in arguments:
        first = Path(str(arguments[arguments.index("--config") + 1])).read_text().partition("\n")[0]
        for name, value in json.loads(first.removeprefix(_ASIDE)).items() if first.startswith(_ASIDE) else ():
            module, constant = CONSTANTS[name]
            code += f"import reflogp.service.{module} as module; module.{constant} = {value!r}; "
    return [python, "-c", f"{code}main()", *map(str, arguments)]


class Service:
    """A running service: its URL, its process, its workers' processes, its log.

    Args:
        arguments: of `reflogp serve`.
        warm: runs the service and its workers; None starts an ordinary `python` for each.
    """

    def __init__(self, *arguments: object, warm: WarmPython | None = None) -> None:
        self._warm = warm
        command = command_line("serve", *arguments, warm=warm)
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

    @property
    def pid(self) -> int:
        """The service's process, which is another one than `process` where a WarmPython runs it; 0 when it has ended."""
        return self._real(self.process.pid) if self.process.poll() is None else 0

    def workers(self) -> list[psutil.Process]:
        """Its worker processes that are alive."""
        try:
            children = psutil.Process(pid).children() if (pid := self.pid) else []
            launched = [child.pid for child in children if "reflogp.service.worker" in " ".join(child.cmdline())]
            return [psutil.Process(pid) for pid in map(self._real, launched) if pid]
        except psutil.Error:
            return []

    def started_runners(self) -> list[int]:
        """Process ids of all processes that were started for jobs."""
        return [int(found[1]) for line in list(self.log) if (found := re.search(r"job started, pid (\d+)", line))]

    def runners(self) -> list[psutil.Process]:
        """Those of them that are alive."""
        return [psutil.Process(pid) for pid in self.started_runners() if psutil.pid_exists(pid)]

    def _real(self, launched: int) -> int:
        return (self._warm.program_of(launched) or 0) if self._warm else launched

    def worker_ready(self, timeout: float = 240, token: str = "") -> None:
        """Wait until a worker takes work."""
        stop, headers = time.monotonic() + timeout, {"authorization": f"Bearer {token}"} if token else {}
        while "reflogp_workers_ready 1.0" not in httpx.get(f"{self.url}/metrics", headers=headers).text:
            assert time.monotonic() < stop, "".join(self.log)
            time.sleep(0.05)

    def kill(self) -> None:
        """kill -9 the service; its workers find out by themselves."""
        if pid := self.pid:  # 0 would be this process's own group
            os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def stop(self) -> int:
        """SIGTERM, and wait; the exit code."""
        self.process.terminate()
        return self.process.wait(timeout=60)


@contextmanager
def running(*arguments: object, warm: WarmPython | None = None) -> Iterator[Service]:
    """A service with its process at hand."""
    service = Service(*arguments, warm=warm)
    try:
        yield service
    finally:
        if service.process.poll() is None:
            service.stop()


@contextmanager
def serving(*arguments: object, warm: WarmPython | None = None) -> Iterator[str]:
    """Start a service on a free port; gives its URL."""
    with running(*arguments, warm=warm) as service:
        yield service.url


def settings_file(folder, store, models: dict, tokens: dict[str, tuple[str, list[str]]] | None = None, **more) -> str:
    """A settings file; `models` are name -> folder or table of settings, `tokens` name -> (token, its scopes).

    What is one of CONSTANTS is no setting: `command_line` gives it to the service that it starts.
    """
    constants = {name: more.pop(name) for name in CONSTANTS.keys() & more.keys()}
    lines = [
        f"{_ASIDE}{json.dumps(constants)}",
        f'store = "{store}"',
        f'state = "{folder / "state"}"',
        *(f"{k} = {json.dumps(v)}" for k, v in more.items()),
    ]
    for name, entry in models.items():
        table = entry if isinstance(entry, dict) else {"model": str(entry)}
        lines += [f"[references.{name}]", *(f"{key} = {json.dumps(value)}" for key, value in table.items())]
    for name, (token, scopes) in (tokens or {}).items():
        digest = hashlib.sha256(token.encode()).hexdigest()
        lines += ["[[tokens]]", f'name = "{name}"', f'sha256 = "{digest}"', f"scopes = {json.dumps(scopes)}"]
    file = folder / "serve.toml"
    file.write_text("\n".join(lines))
    return str(file)


def float32(folder) -> dict:
    return {"model": str(folder), "dtype": "float32"}


def token_rows(count: int, seed: int, length: int = 20) -> list[dict]:
    """Rows of random token ids: no two alike."""
    draw = np.random.default_rng(seed)
    sides = ("prompt_ids", "chosen_ids", "rejected_ids")
    return [{side: draw.integers(10, 900, length).tolist() for side in sides} for _ in range(count)]


def wait_until(holds, seconds=120):
    """Poll until holds()."""
    stop = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < stop
        time.sleep(0.05)


def wait_for(client, job, ready, timeout=240):
    """Poll a job until ready(job)."""
    stop = time.monotonic() + timeout
    while not ready(found := client.job(job)):
        assert time.monotonic() < stop, found
        time.sleep(0.02)
    return found
