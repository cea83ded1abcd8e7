"""Implementations held to the oracle: what ``penstock check`` runs, and every benchmark before it times."""
