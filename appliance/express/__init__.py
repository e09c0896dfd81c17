"""The express lane: Envoy before the multiplexer, for instances that ask for it."""
