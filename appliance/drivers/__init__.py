"""What touches: one module per outside thing, named after it; none imports another."""
