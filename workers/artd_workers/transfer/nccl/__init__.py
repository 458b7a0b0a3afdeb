"""One rank of a communicator over NCCL that torch does not know, and its deadline."""
