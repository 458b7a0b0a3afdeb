"""Base models by name: from a Python package or from the Hugging Face Hub.

They are kept in `$XDG_DATA_HOME/artd/models/`. A folder there is complete or absent. It is named after its source (a package's
entry, or a repository and its commit), and its model files never change.
"""
