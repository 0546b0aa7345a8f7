"""Score a dataset on several workers with one engine each: in processes on this machine, on a Ray cluster, or in a service.

The run's main process finds bad rows, duplicate sequences, and misses (sequences that the store lacks). It sends the misses to
workers in units; the workers score them and commit the values.
"""
