"""The command lines `artctl` and `artd`: one file for each verb, and what verbs share."""
