"""Program `multiplexer`: one gRPC port in front of every replica. The only data path of the appliance."""
