"""Fakes, builders and references for tests."""
