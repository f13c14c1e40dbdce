"""What a llama-server can do, and what it says. Pure."""
