"""The console: pages for people, on the port of the management API. They show and do what it does."""
