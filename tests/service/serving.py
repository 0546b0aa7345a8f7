"""A real `reflogp serve` in a process of its own, for the time of a `with` block."""

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def serving(*arguments: object) -> Iterator[str]:
    """Start a service on a free port; gives its URL."""
    command = [
        sys.executable,
        "-c",
        "from reflogp_client.cli import main; main()",
        "serve",
        "--port",
        "0",
        *map(str, arguments),
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            lines = []
            for line in process.stderr:
                lines.append(line)
                found = re.search(r"running on (http://\S+)", line)
                if found:
                    yield found[1]
                    break
            else:
                raise AssertionError("".join(lines))
        finally:
            process.terminate()
            process.wait(timeout=40)
