"""The terminal application: `app` requests frames and handles keys, `screen` and `processes` turn a view into lines."""
