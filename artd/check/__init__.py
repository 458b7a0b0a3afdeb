"""Checks a database and the files beside it from outside, for `artd check`; everything here only reads.

A check promises what holds after *every* commit, so it holds for a crashed folder before its recovery, for a running
daemon's snapshot and for a backup alike. What a crash may leave behind, and the next boot removes, is a note, never a
violation.
"""
