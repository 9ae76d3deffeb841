"""`ggpipe serve`: OpenAI's API and llama-server's over HTTP, a front end of an engine."""
