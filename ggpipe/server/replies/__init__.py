"""Answers over HTTP: the objects of each API, whole or as the streams they come in."""
