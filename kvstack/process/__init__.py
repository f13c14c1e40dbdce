"""The child process: spawned, watched and stopped."""
