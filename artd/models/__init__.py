"""Base models by name: one that a package of the registry carries, or one of the Hugging Face Hub.

Owner of: `$XDG_DATA_HOME/artd/models/`. Invariants: a folder there is whole or absent; it is named after what it was made from (a
package's entry, or a repository and its commit), and is never written again.
"""
