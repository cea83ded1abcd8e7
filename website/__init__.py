"""The documentation site: MkDocs' hooks, and the form of docstrings in the reference. `make site` builds it."""
