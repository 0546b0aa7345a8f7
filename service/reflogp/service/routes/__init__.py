"""Groups of routes. Each knows HTTP and one part of the service; what it does is that part's."""
