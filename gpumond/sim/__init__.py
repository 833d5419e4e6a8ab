"""A simulated device for the demo, the tests and programs without a GPU."""
