"""Program `gateway`: HTTP inference in the dialects of OpenAI, Cohere and TEI. A client of the multiplexer."""
