"""Score one run on several workers with one engine each: processes of this machine, nodes of a Ray cluster, or of a service.

The run decides which rows are duplicates, bad or done. Workers get units of misses, score them, and commit the values
themselves.
"""
