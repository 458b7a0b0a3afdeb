"""`artctl status`: what the data folder says, what is wrong, what to do next."""
