"""`artctl status`: reads the data folder's state, finds problems and proposes the next command."""
