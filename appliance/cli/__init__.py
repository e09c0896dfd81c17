"""Program `appliance`: the command line. It speaks the public REST and gRPC interfaces like any other client."""
