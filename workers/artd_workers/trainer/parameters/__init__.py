"""The parameters that a run trains: LoRA adapters or every weight, on one rank or sharded."""
