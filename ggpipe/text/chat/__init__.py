"""Conversations: chat templates, reasoning and tool calls."""
