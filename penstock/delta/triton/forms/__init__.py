"""Forms of the passes: which kernel can compute what, and its launches. ``lists.py`` has their order."""
