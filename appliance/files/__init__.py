"""What several drivers do with files: replace one as a whole, and see whether one has changed."""
