"""Program `tei`: proves the files of a model, then becomes the TEI binary."""
