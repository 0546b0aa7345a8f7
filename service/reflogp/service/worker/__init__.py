"""A process of its own around an engine: runs jobs and scores sequences for the service that started it.

Only this package and what it calls need torch; the service's own process does not.
"""
