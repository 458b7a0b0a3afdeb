"""The owners of tables that several services write: every write is a named function here."""
