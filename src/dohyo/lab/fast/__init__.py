"""What makes training fast: replicas in one program, compiled, and on a CUDA GPU recorded. Read it last."""
