"""Rule packs as data: one TOML file per client."""
