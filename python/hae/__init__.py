"""HAE lab: record attention traces and study KV-cache eviction on them."""

__version__ = "0.1.0"
