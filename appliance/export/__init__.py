"""Describes: desired state -> the text files of a process manager. Nothing is written here."""
