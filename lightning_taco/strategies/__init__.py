"""Lightning strategies that train with compressed tensor-parallel exchange."""
