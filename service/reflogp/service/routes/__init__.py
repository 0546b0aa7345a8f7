"""Define the routes of the service. Routes read requests and write responses; other modules of the service do the work."""
