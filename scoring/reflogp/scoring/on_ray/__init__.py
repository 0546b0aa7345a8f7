"""Score on a Ray cluster with plain actors, one engine each. Needs the ray extra.

Ray Data is not used: its actor pools would retry a sequence that kills its worker for ever, but a run must find it and leave
it out. Also, one process must decide which rows are duplicates, bad or done. docs/ray.md describes how Ray Data was tried.
"""

import os

# Read when ray is imported: send no usage statistics, and keep the logs of Ray's own processes off the terminal.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")
