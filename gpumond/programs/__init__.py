"""The daemon's side of the agent socket."""
