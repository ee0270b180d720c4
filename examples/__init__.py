"""Language models, real text and scripts that show tensor-parallel training with compressed exchange."""
