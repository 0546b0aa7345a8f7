"""Hold what browser pages are made of: templates, static files, charts, names of jobs, and tables of the API."""
