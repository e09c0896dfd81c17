"""Program `engine`: serves one model over TEI's gRPC protocol where the TEI binary is not installed."""
