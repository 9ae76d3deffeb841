"""The virtual cluster: the scheduler and the draft of `core`, driven on virtual time."""
