"""Entry point of the image: read secrets from files, then run the `reflogp` command with the container's arguments.

    serve                  add tokens, which are created at the first start; if no references are set, serve a small model
    anything else          run this command, for example: store ls s3://…, jobs ls URL

The service's token is in /secrets/service/token. A read-only token is in /secrets/monitoring/token.
"""

import contextlib
import hashlib
import json
import os
import secrets
import signal
import sys
from pathlib import Path

DEMO_MODEL = Path("/cache/demo-model")


def secret(file: Path) -> str:
    """Return the secret in a file. Create the file if it does not exist; if several containers do so, the first one wins."""
    if not file.exists():
        part = file.with_name(f".{file.name}-{secrets.token_hex(8)}")
        try:
            part.write_text("reflogp_" + secrets.token_urlsafe(32))
        except OSError as error:
            sys.exit(f"{file} cannot be created ({error.strerror}): mount it, or a volume that user {os.getuid()} can write to")
        part.chmod(0o444)  # users in other containers can read it, but only containers that need the secret mount the volume
        with contextlib.suppress(FileExistsError):
            os.link(part, file)
        part.unlink()
    return file.read_text().strip()


def with_own_tokens(tokens: str, folder: Path) -> str:
    """Return the JSON list from REFLOGP_TOKENS with the container's own two tokens added."""
    try:
        entries = json.loads(tokens)
        if not isinstance(entries, list):
            raise ValueError("the value is not a list")
    except ValueError as error:
        sys.exit(f'REFLOGP_TOKENS: {error}; use the form [{{"name": …, "sha256": …, "scopes": […]}}]')
    for name, scope in (("service", "admin"), ("monitoring", "read")):
        digest = hashlib.sha256(secret(folder / name / "token").encode()).hexdigest()
        entries.append({"name": name, "sha256": digest, "scopes": [scope]})
    return json.dumps(entries)


def make_demo_model(folder: Path) -> None:
    """Train a small model on the shipped pairs, unless the model already exists from an earlier start."""
    if folder.exists():
        return
    from reflogp.cli.demo import shipped_data
    from reflogp.cli.demo_model import build_model
    from reflogp.scoring.machine import quiet_libraries

    quiet_libraries()
    rows = [json.loads(line) for line in shipped_data().read_text(encoding="utf-8").splitlines()]
    part = folder.with_name(f"{folder.name}-{secrets.token_hex(8)}")
    build_model(part, [row["prompt"] + row["chosen"] for row in rows], steps=20)  # enough for trying out the service
    part.rename(folder)


def say(text: str) -> None:
    print(f"reflogp: {text}", file=sys.stderr)


def main(arguments: list[str]) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by default, the first process of a container ignores SIGTERM
    if file := os.environ.get("AWS_SECRET_ACCESS_KEY_FILE"):
        os.environ["AWS_SECRET_ACCESS_KEY"] = secret(Path(file))
    if arguments[:1] == ["serve"]:
        if not any(argument.startswith("--config") for argument in arguments):  # the config file sets the tokens
            os.environ["REFLOGP_TOKENS"] = with_own_tokens(os.environ.get("REFLOGP_TOKENS", "[]"), Path("/secrets"))
            say("callers need a token: to print it, run `cat /secrets/service/token` in this container")
        if arguments == ["serve"] and "REFLOGP_REFERENCES" not in os.environ:
            say("REFLOGP_REFERENCES is not set: serving a small demo model as `demo` (created at the first start)")
            make_demo_model(DEMO_MODEL)
            os.environ["REFLOGP_REFERENCES"] = json.dumps({"demo": {"model": str(DEMO_MODEL), "dtype": "float32"}})
    os.execvp("reflogp", ["reflogp", *arguments])


if __name__ == "__main__":
    main(sys.argv[1:])
