"""Names and signatures of other projects on Penstock's operators and models."""
