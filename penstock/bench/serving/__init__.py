"""The measurements of ``penstock bench-serve``: any server with OpenAI's API under load."""
