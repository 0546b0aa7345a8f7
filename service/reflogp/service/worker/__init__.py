"""The worker process, which holds the engines: it runs jobs and scores sequences for the service that started it.

Only the worker process needs torch; the service's own process does not.
"""
