"""Checks machines before a run: what each has (`facts`), the links (`links`), and what is wrong with it (`rules`)."""
