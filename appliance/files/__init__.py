"""What several drivers do with files: replace, open and compare them, and connect to sockets among them. How long a
client may take to send and to read."""
