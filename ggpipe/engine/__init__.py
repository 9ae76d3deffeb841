"""Ranks at work: sessions, the head, the workers. Drives core over a transport."""
