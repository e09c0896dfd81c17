"""tei-appliance: many embedding models on one machine, kept alive by supervisord, reached over one gRPC port."""

__version__ = "0.1.1"
