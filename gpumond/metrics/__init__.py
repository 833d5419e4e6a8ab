"""`/metrics`: the frame and the counters of the daemon."""
