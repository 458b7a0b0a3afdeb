"""What is trained: LoRA adapters or every weight, whole or sharded."""
