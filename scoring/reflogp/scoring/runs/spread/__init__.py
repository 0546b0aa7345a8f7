"""Score a dataset on several workers with one engine each: in processes on this machine, on a Ray cluster, or in a service.

The run decides which rows are duplicates, bad or done. Workers receive units of misses (sequences that the store lacks), score
them, and commit the values themselves.
"""
