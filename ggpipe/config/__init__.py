"""Settings: frozen records that check themselves, and that the pure core reads."""
