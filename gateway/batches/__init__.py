"""OpenAI's Files and Batches APIs: requests that run in the batch lane and survive restarts."""

FILES, BATCHES = "/v1/files", "/v1/batches"
