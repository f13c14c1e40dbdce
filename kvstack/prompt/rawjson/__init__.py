"""rawjson."""
