"""pattern."""
