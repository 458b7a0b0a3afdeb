"""Trajectories on their way in: by value or by reference, into groups that seal."""
