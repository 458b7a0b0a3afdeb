"""Programs that run in the trainer's interpreter: export, score, replay, compare."""
