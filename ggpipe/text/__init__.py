"""Text around the model: conversations and tool calls, grammars, embeddings. Nothing of libllama."""
