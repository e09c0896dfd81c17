"""Program `control`: the REST management API. It keeps nothing in memory, so any number of workers is right."""
