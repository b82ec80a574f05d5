"""OpenAI-compatible HTTP in front of a coordinator."""
