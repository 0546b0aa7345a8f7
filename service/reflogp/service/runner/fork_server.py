"""Imported by the fork server that starts runners and the processes that read datasets; imports what they need."""

import signal

import reflogp.service.runner.process
import reflogp.service.runner.report
import reflogp.service.runner.run  # noqa: F401

# systemd sends SIGTERM to all processes of a service, but running jobs need the fork server until they have stopped
signal.signal(signal.SIGTERM, signal.SIG_IGN)
