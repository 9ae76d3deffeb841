"""Ranks at work: sessions, the head, the workers, the launcher. Drives core over a transport."""
