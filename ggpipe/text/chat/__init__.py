"""Conversations as models read them: chat templates."""
