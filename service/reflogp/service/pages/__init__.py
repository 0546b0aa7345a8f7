"""The service's web pages: templates, static files, charts, and functions that prepare data for the templates."""
