"""The commands of the command line that belong to no feature, and their parser."""
