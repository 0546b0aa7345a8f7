"""One run on several workers, an engine each: in processes of this machine, on the nodes of a Ray cluster, or of a service.

The plan, with what is a duplicate, a bad row or done, stays with the run; workers get units of misses and commit them by
themselves.
"""
