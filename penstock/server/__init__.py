"""The OpenAI-compatible HTTP server on the engine. See ``docs/server.md``."""
