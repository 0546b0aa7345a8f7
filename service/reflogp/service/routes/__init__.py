"""Define the routes of the service. Routes translate HTTP; the parts of the service do the work."""
