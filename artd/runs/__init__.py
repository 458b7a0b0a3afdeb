"""A run's life: created, paused for a cause, resumed, rolled back, finished."""
