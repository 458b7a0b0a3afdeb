"""What a run is made of: its spec, losses, engines and model families."""
