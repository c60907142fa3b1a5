"""Redis users, each with the commands and the keys it needs and no others."""
