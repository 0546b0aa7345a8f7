"""The HTTP routes of the service. The routes parse requests and build responses; other modules of the service do the work."""
