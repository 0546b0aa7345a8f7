"""Scoring on a Ray cluster: plain actors, one engine each. Needs the ray extra; imported by the command line and a service.

Not Ray Data: its actor pools try a sequence that kills its worker again and again, for ever, where it has to be found and left
out; and the plan, with what is a duplicate, a bad row or done, stays in one process (docs/ray.md has the trial).
"""

import os

# Read when ray is imported: nothing is sent home, and what Ray's own parts log stays off the terminal.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")
