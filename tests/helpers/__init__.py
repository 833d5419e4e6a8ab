"""What tests of several folders use: processes to talk to, stand-ins, frames and files."""
