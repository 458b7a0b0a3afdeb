"""The APIs that clients speak: each translates its requests into the core's form, and the core's answers back."""
