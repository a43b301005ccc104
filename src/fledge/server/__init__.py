"""The server: OpenAI's API over the engine, which runs in a process of its own."""
