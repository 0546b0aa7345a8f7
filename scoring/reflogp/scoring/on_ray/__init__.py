"""Score on a Ray cluster, with plain actors that have one engine each. The `ray` extra must be installed.

Ray Data is not used, because its actor pools would retry a sequence that crashes its worker for ever, while a run must find the
sequence and leave it out. Also, a single process must decide which rows are duplicates, bad or done. docs/ray.md describes an
experiment with Ray Data.
"""

import os

# Ray reads these variables when it is imported. They turn off usage statistics, and logs of Ray's processes on the terminal.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")
