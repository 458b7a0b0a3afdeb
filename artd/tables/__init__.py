"""The owners of tables: every write of one is a named function of its module here."""
