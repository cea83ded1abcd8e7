"""What ``penstock bench-serve`` measures: the load on any server with OpenAI's API."""
