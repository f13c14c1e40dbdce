"""What a request says, and what the rules do to it. Pure."""
