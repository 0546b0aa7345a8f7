"""Score a dataset on several workers, each with its own engine.

The workers run in processes on this machine, on a Ray cluster, or in a service. The run's main process finds bad rows,
duplicate sequences, and misses (sequences that the store lacks). It sends the misses to workers in groups, which are called
units. The workers score the units and commit the values.
"""
