"""HTTP in: control routes, and everything else through the rules to the upstream."""
