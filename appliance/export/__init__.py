"""What describes: desired state to the text files of somebody else's process manager. Nothing is written here."""
