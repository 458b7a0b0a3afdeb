"""`artctl samples` and `artctl show`: what models and users wrote, as text."""
