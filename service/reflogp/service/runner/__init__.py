"""The process that runs one job: it does what `reflogp score` does, on the devices that the service lends it.

It reads the dataset, looks its sequences up, sends the misses to workers, which score and commit them, and writes the result.
"""
