"""Score on a Ray cluster with plain actors, each of which runs one engine. The `ray` extra is required.

Ray Data is not used, for two reasons. Its actor pools endlessly retry a batch that crashes workers, whereas a run must find the
sequence that causes the crashes and leave it out. Also, a single process must decide which rows are duplicates, bad or already
scored.
"""

import os

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray reads it when it is imported
