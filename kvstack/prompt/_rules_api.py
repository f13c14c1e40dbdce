"""The door to the rules: read packs, compile them with the user's settings, apply them to a request."""
