"""Stand-ins for tests: rows and folders of a store, a recording wire, and workers that speak the real protocol."""
