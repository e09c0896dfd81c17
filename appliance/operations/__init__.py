"""What changes: the verbs of the product, and making supervisor match what they decided."""
