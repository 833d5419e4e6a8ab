"""What tests of several folders use: processes to talk to, fakes, frames and files."""
