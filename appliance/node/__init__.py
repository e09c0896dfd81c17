"""What is true on this machine, looked at now. Nothing here changes what is wanted."""
