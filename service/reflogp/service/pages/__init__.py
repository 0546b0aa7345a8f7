"""Provide the browser pages' templates, static files, charts, display names of jobs, and tables of the API."""
