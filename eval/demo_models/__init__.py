"""Three tiny but real models, the tasks they are trained on, and slow reference decoders in plain torch."""
