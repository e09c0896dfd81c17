"""Program `jobs`: one process for one download or one load of a model, started by supervisord for its number."""
