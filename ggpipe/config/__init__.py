"""Settings: frozen records that validate themselves, one kind per file. Names and defaults are llama.cpp's."""
