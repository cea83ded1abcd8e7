"""What ``penstock bench-serve`` measures: load on a server of OpenAI's API, whoever wrote it."""
