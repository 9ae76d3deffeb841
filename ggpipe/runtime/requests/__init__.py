"""Requests as the engine knows them: their prompts, and what is kept while they are served."""
