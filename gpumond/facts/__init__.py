"""What flows through gpumond: the values of one tick, the messages, and the errors. No I/O."""
