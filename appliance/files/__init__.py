"""What several drivers do with files: replace, open and compare them, and connect to sockets among them. What a client
of a socket may take of time."""
