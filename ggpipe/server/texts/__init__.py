"""Answers that are texts: the bodies of requests, the objects of each API, and the streams they come in."""
