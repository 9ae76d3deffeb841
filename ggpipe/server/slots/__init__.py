"""Slots: the requests that are served at the same time, and their conversations on disk."""
