"""The HTTP gateway: OpenAI's API in front of one or several coordinators."""
