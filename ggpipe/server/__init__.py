"""`ggpipe serve`: OpenAI's, Anthropic's and llama-server's APIs over HTTP."""
